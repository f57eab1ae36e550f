"""Kernels of the sparse KL, keys outer over the same reverse index as sparse attention (README.md, "Triton").

A tile is ROWS queries that chose one block, without a head axis: the teacher P is summed up over the group's heads, one
head after the other, and never leaves the registers. Forward leaves three numbers for each (query, group, slot), from
which a second kernel makes the row's KL and the student's lse; backward has the two lse and needs no other pass.
"""

import triton
import triton.language as tl

from ..block_sparse_attention.backward_kernel import add_or_put
from ..block_sparse_attention.kernel import find_item, head_rows, load_block, pair_rows


@triton.jit
def teacher_tile(
    query_ptr, lse_ptr, key, query_row, group, is_real, stride_qt, stride_qn, scale_log2,
    NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean over the group's heads of exp(scale <q, k> - lse): [ROWS, BLOCK_SIZE]; hidden tokens are not masked."""
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    total = tl.zeros((ROWS, BLOCK_SIZE), dtype=tl.float32)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        query_head = group * HEADS + head
        query = tl.load(query_ptr + (query_row * stride_qt + query_head * stride_qn)[:, None] + offs_d)
        lse = tl.load(lse_ptr + query_row * (NUM_GROUPS * HEADS) + query_head, mask=is_real, other=float("inf"))
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        total += tl.exp2(scores * scale_log2 - (lse * 1.4426950408889634)[:, None])
    return total * (1.0 / HEADS)


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_kl_fwd_kernel(
    index_query_ptr,
    index_key_ptr,
    query_ptr,
    key_ptr,
    lse_ptr,
    query_table_ptr,
    block_table_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    item_row_ptr,
    chunk_item_ptr,
    slot_lse_ptr,
    mass_ptr,
    cross_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale_log2,
    index_scale_log2,
    stride_iqt,
    stride_iqg,
    stride_ikt,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per item: of each pair the student's lse, sum P and sum P (log P - S_idx), all in log2."""
    row, start, end, local_end, _ = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk
    )
    if start < end:
        block = row % num_blocks
        group = ((row // num_blocks) % NUM_GROUPS).to(tl.int64)
        first_key = tl.load(block_table_ptr + 2 * block)
        num_keys = tl.load(block_table_ptr + 2 * block + 1)
        key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        index_key = load_block(index_key_ptr, first_key, num_keys, 0, stride_ikt, 0, BLOCK_SIZE, INDEX_DIM)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        offs_i = tl.arange(0, INDEX_DIM)[None, :]
        for i in tl.range(start, end, ROWS, num_stages=1):
            is_real, pair, _head = pair_rows(pairs_ptr, i, end, 1, ROWS)
            query_row = (pair // (NUM_GROUPS * NUM_SELECTED)).to(tl.int64)
            # [ROWS, BLOCK_SIZE]
            teacher = teacher_tile(
                query_ptr, lse_ptr, key, query_row, group, is_real, stride_qt, stride_qn, scale_log2,
                NUM_GROUPS, HEADS, HEAD_DIM, BLOCK_SIZE, ROWS, PRECISION, STAGES,
            )  # fmt: skip
            index_query = tl.load(index_query_ptr + (query_row * stride_iqt + group * stride_iqg)[:, None] + offs_i)
            scores = tl.dot(index_query, tl.trans(index_key), input_precision=INDEX_PRECISION) * index_scale_log2
            if i < local_end:
                last_key = tl.load(query_table_ptr + query_row * 3 + 2)
                is_visible = key_row[None, :] <= last_key[:, None]
                teacher = tl.where(is_visible, teacher, 0.0)
                scores = tl.where(is_visible, scores, float("-inf"))
            largest = tl.max(scores, 1)
            slot_lse = largest + tl.log2(tl.sum(tl.exp2(scores - largest[:, None]), 1))
            log_ratio = tl.log2(tl.maximum(teacher, 1e-37)) - scores
            cross = tl.sum(tl.where(teacher > 0.0, teacher * log_ratio, 0.0), 1)
            place = (pair - first_pair).to(tl.int64)
            tl.store(slot_lse_ptr + place, slot_lse, mask=is_real)
            tl.store(mass_ptr + place, tl.sum(teacher, 1), mask=is_real)
            tl.store(cross_ptr + place, cross, mask=is_real)


@triton.jit(do_not_specialize=["first_query", "num_queries"])
def _kl_rows_kernel(
    slot_lse_ptr,
    mass_ptr,
    cross_ptr,
    block_indices_ptr,
    query_table_ptr,
    kl_ptr,
    index_lse_ptr,
    first_query,
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
    """KL and student lse of ROWS (query, group) rows; with fewer than two tokens 0 and +inf, without any 0 and -inf."""
    mask, row, query_row, group, _, position = head_rows(first_query, num_queries, query_table_ptr, NUM_GROUPS, 1, ROWS)
    slots = tl.arange(0, SLOTS)[None, :]
    ids = tl.load(
        block_indices_ptr + (query_row * stride_it + group * stride_ig)[:, None] + slots * stride_ik,
        mask=mask[:, None] & (slots < NUM_SELECTED),
        other=-1,
    )
    first_token = ids * BLOCK_SIZE
    is_used = (ids >= 0) & (first_token <= position[:, None])
    num_tokens = tl.sum(tl.where(is_used, tl.minimum(position[:, None] - first_token + 1, BLOCK_SIZE), 0), 1)
    # [ROWS, SLOTS]
    place = row[:, None] * NUM_SELECTED + slots
    slot_lse = tl.load(slot_lse_ptr + place, mask=is_used, other=float("-inf"))
    mass = tl.sum(tl.load(mass_ptr + place, mask=is_used, other=0.0), 1)
    cross = tl.sum(tl.load(cross_ptr + place, mask=is_used, other=0.0), 1)
    largest = tl.max(tl.where(is_used, slot_lse, -1e30), 1)
    total = tl.sum(tl.exp2(slot_lse - largest[:, None]), 1)
    lse = largest + tl.log2(tl.where(num_tokens > 0, total, 1.0))
    kl = tl.where(num_tokens > 1, (cross + lse * mass) * 0.6931471805599453, 0.0)
    saved = tl.where(num_tokens > 1, lse * 0.6931471805599453, float("inf"))
    place = query_row * NUM_GROUPS + group
    tl.store(kl_ptr + place, kl, mask=mask)
    tl.store(index_lse_ptr + place, tl.where(num_tokens > 0, saved, float("-inf")), mask=mask)


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_kl_bwd_kernel(
    index_query_ptr,
    index_key_ptr,
    query_ptr,
    key_ptr,
    lse_ptr,
    index_lse_ptr,
    weight_ptr,
    query_table_ptr,
    block_table_ptr,
    common_ptr,
    stats_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    row_slot_ptr,
    item_row_ptr,
    chunk_item_ptr,
    dq_partial_ptr,
    dq_unit_ptr,
    sigma_ptr,
    dk_ptr,
    dk_slot_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale_log2,
    index_scale_log2,
    stride_iqt,
    stride_iqg,
    stride_ikt,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per item. With D = P_idx - P: a slot of sum_j D_j (k_j - m_b), sigma_b = sum_j D_j, and dK.

    The row's weight (its upstream gradient, scaled to at most 1) enters dK here and dQ in the sum over slots.
    """
    row, start, end, local_end, item = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk
    )
    if start < end:
        block = row % num_blocks
        group = ((row // num_blocks) % NUM_GROUPS).to(tl.int64)
        first_key = tl.load(block_table_ptr + 2 * block)
        num_keys = tl.load(block_table_ptr + 2 * block + 1)
        key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        index_key = load_block(index_key_ptr, first_key, num_keys, 0, stride_ikt, 0, BLOCK_SIZE, INDEX_DIM)
        offs_i = tl.arange(0, INDEX_DIM)[None, :]
        common = tl.load(common_ptr + block.to(tl.int64) * INDEX_DIM + offs_i)
        centred = (index_key.to(tl.float32) - common).to(index_key.dtype)
        # The sum of |D| is at most 2.
        unit = tl.load(stats_ptr + block.to(tl.int64) * 2 + 1) + (1.0 - 15.0)
        dk = tl.zeros((BLOCK_SIZE, INDEX_DIM), dtype=tl.float32)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        for i in tl.range(start, end, ROWS, num_stages=1):
            is_real, pair, _head = pair_rows(pairs_ptr, i, end, 1, ROWS)
            query_row = (pair // (NUM_GROUPS * NUM_SELECTED)).to(tl.int64)
            # [ROWS, BLOCK_SIZE]
            teacher = teacher_tile(
                query_ptr, lse_ptr, key, query_row, group, is_real, stride_qt, stride_qn, scale_log2,
                NUM_GROUPS, HEADS, HEAD_DIM, BLOCK_SIZE, ROWS, PRECISION, STAGES,
            )  # fmt: skip
            index_query = tl.load(index_query_ptr + (query_row * stride_iqt + group * stride_iqg)[:, None] + offs_i)
            scores = tl.dot(index_query, tl.trans(index_key), input_precision=INDEX_PRECISION) * index_scale_log2
            row_place = query_row * NUM_GROUPS + group
            index_lse = tl.load(index_lse_ptr + row_place, mask=is_real, other=float("inf")) * 1.4426950408889634
            weight = tl.load(weight_ptr + row_place)
            difference = tl.exp2(scores - index_lse[:, None]) - teacher
            if i < local_end:
                last_key = tl.load(query_table_ptr + query_row * 3 + 2)
                difference = tl.where(key_row[None, :] <= last_key[:, None], difference, 0.0)
            place = (pair - first_pair).to(tl.int64)
            tl.store(sigma_ptr + place, tl.sum(difference, 1), mask=is_real)
            weighted = (difference * weight[:, None]).to(index_query.dtype)
            dk += tl.dot(tl.trans(weighted), index_query, input_precision=INDEX_PRECISION)
            dq = tl.dot(difference.to(index_query.dtype), centred, input_precision=INDEX_PRECISION)
            tl.store(dq_unit_ptr + place, tl.zeros((ROWS,), dtype=tl.float32) + tl.exp2(unit), mask=is_real)
            tl.store(
                dq_partial_ptr + place[:, None] * INDEX_DIM + offs_i,
                (dq * tl.exp2(-unit)).to(dq_partial_ptr.dtype.element_ty),
                mask=is_real[:, None],
            )
        first_item = tl.load(row_item_ptr + row)
        is_only = tl.load(row_item_ptr + row + 1) - first_item == 1
        slot = tl.load(row_slot_ptr + row) + item - first_item
        add_or_put(
            dk_ptr, dk_slot_ptr, dk, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, INDEX_DIM, NUM_GROUPS
        )
