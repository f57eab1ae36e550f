"""What the two Hopper kernels share: sizes, the item of a program, and what passes through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon_support import tma_load, tma_store

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


@gluon.jit
def load_pairs(
    desc, boxes, stage, full, empty, tile, pairs_ptr, first, end, first_head,
    PER_QUERY: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the rows of a tile's pairs, once its stage is free; heads past the last one are 0."""
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (tile // STAGES + 1) & 1)
    mbarrier.expect(bar, ROWS * SIZE * 2)
    for j in gl.static_range(STEP):
        row = gl.load(pairs_ptr + gl.minimum(first + j, end - 1)) // PER_QUERY
        for half in gl.static_range(2):
            tma_load(desc, [row, first_head, half * HALF], bar, boxes.index((2 * stage + half) * STEP + j))


@gluon.jit
def store_pairs(desc, boxes, stage, pairs_ptr, first, end, first_pair, STEP: gl.constexpr):
    """Copy the rows of a tile's pairs to their slots; TMA leaves out what is past the last head."""
    for j in gl.static_range(STEP):
        if first + j < end:
            slot = gl.load(pairs_ptr + first + j) - first_pair
            for half in gl.static_range(2):
                tma_store(desc, [slot, 0, half * HALF], boxes.index((2 * stage + half) * STEP + j))
