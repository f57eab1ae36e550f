"""Backward kernels of block-sparse attention, keys outer, without atomics (README.md, "Triton").

P is computed again from q, k and lse. dK and dV of an item stay in registers; a row of one item adds them to the
gradient itself, a row of several writes them to slots that a second kernel adds in order. dQ goes to one slot for each
(query, slot, head), in a unit of the row that keeps every slot of it in fp16's range. With TEACHER, the mean of P over
the group's heads is left for the indexer's KL.

dQ uses keys without what a document's keys have in common (centring_kernel.py).
"""

import triton
import triton.language as tl

from .kernel import find_item, head_rows, load_block, mask_end, pair_rows, row_blocks, row_heads

# P is stored in units of 2^-14: fp16 then has all its bits down to a probability of 2^-28.
TEACHER_UNIT = tl.constexpr(2.0**-14)


@triton.jit
def kept_blocks(
    block_indices_ptr, query_row, group, table_group, first_block, position, mask,
    stride_it, stride_ig, stride_ik,
    TABLE_GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Of each row: places of its blocks in tables [blocks, TABLE_GROUPS], which of them are real, visible tokens."""
    ids, is_used = row_blocks(
        block_indices_ptr, query_row, group, position, mask, stride_it, stride_ig, stride_ik,
        NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    num_tokens = tl.where(is_used, tl.minimum(position[:, None] - ids * BLOCK_SIZE + 1, BLOCK_SIZE), 0)
    place = (first_block[:, None] + ids).to(tl.int64) * TABLE_GROUPS + table_group[:, None]
    return place, is_used, tl.sum(num_tokens, 1)


@triton.jit
def slot_unit(size):
    """The power of two in whose units numbers below 2^size lie below 2^15."""
    return tl.exp2(tl.minimum(tl.maximum(size - 15.0, -100.0), 100.0))


@triton.jit(do_not_specialize=["num_queries"])
def _row_sizes_kernel(
    value_size_ptr,
    key_size_ptr,
    block_indices_ptr,
    query_table_ptr,
    row_size_ptr,
    num_queries,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Largest value size and key size [t_q, g, 2] among the blocks of ROWS (query, group) rows."""
    mask, row, query_row, group, first_block, position = head_rows(0, num_queries, query_table_ptr, NUM_GROUPS, 1, ROWS)
    place, is_used, _ = kept_blocks(
        block_indices_ptr, query_row, group, group, first_block, position, mask,
        stride_it, stride_ig, stride_ik, NUM_GROUPS, NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    value_size = tl.max(tl.load(value_size_ptr + place, mask=is_used, other=-100.0), 1)
    key_size = tl.max(tl.load(key_size_ptr + place, mask=is_used, other=-100.0), 1)
    tl.store(row_size_ptr + 2 * row, value_size, mask=mask)
    tl.store(row_size_ptr + 2 * row + 1, key_size, mask=mask)


@triton.jit(do_not_specialize=["num_queries"])
def _delta_kernel(
    output_ptr,
    grad_ptr,
    row_size_ptr,
    delta_ptr,
    unit_ptr,
    num_queries,
    stride_ot,
    stride_on,
    stride_gt,
    stride_gn,
    NUM_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = <output, grad> of ROWS (query, head) rows, and the unit of their slots of dQ."""
    mask, row, query_row, head = row_heads(0, num_queries, NUM_GROUPS * HEADS, ROWS)
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    output = tl.load(
        output_ptr + (query_row * stride_ot + head * stride_on)[:, None] + offs_d, mask=mask[:, None], other=0.0
    ).to(tl.float32)
    grad = tl.load(
        grad_ptr + (query_row * stride_gt + head * stride_gn)[:, None] + offs_d, mask=mask[:, None], other=0.0
    ).to(tl.float32)
    delta = tl.sum(output * grad, 1)
    place = 2 * (query_row * NUM_GROUPS + head // HEADS)
    value_size = tl.load(row_size_ptr + place, mask=mask, other=0.0)
    key_size = tl.load(row_size_ptr + place + 1, mask=mask, other=0.0)
    # |dS (K - c)| <= max |k - c| (max |v| sum |grad| + |delta|), each at most a power of two.
    grad_size = tl.ceil(tl.log2(tl.maximum(tl.sum(tl.abs(grad), 1), 1e-30)))
    delta_size = tl.ceil(tl.log2(tl.maximum(tl.abs(delta), 1e-30)))
    tl.store(delta_ptr + row, delta, mask=mask)
    size = key_size + tl.maximum(value_size + grad_size, delta_size) + 1.0
    tl.store(unit_ptr + row, slot_unit(size), mask=mask)


@triton.jit
def add_or_put(
    grad_ptr, slot_ptr, tile, is_only, slot, first_key, num_keys, group, SIZE: tl.constexpr, DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Add a tile [SIZE, DIM] to grad [t_k, g, DIM], or write it to its slot."""
    offs = tl.arange(0, SIZE)
    offs_d = tl.arange(0, DIM)
    if is_only:
        place = (first_key + offs).to(tl.int64) * NUM_GROUPS + group
        mask = (offs < num_keys)[:, None]
        address = grad_ptr + place[:, None] * DIM + offs_d[None, :]
        tl.store(address, tl.load(address, mask=mask, other=0.0) + tile, mask=mask)
    else:
        place = slot.to(tl.int64) * SIZE + offs
        tl.store(slot_ptr + place[:, None] * DIM + offs_d[None, :], tile)


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_attention_bwd_kernel(
    query_ptr,
    key_ptr,
    centred_ptr,
    value_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    unit_ptr,
    query_table_ptr,
    block_table_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    row_slot_ptr,
    item_row_ptr,
    chunk_item_ptr,
    dq_partial_ptr,
    teacher_ptr,
    dk_ptr,
    dv_ptr,
    dk_slot_ptr,
    dv_slot_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_gt,
    stride_gn,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    TEACHER: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per item. Tiles are transposed: [BLOCK_SIZE keys, ROWS = queries x PLACES], PLACES a power of two.

    With n/g = 6 that leaves a quarter of the rows empty and is still faster: rows of 6 spill registers.
    """
    row, start, end, local_end, item = find_item(
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
        centred = load_block(
            centred_ptr, first_key, num_keys, group, NUM_GROUPS * HEAD_DIM, HEAD_DIM, BLOCK_SIZE, HEAD_DIM
        )
        offs_d = tl.arange(0, HEAD_DIM)
        offs_k = tl.arange(0, BLOCK_SIZE)
        dk = tl.zeros((BLOCK_SIZE, HEAD_DIM), dtype=tl.float32)
        dv = tl.zeros((BLOCK_SIZE, HEAD_DIM), dtype=tl.float32)
        LOG2E: tl.constexpr = 1.4426950408889634
        # A product has at least 16 columns.
        COLUMNS: tl.constexpr = ROWS if ROWS // PLACES > 16 else 16
        STEP: tl.constexpr = ROWS // PLACES
        # dV is not waited for: after dP it runs beside the arithmetic of dS. That takes registers, and only this case
        # has them; the others spill more than they gain.
        DP_FIRST: tl.constexpr = HEADS == PLACES and not TEACHER
        # Tiles with queries of this block, which need the causal mask, then the others.
        split = mask_end(start, end, local_end, STEP)
        for part in tl.static_range(2):
            first = start if part == 0 else split
            last = tl.minimum(split, end) if part == 0 else end
            # A tile's pairs are read one tile ahead, as all its other reads wait for them.
            next_real, next_pair, head = pair_rows(pairs_ptr, first, end, HEADS, PLACES, ROWS)
            for number in tl.range(first, last, STEP, num_stages=STAGES):
                is_real = next_real
                pair = next_pair
                next_real, next_pair, _head = pair_rows(pairs_ptr, number + STEP, end, HEADS, PLACES, ROWS)
                if TEACHER:
                    is_query, query_pair, _ = pair_rows(pairs_ptr, number, end, 1, 1, COLUMNS)
                query_row = pair // (NUM_GROUPS * NUM_SELECTED)
                wide_row = query_row.to(tl.int64)
                query_head = group * HEADS + head
                # [ROWS, HEAD_DIM]
                address = (wide_row * stride_qt + query_head * stride_qn)[:, None] + offs_d[None, :]
                query = tl.load(query_ptr + address)
                if not SAME_STRIDES:
                    address = (wide_row * stride_gt + query_head * stride_gn)[:, None] + offs_d[None, :]
                grad = tl.load(grad_ptr + address)
                row_place = wide_row * (NUM_GROUPS * HEADS) + query_head
                # Rows that only fill the tile up get P = 0.
                lse = tl.load(lse_ptr + row_place, mask=is_real, other=float("inf"))
                delta = tl.load(delta_ptr + row_place)
                unit = tl.load(unit_ptr + row_place)
                # [BLOCK_SIZE, ROWS]
                scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
                probs = tl.exp2(scores * (scale * LOG2E) - (lse * LOG2E)[None, :])
                if part == 0:
                    last_key = tl.load(query_table_ptr + query_row * 3 + 2)
                    probs = tl.where((first_key + offs_k)[:, None] <= last_key[None, :], probs, 0.0)
                probs_low = probs.to(grad.dtype)
                if TEACHER:
                    # The sum over heads is a product with ones, for any number of heads: [BLOCK_SIZE, COLUMNS].
                    is_head = (tl.arange(0, ROWS) // PLACES)[:, None] == tl.arange(0, COLUMNS)[None, :]
                    total = tl.dot(probs_low, is_head.to(probs_low.dtype), input_precision=PRECISION)
                    query_place = (query_pair - first_pair).to(tl.int64) * BLOCK_SIZE
                    tl.store(
                        teacher_ptr + query_place[None, :] + offs_k[:, None],
                        (total * (1.0 / (HEADS * TEACHER_UNIT))).to(teacher_ptr.dtype.element_ty),
                        mask=(is_query & (tl.arange(0, COLUMNS) < STEP))[None, :],
                    )
                if DP_FIRST:
                    dprobs = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
                dv += tl.dot(probs_low, grad, input_precision=PRECISION)
                if not DP_FIRST:
                    dprobs = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
                dscores = (probs * (dprobs - delta[None, :])).to(query.dtype)
                dk += tl.dot(dscores, query, input_precision=PRECISION)
                # [ROWS, HEAD_DIM]
                dq = tl.dot(tl.trans(dscores), centred, input_precision=PRECISION)
                place = (pair - first_pair).to(tl.int64) * HEADS + head
                tl.store(
                    dq_partial_ptr + place[:, None] * HEAD_DIM + offs_d[None, :],
                    (dq * (1.0 / unit)[:, None]).to(dq_partial_ptr.dtype.element_ty),
                    mask=is_real[:, None],
                    cache_modifier=".cs",
                )
        first_item = tl.load(row_item_ptr + row)
        is_only = tl.load(row_item_ptr + row + 1) - first_item == 1
        slot = tl.load(row_slot_ptr + row) + item - first_item
        add_or_put(
            dk_ptr, dk_slot_ptr, dk * scale, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, HEAD_DIM, NUM_GROUPS
        )
        add_or_put(dv_ptr, dv_slot_ptr, dv, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, HEAD_DIM, NUM_GROUPS)


@triton.jit(do_not_specialize=["chunk", "num_blocks"])
def _sum_slots_kernel(
    grad_ptr,
    slot_ptr,
    row_item_ptr,
    row_slot_ptr,
    block_table_ptr,
    chunk,
    num_blocks,
    NUM_GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per (row of this chunk, ROWS of its keys): add the slots of a row of several items, in order."""
    local_row = tl.program_id(0)
    row = chunk * NUM_GROUPS * num_blocks + local_row
    num_items = tl.load(row_item_ptr + row + 1) - tl.load(row_item_ptr + row)
    if num_items > 1:
        block = local_row % num_blocks
        group = local_row // num_blocks
        offs = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        offs_d = tl.arange(0, DIM)[None, :]
        mask = (offs < tl.load(block_table_ptr + 3 * block + 1))[:, None]
        place = (tl.load(block_table_ptr + 3 * block) + offs).to(tl.int64) * NUM_GROUPS + group
        address = grad_ptr + place[:, None] * DIM + offs_d
        total = tl.load(address, mask=mask, other=0.0)
        slot = tl.load(row_slot_ptr + row).to(tl.int64)
        for number in tl.range(0, num_items):
            total += tl.load(slot_ptr + ((slot + number) * BLOCK_SIZE + offs)[:, None] * DIM + offs_d)
        tl.store(address, total, mask=mask)


@triton.jit(do_not_specialize=["first_query", "num_queries"])
def _dq_kernel(
    partial_ptr,
    unit_ptr,
    block_indices_ptr,
    query_table_ptr,
    dq_ptr,
    first_query,
    num_queries,
    scale,
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
    """dQ = scale x unit x the sum of the row's slots, in order, for ROWS (query, head) rows."""
    mask, row, query_row, query_head, _, position = head_rows(
        first_query, num_queries, query_table_ptr, NUM_GROUPS, HEADS, ROWS
    )
    _ids, is_used = row_blocks(
        block_indices_ptr, query_row, query_head // HEADS, position, mask, stride_it, stride_ig, stride_ik,
        NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    # No id has to be waited for below.
    num_used = tl.sum(is_used.to(tl.int32), 1)
    first_place = (row // HEADS) * (NUM_SELECTED * HEADS) + query_head % HEADS
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    dq = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    for slot in tl.range(0, tl.max(num_used, 0), num_stages=STAGES):
        place = first_place + slot * HEADS
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + offs_d, mask=(slot < num_used)[:, None], other=0.0)
        dq += partial.to(tl.float32)
    place = query_row * (NUM_GROUPS * HEADS) + query_head
    dq *= (scale * tl.load(unit_ptr + place, mask=num_used > 0, other=0.0))[:, None]
    tl.store(dq_ptr + place[:, None] * HEAD_DIM + offs_d, dq.to(dq_ptr.dtype.element_ty), mask=mask[:, None])
