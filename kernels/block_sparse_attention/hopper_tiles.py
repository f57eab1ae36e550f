"""What the two Hopper kernels share: sizes, the item of a program, a block's keys in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of a tile; block size and head dim; what TMA copies of a row at once.
ROWS = gl.constexpr(64)
SIZE = gl.constexpr(128)
HALF = gl.constexpr(64)
# Registers of a warp that only copies: the least that there is.
COPY_REGISTERS = gl.constexpr(24)


@gluon.jit
def find_item(item, row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr):
    """The item's row, its pairs [start, end), where masked ones end, its number in the row, the row's items."""
    row = gl.load(item_row_ptr + item)
    row_start = gl.load(row_start_ptr + row)
    num_pairs = (gl.load(row_start_ptr + row + 1) - row_start).to(gl.int64)
    first_item = gl.load(row_item_ptr + row)
    number = item - first_item
    num_items = gl.load(row_item_ptr + row + 1) - first_item
    start = row_start + (num_pairs * number // num_items).to(gl.int32)
    end = row_start + (num_pairs * (number + 1) // num_items).to(gl.int32)
    return row, start, end, gl.load(local_end_ptr + row), number, num_items


@gluon.jit
def load_block(ptr, first_key, num_keys, stride_t, smem):
    """Keys [SIZE, SIZE] of one block; 0 past its end, so that nothing outside the document is read."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    offs = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    address = (first_key + offs).to(gl.int64)[:, None] * stride_t
    address += gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))[None, :]
    smem.store(gl.load(ptr + address, mask=(offs < num_keys)[:, None], other=0.0))
