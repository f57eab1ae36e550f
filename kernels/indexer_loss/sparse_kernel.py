"""Kernels of the sparse KL, keys outer over the same reverse index as sparse attention (README.md, "Triton").

A tile is ROWS queries that chose one block, without a head axis: the teacher P is summed up over the group's heads, one
head after the other, and never leaves the registers. Forward leaves three numbers for each (query, group, slot), from
which a second kernel makes the row's KL and the student's lse; backward has the two lse and needs no other pass. It
reads P where the backward of sparse attention has left it, and measures the KL on the way if asked to.
"""

import triton
import triton.language as tl

from ..block_sparse_attention.backward_kernel import TEACHER_UNIT, add_or_put, kept_blocks, slot_unit
from ..block_sparse_attention.kernel import find_item, head_rows, load_block, load_rows, pair_rows
from ..fast_math import fast_log2


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
        first_key = tl.load(block_table_ptr + 3 * block)
        num_keys = tl.load(block_table_ptr + 3 * block + 1)
        key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        index_key = load_block(index_key_ptr, first_key, num_keys, 0, stride_ikt, 0, BLOCK_SIZE, INDEX_DIM)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        PER_QUERY: tl.constexpr = NUM_GROUPS * NUM_SELECTED
        for i in tl.range(start, end, ROWS, num_stages=1):
            is_real, pair, _head = pair_rows(pairs_ptr, i, end, 1, 1, ROWS)
            query_row = (pair // PER_QUERY).to(tl.int64)
            # [ROWS, BLOCK_SIZE]
            teacher = teacher_tile(
                query_ptr, lse_ptr, key, query_row, group, is_real, stride_qt, stride_qn, scale_log2,
                NUM_GROUPS, HEADS, HEAD_DIM, BLOCK_SIZE, ROWS, PRECISION, STAGES,
            )  # fmt: skip
            index_query = load_rows(index_query_ptr, pair, PER_QUERY, group, stride_iqt, stride_iqg, INDEX_DIM)
            scores = tl.dot(index_query, tl.trans(index_key), input_precision=INDEX_PRECISION) * index_scale_log2
            if i < local_end:
                last_key = tl.load(query_table_ptr + query_row * 3 + 2)
                is_visible = key_row[None, :] <= last_key[:, None]
                teacher = tl.where(is_visible, teacher, 0.0)
                scores = tl.where(is_visible, scores, float("-inf"))
            largest = tl.max(scores, 1)
            slot_lse = largest + tl.log2(tl.sum(tl.exp2(scores - largest[:, None]), 1))
            log_ratio = fast_log2(tl.maximum(teacher, 1e-37), EXACT=PRECISION == "ieee") - scores
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
    mask, row, query_row, group, first_block, position = head_rows(
        first_query, num_queries, query_table_ptr, NUM_GROUPS, 1, ROWS
    )
    _, is_used, num_tokens = kept_blocks(
        block_indices_ptr, query_row, group, group * 0, first_block, position, mask,
        stride_it, stride_ig, stride_ik, 1, NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    slots = tl.arange(0, SLOTS)[None, :]
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


@triton.jit(do_not_specialize=["num_queries"])
def _kl_weights_kernel(
    grad_ptr,
    key_size_ptr,
    block_indices_ptr,
    query_table_ptr,
    weight_ptr,
    unit_ptr,
    weighted_unit_ptr,
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
    """Of ROWS (query, group) rows: the weight (0 with fewer than two tokens), the unit of dQ's slots, their product."""
    mask, row, query_row, group, first_block, position = head_rows(0, num_queries, query_table_ptr, NUM_GROUPS, 1, ROWS)
    place, is_used, num_tokens = kept_blocks(
        block_indices_ptr, query_row, group, group * 0, first_block, position, mask,
        stride_it, stride_ig, stride_ik, 1, NUM_SELECTED, SLOTS, BLOCK_SIZE,
    )  # fmt: skip
    key_size = tl.max(tl.load(key_size_ptr + place, mask=is_used, other=-100.0), 1)
    weight = tl.load(grad_ptr + row, mask=mask & (num_tokens > 1), other=0.0)
    # The sum of |P_idx - P| is at most 2.
    unit = slot_unit(key_size + 1.0)
    tl.store(weight_ptr + row, weight, mask=mask)
    tl.store(unit_ptr + row, unit, mask=mask)
    tl.store(weighted_unit_ptr + row, weight * unit, mask=mask)


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_kl_bwd_kernel(
    index_query_ptr,
    index_key_ptr,
    centred_ptr,
    query_ptr,
    key_ptr,
    lse_ptr,
    teacher_ptr,
    index_lse_ptr,
    weight_ptr,
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
    item_kl_ptr,
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
    SAVED_TEACHER: tl.constexpr,
    MEASURE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per item. With D = P_idx - P: dK, and of each pair the sum over keys D_j k_j.

    The row's weight (its upstream gradient, scaled to at most 1) enters dK here and dQ in the sum over slots. With
    SAVED_TEACHER, P comes from memory; with MEASURE, each program leaves its sum of weight P (log P - log P_idx).
    """
    row, start, end, local_end, item = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk
    )
    if start < end:
        block = row % num_blocks
        group = ((row // num_blocks) % NUM_GROUPS).to(tl.int64)
        first_key = tl.load(block_table_ptr + 3 * block)
        num_keys = tl.load(block_table_ptr + 3 * block + 1)
        if not SAVED_TEACHER:
            key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        index_key = load_block(index_key_ptr, first_key, num_keys, 0, stride_ikt, 0, BLOCK_SIZE, INDEX_DIM)
        centred = load_block(centred_ptr, first_key, num_keys, 0, INDEX_DIM, 0, BLOCK_SIZE, INDEX_DIM)
        dk = tl.zeros((BLOCK_SIZE, INDEX_DIM), dtype=tl.float32)
        # Of a row's 128 columns a thread holds two in each eight of one half: sums over those stay within it.
        HALVES: tl.constexpr = 2 if BLOCK_SIZE > 64 else 1
        kl = tl.zeros((ROWS, HALVES, 8), dtype=tl.float32)
        offs_i = tl.arange(0, INDEX_DIM)[None, :]
        offs_k = tl.arange(0, BLOCK_SIZE)
        PER_QUERY: tl.constexpr = NUM_GROUPS * NUM_SELECTED
        # A tile's pairs are read one tile ahead, as all its other reads wait for them.
        next_real, next_pair, _head = pair_rows(pairs_ptr, start, end, 1, 1, ROWS)
        for number in tl.range(start, end, ROWS, num_stages=STAGES if SAVED_TEACHER else 1):
            is_real, pair = next_real, next_pair
            next_real, next_pair, _head = pair_rows(pairs_ptr, number + ROWS, end, 1, 1, ROWS)
            index_query = load_rows(index_query_ptr, pair, PER_QUERY, group, stride_iqt, stride_iqg, INDEX_DIM)
            if SAVED_TEACHER:
                teacher = load_rows(teacher_ptr, pair - first_pair, 1, 0, BLOCK_SIZE, 0, BLOCK_SIZE)
                teacher = teacher.to(tl.float32) * TEACHER_UNIT  # 0 for hidden tokens
            place = pair // PER_QUERY * NUM_GROUPS + group
            index_lse, unit = tl.load(index_lse_ptr + place), tl.load(unit_ptr + place)
            weight = tl.load(weight_ptr + place, mask=is_real, other=0.0)
            # [ROWS, BLOCK_SIZE]; rows that only fill the tile up have weight 0
            scores = tl.dot(index_query, tl.trans(index_key), input_precision=INDEX_PRECISION) * index_scale_log2
            if not SAVED_TEACHER:
                teacher = teacher_tile(
                    query_ptr, lse_ptr, key, (pair // PER_QUERY).to(tl.int64), group, is_real, stride_qt, stride_qn,
                    scale_log2, NUM_GROUPS, HEADS, HEAD_DIM, BLOCK_SIZE, ROWS, PRECISION, STAGES,
                )  # fmt: skip
            log_student = scores - (index_lse * 1.4426950408889634)[:, None]
            difference = tl.exp2(log_student) - teacher
            if number < local_end:
                last_key = tl.load(query_table_ptr + (pair // PER_QUERY) * 3 + 2)
                is_visible = (first_key + offs_k)[None, :] <= last_key[:, None]
                difference = tl.where(is_visible, difference, 0.0)
                if not SAVED_TEACHER:
                    teacher = tl.where(is_visible, teacher, 0.0)
            if MEASURE:
                # 0 where P is: a student's logarithm is finite.
                log_ratio = fast_log2(tl.maximum(teacher, 1e-37), EXACT=INDEX_PRECISION == "ieee") - log_student
                terms = teacher * weight[:, None] * log_ratio
                kl += tl.sum(tl.reshape(terms, (ROWS, HALVES, BLOCK_SIZE // HALVES // 8, 8)), 2)
            weighted = (difference * weight[:, None]).to(index_query.dtype)
            # Weights that differ by orders would cost the row's own dQ bits.
            dq = tl.dot(difference.to(index_query.dtype), centred, input_precision=INDEX_PRECISION)
            dk += tl.dot(tl.trans(weighted), index_query, input_precision=INDEX_PRECISION)
            tl.store(
                dq_partial_ptr + (pair - first_pair).to(tl.int64)[:, None] * INDEX_DIM + offs_i,
                (dq * (1.0 / unit)[:, None]).to(dq_partial_ptr.dtype.element_ty),
                mask=is_real[:, None],
                cache_modifier=".cs",
            )
        if MEASURE:
            tl.store(item_kl_ptr + tl.program_id(0), tl.sum(tl.sum(tl.sum(kl, 2), 1), 0) * 0.6931471805599453)
        first_item = tl.load(row_item_ptr + row)
        is_only = tl.load(row_item_ptr + row + 1) - first_item == 1
        slot = tl.load(row_slot_ptr + row) + item - first_item
        add_or_put(
            dk_ptr, dk_slot_ptr, dk, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, INDEX_DIM, NUM_GROUPS
        )
