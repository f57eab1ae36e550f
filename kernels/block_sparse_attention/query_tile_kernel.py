"""Forward kernels of block-sparse attention, queries outer (README.md, "Triton").

A tile is some consecutive queries of one fragment and one group, with all heads of the group: (query, head) rows. It
walks once over every block that any of its queries kept, and a bit for each query says which rows the block counts for.
So the softmax runs on in registers, and nothing partial is stored.

Example: blocks of 4, a tile of the queries of positions 7 to 9 with ids [0, 1], [0, 2], [1, 2]. Its list of
(block, bits) is (0, 0b011), (1, 0b101), (2, 0b110); block 0 alone lies before all its queries and needs no causal mask.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(tiles_ptr, tile):
    """First query row, number of queries, position of the first and key row of position 0; see `query_tiles`."""
    row = tiles_ptr + tile.to(tl.int64) * 4
    return tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32), tl.load(row + 3)


@triton.jit(do_not_specialize=["list_size"])
def _list_blocks_kernel(
    block_indices_ptr,
    tiles_ptr,
    list_ptr,
    count_ptr,
    list_size,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program per (tile, group): its (block, bits), ascending, and how many come before all its queries and in all.

    Ids that a query cannot see count for nothing.
    """
    program = tl.program_id(0)
    first_query, num_queries, first_position, _ = load_tile(tiles_ptr, program // NUM_GROUPS)
    number = tl.arange(0, QUERIES)
    is_query = number < num_queries
    ids_ptr = block_indices_ptr + (first_query + number) * stride_it + (program % NUM_GROUPS).to(tl.int64) * stride_ig
    own_block = (first_position + number) // BLOCK_SIZE
    tile_list = list_ptr + program.to(tl.int64) * list_size * 2
    num_past = 0
    num_used = 0
    for first in tl.range(0, (first_position + num_queries - 1) // BLOCK_SIZE + 1, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        # [QUERIES, BLOCKS]
        is_kept = tl.zeros((QUERIES, BLOCKS), dtype=tl.int1)
        for slot in tl.range(0, NUM_SELECTED):
            ids = tl.load(ids_ptr + slot * stride_ik, mask=is_query, other=-1)
            ids = tl.where(ids <= own_block, ids, -1)
            is_kept = is_kept | (ids[:, None] == block[None, :])
        bits = tl.sum(is_kept.to(tl.int32) << number[:, None], 0)
        is_used = (bits != 0).to(tl.int32)
        place = num_used + tl.cumsum(is_used, 0) - 1
        tl.store(tile_list + 2 * place, block, mask=is_used != 0)
        tl.store(tile_list + 2 * place + 1, bits, mask=is_used != 0)
        num_used += tl.sum(is_used, 0)
        num_past += tl.sum(tl.where(block < first_position // BLOCK_SIZE, is_used, 0), 0)
    tl.store(count_ptr + 2 * program, num_past)
    tl.store(count_ptr + 2 * program + 1, num_used)


@triton.jit
def load_entry(tile_list, number, exists):
    """Block and bits of one entry of a tile's list."""
    block = tl.load(tile_list + 2 * number, mask=exists, other=0)
    return block, tl.load(tile_list + 2 * number + 1, mask=exists, other=0)


@triton.jit(do_not_specialize=["list_size"])
def _query_tile_fwd_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    tiles_ptr,
    list_ptr,
    count_ptr,
    output_ptr,
    lse_ptr,
    list_size,
    scale_log2,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    NUM_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile, group): softmax over its list, COLUMNS keys at a time; 0 and -inf for an empty row."""
    program = tl.program_id(0)
    group = (program % NUM_GROUPS).to(tl.int64)
    first_query, num_queries, first_position, first_key = load_tile(tiles_ptr, program // NUM_GROUPS)
    # Rows that only fill the tile up repeat its last one.
    offs = tl.arange(0, ROWS)
    row = tl.minimum(offs, num_queries * HEADS - 1)
    number = row // HEADS
    position = first_position + number
    query_head = group * HEADS + row % HEADS
    query_row = first_query + number
    offs_d = tl.arange(0, HEAD_DIM)
    offs_k = tl.arange(0, COLUMNS)
    # [ROWS, HEAD_DIM]
    query = tl.load(query_ptr + (query_row * stride_qt + query_head * stride_qn)[:, None] + offs_d[None, :])
    key_start = key_ptr + group * stride_kg + offs_d[None, :]
    value_start = value_ptr + group * stride_vg + offs_d[None, :]
    tile_list = list_ptr + program.to(tl.int64) * list_size * 2
    PIECES: tl.constexpr = BLOCK_SIZE // COLUMNS
    num_past = tl.load(count_ptr + 2 * program) * PIECES
    num_used = tl.load(count_ptr + 2 * program + 1) * PIECES
    last_position = first_position + num_queries - 1
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    output = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    # Blocks before all queries of the tile, then those that need the causal mask.
    for part in tl.static_range(2):
        first = 0 if part == 0 else num_past
        last = num_past if part == 0 else num_used
        # An entry is read one step ahead, as the keys wait for it.
        next_block, next_bits = load_entry(tile_list, first // PIECES, first < last)
        for i in tl.range(first, last, num_stages=STAGES):
            start = next_block * BLOCK_SIZE + (i % PIECES) * COLUMNS
            is_kept = ((next_bits >> number) & 1) != 0
            next_block, next_bits = load_entry(tile_list, (i + 1) // PIECES, i + 1 < last)
            key_row = (first_key + start + offs_k)[:, None]
            # [COLUMNS, HEAD_DIM]
            key_address = key_start + key_row * stride_kt
            value_address = value_start + key_row * stride_vt
            if part == 0:
                key = tl.load(key_address)
                value = tl.load(value_address)
            else:
                is_key = (start + offs_k <= last_position)[:, None]
                key = tl.load(key_address, mask=is_key, other=0.0)
                value = tl.load(value_address, mask=is_key, other=0.0)
            # [ROWS, COLUMNS]
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            if part == 1:
                scores = tl.where((start + offs_k)[None, :] <= position[:, None], scores, float("-inf"))
            # A row that did not keep the block subtracts inf and so gets P = 0. The first piece of a block shows at
            # least one key to each row that kept it, so `largest` is finite from then on.
            higher = tl.where(is_kept, tl.maximum(largest, tl.max(scores, 1) * scale_log2), largest)
            probs = tl.exp2(scores * scale_log2 - tl.where(is_kept, higher, float("inf"))[:, None])
            decay = tl.where(is_kept, tl.exp2(largest - higher), 1.0)
            total = total * decay + tl.sum(probs, 1)
            output = tl.dot(probs.to(value.dtype), value, output * decay[:, None], input_precision=PRECISION)
            largest = higher
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    output = output / total[:, None]
    # From log2 to the natural logarithm; an empty row's largest is -inf.
    lse = (largest + tl.log2(total)) * 0.6931471805599453
    is_real = offs < num_queries * HEADS
    place = query_row * (NUM_GROUPS * HEADS) + query_head
    tl.store(lse_ptr + place, lse, mask=is_real)
    tl.store(
        output_ptr + place[:, None] * HEAD_DIM + offs_d[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=is_real[:, None],
    )
