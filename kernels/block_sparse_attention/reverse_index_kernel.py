"""Kernels around the sort of the reverse index: its keys before, rows and items after (reverse_index.py).

A sorted key is `2 * row + is_past`, so one order holds the rows and, in a row, the pairs that need the causal mask
first. Example: keys [0, 0, 1, 4, 5, 6], 3 rows, so that 6 stands for an invisible pair: row 0 is pairs 0 to 2, the
masked ones end at 2; row 1 is empty; row 2 is pairs 3 and 4, masked until 4.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "num_rows", "query_chunk"])
def _pair_keys_kernel(
    block_indices_ptr,
    query_table_ptr,
    key_ptr,
    num_pairs,
    num_blocks,
    num_rows,
    query_chunk,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Key of each pair, in the order of the pairs; `2 * num_rows`, past every row, for what a query cannot see."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = pair < num_pairs
    query = pair // (NUM_GROUPS * NUM_SELECTED)
    group = (pair // NUM_SELECTED) % NUM_GROUPS
    place = query.to(tl.int64) * stride_it + group * stride_ig + (pair % NUM_SELECTED) * stride_ik
    block = tl.load(block_indices_ptr + place, mask=mask, other=-1)
    table_row = query.to(tl.int64) * 3
    first_block = tl.load(query_table_ptr + table_row, mask=mask, other=0)
    position = tl.load(query_table_ptr + table_row + 1, mask=mask, other=-1)
    own_block = position // BLOCK_SIZE
    is_visible = (block >= 0) & (position >= 0) & (block <= own_block)
    row = ((query // query_chunk) * NUM_GROUPS + group) * num_blocks + first_block + block
    key = tl.where(is_visible, 2 * row + (block < own_block).to(tl.int32), 2 * num_rows)
    tl.store(key_ptr + pair, key.to(key_ptr.dtype.element_ty), mask=mask)


@triton.jit
def count_below(sorted_ptr, number, num_pairs, num_bits):
    """How many of the `num_pairs` sorted keys are below `number`, for a tensor of numbers; < 2^num_bits."""
    count = number * 0
    for bit in tl.range(0, num_bits):
        # The counts tried are sums of different powers of two below 2^31: they stay in range.
        tried = count + (1 << (num_bits - 1 - bit))
        fits = tried <= num_pairs
        key = tl.load(sorted_ptr + tried - 1, mask=fits, other=0).to(tl.int32)
        count = tl.where(fits & (key < number), tried, count)
    return count


@triton.jit
def row_tile(program, rows_per_chunk, ROWS: tl.constexpr):
    """ROWS rows of one chunk: the chunk, its number of tiles, the rows and which of them exist."""
    tiles = tl.cdiv(rows_per_chunk, ROWS)
    chunk = program // tiles
    offs = (program % tiles) * ROWS + tl.arange(0, ROWS)
    return chunk, tiles, chunk * rows_per_chunk + offs, offs < rows_per_chunk


@triton.jit(do_not_specialize=["num_pairs", "num_bits", "num_rows", "rows_per_chunk", "num_tiles"])
def _find_rows_kernel(
    sorted_ptr,
    order_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    tile_totals_ptr,
    num_pairs,
    num_bits,
    num_rows,
    rows_per_chunk,
    num_tiles,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The first `num_tiles` programs: borders of ROWS rows, and their numbers of items and slots added up.

    The others copy the sort's 64-bit order to 32 bits.
    """
    program = tl.program_id(0)
    if program < num_tiles:
        _, _, row, exists = row_tile(program, rows_per_chunk, ROWS)
        start = count_below(sorted_ptr, 2 * row, num_pairs, num_bits)
        local_end = count_below(sorted_ptr, 2 * row + 1, num_pairs, num_bits)
        end = count_below(sorted_ptr, 2 * row + 2, num_pairs, num_bits)
        tl.store(row_start_ptr + row, start, mask=exists)
        tl.store(row_start_ptr + row + 1, end, mask=exists & (row == num_rows - 1))
        tl.store(local_end_ptr + row, local_end, mask=exists)
        items = tl.where(exists, tl.cdiv(end - start, ITEM), 0)
        tl.store(tile_totals_ptr + 2 * program, tl.sum(items, 0))
        tl.store(tile_totals_ptr + 2 * program + 1, tl.sum(tl.where(items > 1, items, 0), 0))
    else:
        pair = (program - num_tiles) * PAIRS + tl.arange(0, PAIRS)
        mask = pair < num_pairs
        tl.store(pairs_ptr + pair, tl.load(order_ptr + pair, mask=mask, other=0).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_chunk"])
def _number_items_kernel(
    row_start_ptr,
    tile_totals_ptr,
    row_item_ptr,
    row_slot_ptr,
    item_row_ptr,
    chunk_item_ptr,
    num_rows,
    rows_per_chunk,
    ITEM: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Number the items of ROWS rows, and the slots of those with several items, after all rows of earlier tiles."""
    program = tl.program_id(0)
    chunk, tiles, row, mask = row_tile(program, rows_per_chunk, ROWS)
    items_before = tl.zeros((TILES,), dtype=tl.int32)
    slots_before = tl.zeros((TILES,), dtype=tl.int32)
    for first in tl.range(0, program, TILES):
        tile = first + tl.arange(0, TILES)
        is_before = tile < program
        items_before += tl.load(tile_totals_ptr + 2 * tile, mask=is_before, other=0)
        is_in_chunk = is_before & (tile >= chunk * tiles)
        slots_before += tl.load(tile_totals_ptr + 2 * tile + 1, mask=is_in_chunk, other=0)
    start = tl.load(row_start_ptr + row, mask=mask, other=0)
    end = tl.load(row_start_ptr + row + 1, mask=mask, other=0)
    items = tl.cdiv(end - start, ITEM)
    item_end = tl.sum(items_before, 0) + tl.cumsum(items, 0)
    slot_end = tl.sum(slots_before, 0) + tl.cumsum(tl.where(items > 1, items, 0), 0)
    first_item = item_end - items
    tl.store(row_item_ptr + row, first_item, mask=mask)
    tl.store(row_slot_ptr + row, slot_end - items, mask=mask)
    tl.store(chunk_item_ptr + row // rows_per_chunk, first_item, mask=mask & (row % rows_per_chunk == 0))
    is_last = mask & (row == num_rows - 1)
    tl.store(row_item_ptr + row + 1, item_end, mask=is_last)
    tl.store(chunk_item_ptr + row // rows_per_chunk + 1, item_end, mask=is_last)
    for number in tl.range(0, tl.max(items, 0)):
        tl.store(item_row_ptr + first_item + number, row, mask=number < items)
