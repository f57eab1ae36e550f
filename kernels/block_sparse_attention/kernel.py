"""Forward kernels of block-sparse attention, keys outer (README.md, "Triton").

An item is a piece of one row of the reverse index: one block of keys and some of the queries that chose it, sorted.
Its program keeps K and V of the block and walks over tiles of whole pairs, all heads of each, up to ROWS rows.
Softmax over one block alone needs no running maximum: each (query, slot, head) gets a normalised partial output and its
lse, and a second kernel adds the slots of a query in order.
"""

import triton
import triton.language as tl


@triton.jit
def find_item(row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk):
    """This program's row, its pairs [start, end), and where the masked ones end; end = start for a spare program."""
    item = tl.load(chunk_item_ptr + chunk) + tl.program_id(0)
    is_spare = item >= tl.load(chunk_item_ptr + chunk + 1)
    row = tl.load(item_row_ptr + item, mask=~is_spare, other=0)
    row_start = tl.load(row_start_ptr + row)
    num_pairs = (tl.load(row_start_ptr + row + 1) - row_start).to(tl.int64)
    first_item = tl.load(row_item_ptr + row)
    num_items = tl.maximum(tl.load(row_item_ptr + row + 1) - first_item, 1)
    # Items of one row differ by one pair at most.
    start = row_start + (num_pairs * (item - first_item) // num_items).to(tl.int32)
    end = row_start + (num_pairs * (item - first_item + 1) // num_items).to(tl.int32)
    return row, start, tl.where(is_spare, start, end), tl.load(local_end_ptr + row), item


@triton.jit
def load_block(ptr, first_key, num_keys, group, stride_t, stride_g, SIZE: tl.constexpr, DIM: tl.constexpr):
    """Keys [SIZE, DIM] of one block; 0 past its end, so that nothing outside the document is read."""
    offs = tl.arange(0, SIZE)
    address = (first_key + offs).to(tl.int64)[:, None] * stride_t + group * stride_g + tl.arange(0, DIM)[None, :]
    return tl.load(ptr + address, mask=(offs < num_keys)[:, None], other=0.0)


@triton.jit
def mask_end(start, end, local_end, STEP: tl.constexpr):
    """Where the tiles of STEP pairs that hold pairs before `local_end` are over."""
    return start + tl.cdiv(tl.maximum(tl.minimum(local_end, end) - start, 0), STEP) * STEP


@triton.jit
def pair_rows(pairs_ptr, first, end, HEADS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of the pairs from number `first`, PLACES for the HEADS of each: which exist, their pair and their head.

    Rows that only fill the tile up have a pair and a head that exist.
    """
    offs = tl.arange(0, ROWS)
    number = first + offs // PLACES
    head = offs % PLACES
    is_real = (number < end) & (offs < ROWS // PLACES * PLACES) & (head < HEADS)
    if HEADS < PLACES:
        head = tl.where(head < HEADS, head, head - (PLACES - HEADS))
        if HEADS % 2 == 0:  # so that two heads are read at a time
            head = tl.max_contiguous(tl.multiple_of(head, 2), 2)
    pair = tl.load(pairs_ptr + tl.minimum(number, end - 1))
    return is_real, pair, head


@triton.jit
def load_rows(ptr, pair, PER_QUERY: tl.constexpr, head, stride_t, stride_n, DIM: tl.constexpr):
    """[rows, DIM]: the rows of a query tensor that belong to pairs and heads."""
    address = (pair // PER_QUERY).to(tl.int64) * stride_t + head * stride_n
    return tl.load(ptr + address[:, None] + tl.arange(0, DIM)[None, :])


@triton.jit
def size_of(tile):
    """log2 of the largest |element|, rounded up."""
    return tl.ceil(tl.log2(tl.maximum(tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0), 1e-30)))


@triton.jit
def _value_sizes_kernel(
    value_ptr,
    block_table_ptr,
    size_ptr,
    stride_vt,
    stride_vg,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per (block, group): log2 of its largest |value|, which places 16-bit results in fp16's range.

    It depends on the block's own tokens alone.
    """
    block = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first_key = tl.load(block_table_ptr + 3 * block)
    num_keys = tl.load(block_table_ptr + 3 * block + 1)
    value = load_block(value_ptr, first_key, num_keys, group, stride_vt, stride_vg, BLOCK_SIZE, HEAD_DIM)
    tl.store(size_ptr + block.to(tl.int64) * NUM_GROUPS + group, size_of(value))


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_attention_fwd_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_table_ptr,
    block_table_ptr,
    value_size_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    item_row_ptr,
    chunk_item_ptr,
    partial_ptr,
    partial_lse_ptr,
    partial_weight_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale_log2,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per item: normalised partial outputs and their lse (in log2) for each pair and head."""
    row, start, end, local_end, _ = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk
    )
    if start < end:
        block = row % num_blocks
        group = ((row // num_blocks) % NUM_GROUPS).to(tl.int64)
        first_key = tl.load(block_table_ptr + 3 * block)
        num_keys = tl.load(block_table_ptr + 3 * block + 1)
        # [BLOCK_SIZE, HEAD_DIM]
        key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        value = load_block(value_ptr, first_key, num_keys, group, stride_vt, stride_vg, BLOCK_SIZE, HEAD_DIM)
        unit = tl.load(value_size_ptr + block.to(tl.int64) * NUM_GROUPS + group) - 15.0
        to_unit = tl.exp2(-unit)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        offs_d = tl.arange(0, HEAD_DIM)
        PER_QUERY: tl.constexpr = NUM_GROUPS * NUM_SELECTED
        # Tiles with queries of this block, which need the causal mask, then the others.
        STEP: tl.constexpr = ROWS // HEADS
        split = mask_end(start, end, local_end, STEP)
        for part in tl.static_range(2):
            first = start if part == 0 else split
            last = tl.minimum(split, end) if part == 0 else end
            # Queries are read one tile ahead into registers, and their pairs two ahead, as the addresses wait for them.
            # Triton's own pipeline would read them at the end of the tile before and wait.
            next_real, next_pair, head = pair_rows(pairs_ptr, first, end, HEADS, HEADS, ROWS)
            next_query = load_rows(
                query_ptr, next_pair, PER_QUERY, group * HEADS + head, stride_qt, stride_qn, HEAD_DIM
            )
            later_real, later_pair, _head = pair_rows(pairs_ptr, first + STEP, end, HEADS, HEADS, ROWS)
            for number in tl.range(first, last, STEP, num_stages=1):
                is_real, pair, query = next_real, next_pair, next_query
                next_real, next_pair = later_real, later_pair
                next_query = load_rows(
                    query_ptr, next_pair, PER_QUERY, group * HEADS + head, stride_qt, stride_qn, HEAD_DIM
                )
                later_real, later_pair, _head = pair_rows(pairs_ptr, number + 2 * STEP, end, HEADS, HEADS, ROWS)
                # [ROWS, BLOCK_SIZE]
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                if part == 0:
                    last_key = tl.load(query_table_ptr + (pair // PER_QUERY) * 3 + 2)
                    scores = tl.where(key_row[None, :] <= last_key[:, None], scores, float("-inf"))
                largest = tl.max(scores, 1) * scale_log2
                probs = tl.exp2(scores * scale_log2 - largest[:, None])
                total = tl.sum(probs, 1)
                output = tl.dot(probs.to(value.dtype), value, input_precision=PRECISION)
                output = output * (to_unit / total)[:, None]
                place = (pair - first_pair).to(tl.int64) * HEADS + head
                lse = largest + tl.log2(total)
                tl.store(partial_lse_ptr + place, lse, mask=is_real)
                tl.store(partial_weight_ptr + place, lse + unit, mask=is_real)
                tl.store(
                    partial_ptr + place[:, None] * HEAD_DIM + offs_d[None, :],
                    output.to(partial_ptr.dtype.element_ty),
                    mask=is_real[:, None],
                    cache_modifier=".cs",
                )


@triton.jit
def row_heads(first_query, num_queries, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Of ROWS (query, head) rows of a chunk: which exist, row in the chunk, query row, head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_queries.to(tl.int64) * NUM_HEADS
    return mask, row, first_query + row // NUM_HEADS, row % NUM_HEADS


@triton.jit
def head_rows(
    first_query, num_queries, query_table_ptr, NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    """The same, with the number of the document's first block and the position."""
    mask, row, query_row, head = row_heads(first_query, num_queries, NUM_GROUPS * HEADS, ROWS)
    first_block = tl.load(query_table_ptr + query_row * 3, mask=mask, other=0)
    position = tl.load(query_table_ptr + query_row * 3 + 1, mask=mask, other=-1)
    return mask, row, query_row, head, first_block, position


@triton.jit
def row_blocks(
    block_indices_ptr, query_row, group, position, mask, stride_it, stride_ig, stride_ik,
    NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Block ids [rows, SLOTS] of each row, -1 where there is none, and which of them the row sees; those come first."""
    slots = tl.arange(0, SLOTS)[None, :]
    ids = tl.load(
        block_indices_ptr + (query_row * stride_it + group * stride_ig)[:, None] + slots * stride_ik,
        mask=mask[:, None] & (slots < NUM_SELECTED),
        other=-1,
    )
    return ids, (ids >= 0) & (ids * BLOCK_SIZE <= position[:, None])


@triton.jit(do_not_specialize=["first_query", "num_queries"])
def _combine_kernel(
    partial_ptr,
    partial_lse_ptr,
    partial_weight_ptr,
    block_indices_ptr,
    query_table_ptr,
    output_ptr,
    lse_ptr,
    first_query,
    num_queries,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """output = sum over slots, in order, of exp(lse_slot - lse) partial_slot, for ROWS (query, head) rows."""
    mask, row, query_row, query_head, _, position = head_rows(
        first_query, num_queries, query_table_ptr, NUM_GROUPS, HEADS, ROWS
    )
    group = query_head // HEADS
    # [ROWS]: slot 0 of the row's head
    first_place = (row // HEADS) * (NUM_SELECTED * HEADS) + query_head % HEADS
    slots = tl.arange(0, SLOTS)
    # [ROWS, SLOTS]
    _ids, is_used = row_blocks(
        block_indices_ptr, query_row, group, position, mask, stride_it, stride_ig, stride_ik,
        NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    slot_lse = tl.load(
        partial_lse_ptr + first_place[:, None] + slots[None, :] * HEADS, mask=is_used, other=float("-inf")
    )
    # No id has to be waited for below.
    num_used = tl.sum(is_used.to(tl.int32), 1)
    largest = tl.max(slot_lse, 1)
    is_empty = largest == float("-inf")
    shift = tl.where(is_empty, 0.0, largest)
    total = tl.sum(tl.exp2(slot_lse - shift[:, None]), 1)
    lse = tl.where(is_empty, float("-inf"), shift + tl.log2(tl.where(is_empty, 1.0, total)))
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    output = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    for slot in tl.range(0, tl.max(num_used, 0), num_stages=STAGES):
        is_kept = slot < num_used
        place = first_place + slot * HEADS
        # The slot is in units of 2^unit.
        weight = tl.load(partial_weight_ptr + place, mask=is_kept, other=float("-inf"))
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + offs_d, mask=is_kept[:, None], other=0.0)
        output += tl.exp2(weight - shift)[:, None] * partial.to(tl.float32)
    output *= (1.0 / tl.where(is_empty, 1.0, total))[:, None]
    place = query_row * (NUM_GROUPS * HEADS) + query_head
    # From log2 to the natural logarithm.
    tl.store(lse_ptr + place, lse * 0.6931471805599453, mask=mask)
    tl.store(
        output_ptr + place[:, None] * HEAD_DIM + offs_d, output.to(output_ptr.dtype.element_ty), mask=mask[:, None]
    )
