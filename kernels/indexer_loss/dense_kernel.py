"""Triton kernels of the full-sequence indexer KL: no [t, t] tensor, the teacher made tile by tile from q, k and lse.

Forward, one program per (query tile, group): one pass over the index keys for the student's lse, then one over
(query, key) tiles for the value and for the gradient of a row under weight 1, kept in registers:

    d_unit[t, r] = sum_j (P_idx - P)[t, r, j] index_key[j]          d index_query = weight d_unit / sqrt(i)

Backward, one program per (key tile, group), makes P again and sums `weight (P_idx - P)^T index_query` in registers.

Example: a document of 200 tokens in tiles of 128 x 128: the second query tile (positions 128..199) meets the key tiles
0..127 and 128..199; the first key tile meets both query tiles, the second only the last one.
"""

import triton
import triton.language as tl

from ..fast_math import fast_log2

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# A scale arrives as its fp32 value and the rest: one rounding of it would be a change of temperature, which large
# scores show. `student` [t_q, NUM_GROUPS, 2] holds the maximum of a row's scores and 1 / sum exp(score - maximum).


@triton.jit
def _teacher_tile(
    q_ptrs, lse_ptrs, k_tile, mask_m, stride_qh, stride_lh, scale, scale_rest,
    HEADS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Mean over the group's heads of exp(scale <q, k> - lse): [rows, keys], to be masked; k_tile [D, keys]."""
    probs = tl.zeros((q_ptrs.shape[0], k_tile.shape[1]), dtype=tl.float32)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        place = tl.cast(head, tl.int64)
        q_tile = tl.load(q_ptrs + place * stride_qh, mask=mask_m[:, None], other=0.0)
        lse = tl.load(lse_ptrs + place * stride_lh, mask=mask_m, other=0.0)
        scores = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        if PRECISION == "ieee":
            # Subtracted before the change of base, a large probability keeps all its bits.
            probs += tl.exp2((scores * scale + (scores * scale_rest - lse[:, None])) * LOG2E)
        else:
            # One multiply-add: what it loses is far below the rounding of 16-bit inputs.
            probs += tl.exp2(scores * (scale * LOG2E) - (lse * LOG2E)[:, None])
    return probs * (1.0 / HEADS)


@triton.jit
def _dot_in_two(a, b, acc, PRECISION: tl.constexpr, SPLIT: tl.constexpr):
    """acc + a b with fp32 `a`; in 16 bits as two products, so that the rounding of `a` does not show."""
    high = a.to(b.dtype)
    acc = tl.dot(high, b, acc, input_precision=PRECISION)
    if SPLIT:
        acc = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _query_tile(
    iq_ptr, tiles_ptr, stride_iqt, stride_iqg, stride_iqi,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The program's query rows and index queries [BLOCK_M, INDEX_DIM], and the first key row of their document."""
    pid = tl.program_id(0)
    tile = tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 4
    group = (pid % NUM_GROUPS).to(tl.int64)
    num_rows = tl.load(tile + 1)
    position = tl.load(tile + 2)
    offs_m = tl.arange(0, BLOCK_M)
    offs_i = tl.arange(0, INDEX_DIM)
    mask_m = offs_m < num_rows
    row = tl.load(tile) + offs_m
    iq_tile = tl.load(
        iq_ptr + row[:, None] * stride_iqt + group * stride_iqg + offs_i[None, :] * stride_iqi,
        mask=mask_m[:, None], other=0.0,
    )  # fmt: skip
    return group, row, mask_m, position + offs_m, position + num_rows, iq_tile, tl.load(tile + 3)


@triton.jit
def _student(
    iq_tile, ik_ptr, key_first, num_keys, row_position, index_scale, index_scale_rest, stride_ikt, stride_iki,
    BLOCK_N: tl.constexpr, INDEX_PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The maximum of a row's index scores and sum exp(score - maximum)."""
    BLOCK_M: tl.constexpr = iq_tile.shape[0]
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, iq_tile.shape[1])
    # Every row sees key 0, so the running maximum is finite from the first tile on.
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in tl.range(0, num_keys.to(tl.int32), BLOCK_N, num_stages=STAGES):
        key_position = start + offs_n
        ik_tile = tl.load(
            ik_ptr + (key_first + key_position)[None, :] * stride_ikt + offs_i[:, None] * stride_iki,
            mask=(key_position < num_keys)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.dot(iq_tile, ik_tile, input_precision=INDEX_PRECISION)
        x = x * index_scale + x * index_scale_rest
        x = tl.where(key_position[None, :] <= row_position[:, None], x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, axis=1))
        total = total * tl.exp2((largest - larger) * LOG2E) + tl.sum(tl.exp2((x - larger[:, None]) * LOG2E), axis=1)
        largest = larger
    return largest, total


@triton.jit
def _dense_student_kernel(
    iq_ptr, ik_ptr, tiles_ptr, lse_ptr, index_scale, index_scale_rest,
    stride_iqt, stride_iqg, stride_iqi, stride_ikt, stride_iki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INDEX_PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The student's lse [t_q, NUM_GROUPS] alone."""
    group, row, mask_m, row_position, num_keys, iq_tile, key_first = _query_tile(
        iq_ptr, tiles_ptr, stride_iqt, stride_iqg, stride_iqi, NUM_GROUPS, INDEX_DIM, BLOCK_M
    )
    largest, total = _student(
        iq_tile, ik_ptr, key_first, num_keys, row_position, index_scale, index_scale_rest, stride_ikt, stride_iki,
        BLOCK_N, INDEX_PRECISION, STAGES,
    )  # fmt: skip
    tl.store(lse_ptr + row * NUM_GROUPS + group, largest + tl.log2(total) * LN2, mask=mask_m)


@triton.jit
def _dense_kl_fwd_kernel(
    iq_ptr, ik_ptr, q_ptr, k_ptr, lse_ptr, tiles_ptr, kl_ptr, student_ptr, d_unit_ptr,
    scale, scale_rest, index_scale, index_scale_rest,
    stride_iqt, stride_iqg, stride_iqi, stride_ikt, stride_iki, stride_qt, stride_qh, stride_qd,
    stride_kt, stride_kg, stride_kd, stride_lt, stride_lh,
    NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WITH_GRADIENT: tl.constexpr, DS_SCALE: tl.constexpr,
    INDEX_PRECISION: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """kl, student and d_unit of a tile's rows."""
    group, row, mask_m, row_position, num_keys, iq_tile, key_first = _query_tile(
        iq_ptr, tiles_ptr, stride_iqt, stride_iqg, stride_iqi, NUM_GROUPS, INDEX_DIM, BLOCK_M
    )
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, INDEX_DIM)
    offs_d = tl.arange(0, HEAD_DIM)
    out = row * NUM_GROUPS + group
    largest, total = _student(
        iq_tile, ik_ptr, key_first, num_keys, row_position, index_scale, index_scale_rest, stride_ikt, stride_iki,
        BLOCK_N, INDEX_PRECISION, STAGES,
    )  # fmt: skip
    log_total = tl.log2(total)
    inverse_total = 1.0 / total

    q_ptrs = q_ptr + row[:, None] * stride_qt + group * HEADS * stride_qh + offs_d[None, :] * stride_qd
    lse_ptrs = lse_ptr + row * stride_lt + group * HEADS * stride_lh
    kl = tl.zeros((BLOCK_M,), dtype=tl.float32)
    d_unit = tl.zeros((BLOCK_M, INDEX_DIM), dtype=tl.float32)
    # The loop over heads has the stages.
    for start in tl.range(0, num_keys.to(tl.int32), BLOCK_N, num_stages=1):
        key_position = start + offs_n
        mask_n = key_position < num_keys
        key_row = key_first + key_position
        ik_tile = tl.load(
            ik_ptr + key_row[None, :] * stride_ikt + offs_i[:, None] * stride_iki, mask=mask_n[None, :], other=0.0
        )
        k_tile = tl.load(
            k_ptr + key_row[None, :] * stride_kt + group * stride_kg + offs_d[:, None] * stride_kd,
            mask=mask_n[None, :], other=0.0,
        )  # fmt: skip
        probs = _teacher_tile(
            q_ptrs, lse_ptrs, k_tile, mask_m, stride_qh, stride_lh, scale, scale_rest, HEADS, PRECISION, STAGES
        )
        visible = key_position[None, :] <= row_position[:, None]
        probs = tl.where(visible, probs, 0.0)
        # [BLOCK_M, BLOCK_N], log2 of the student without its sum
        x = tl.dot(iq_tile, ik_tile, input_precision=INDEX_PRECISION)
        x = (x * index_scale + (x * index_scale_rest - largest[:, None])) * LOG2E
        log_ratio = fast_log2(tl.maximum(probs, 1e-37), EXACT=PRECISION == "ieee") - x + log_total[:, None]
        kl += tl.sum(probs * log_ratio, axis=1)
        if WITH_GRADIENT:
            d_score = (tl.where(visible, tl.exp2(x) * inverse_total[:, None], 0.0) - probs) * DS_SCALE
            d_unit = _dot_in_two(d_score, tl.trans(ik_tile), d_unit, INDEX_PRECISION, SPLIT)
    # A row with one token has KL 0 exactly: rounding in the teacher must not show.
    several = row_position > 0
    tl.store(kl_ptr + out, tl.where(several, kl * LN2, 0.0), mask=mask_m)
    tl.store(student_ptr + out * 2, largest, mask=mask_m)
    tl.store(student_ptr + out * 2 + 1, inverse_total, mask=mask_m)
    if WITH_GRADIENT:
        d_unit = tl.where(several[:, None], d_unit * (1.0 / DS_SCALE), 0.0)
        tl.store(d_unit_ptr + out[:, None] * INDEX_DIM + offs_i[None, :], d_unit, mask=mask_m[:, None])


@triton.jit(do_not_specialize=["first_tile"])
def _dense_kl_bwd_key_kernel(
    iq_ptr, ik_ptr, q_ptr, k_ptr, lse_ptr, tiles_ptr, student_ptr, weight_ptr, d_ik_ptr, first_tile,
    scale, scale_rest, index_scale, index_scale_rest,
    stride_iqt, stride_iqg, stride_iqi, stride_ikt, stride_iki, stride_qt, stride_qh, stride_qd,
    stride_kt, stride_kg, stride_kd, stride_lt, stride_lh,
    NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DS_SCALE: tl.constexpr,
    INDEX_PRECISION: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add DS_SCALE sum over queries of weight (P_idx - P) index_query to d_ik [t_k, NUM_GROUPS, INDEX_DIM].

    The key tiles of one launch do not overlap, so the sum has one owner. `weight` is 0 for rows with one token.
    """
    pid = tl.program_id(0)
    tile = tiles_ptr + (first_tile + pid // NUM_GROUPS).to(tl.int64) * 6
    group = (pid % NUM_GROUPS).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    key_row = tl.load(tile) + offs_n
    mask_n = offs_n < tl.load(tile + 1)
    key_start = tl.multiple_of(tl.load(tile + 2), BLOCK_N)
    query_first = tl.load(tile + 3)
    num_queries = tl.load(tile + 4)
    query_position = tl.load(tile + 5) - num_queries
    key_position = key_start + offs_n
    offs_i = tl.arange(0, INDEX_DIM)
    offs_d = tl.arange(0, HEAD_DIM)
    # [HEAD_DIM, BLOCK_N]
    k_tile = tl.load(
        k_ptr + key_row[None, :] * stride_kt + group * stride_kg + offs_d[:, None] * stride_kd,
        mask=mask_n[None, :], other=0.0,
    )  # fmt: skip
    # [INDEX_DIM, BLOCK_N]
    ik_tile = tl.load(
        ik_ptr + key_row[None, :] * stride_ikt + offs_i[:, None] * stride_iki, mask=mask_n[None, :], other=0.0
    )
    d_ik = tl.zeros((BLOCK_N, INDEX_DIM), dtype=tl.float32)
    # The first query that sees the first key of the tile.
    begin = tl.maximum(key_start - query_position, 0).to(tl.int32)
    for start in tl.range(begin, num_queries.to(tl.int32), BLOCK_M, num_stages=1):
        query = start + tl.arange(0, BLOCK_M)
        mask_m = query < num_queries
        row = query_first + query
        iq_tile = tl.load(
            iq_ptr + row[:, None] * stride_iqt + group * stride_iqg + offs_i[None, :] * stride_iqi,
            mask=mask_m[:, None], other=0.0,
        )  # fmt: skip
        probs = _teacher_tile(
            q_ptr + row[:, None] * stride_qt + group * HEADS * stride_qh + offs_d[None, :] * stride_qd,
            lse_ptr + row * stride_lt + group * HEADS * stride_lh,
            k_tile, mask_m, stride_qh, stride_lh, scale, scale_rest, HEADS, PRECISION, STAGES,
        )  # fmt: skip
        place = row * NUM_GROUPS + group
        largest = tl.load(student_ptr + place * 2, mask=mask_m, other=0.0)
        inverse_total = tl.load(student_ptr + place * 2 + 1, mask=mask_m, other=0.0)
        weight = tl.load(weight_ptr + place, mask=mask_m, other=0.0)
        x = tl.dot(iq_tile, ik_tile, input_precision=INDEX_PRECISION)
        x = (x * index_scale + (x * index_scale_rest - largest[:, None])) * LOG2E
        visible = mask_m[:, None] & (key_position[None, :] <= (query_position + query)[:, None])
        d_score = tl.exp2(x) * inverse_total[:, None] - probs
        d_score = tl.where(visible, d_score * (weight * DS_SCALE)[:, None], 0.0)
        d_ik = _dot_in_two(tl.trans(d_score), iq_tile, d_ik, INDEX_PRECISION, SPLIT)
    out = d_ik_ptr + (key_row * NUM_GROUPS + group)[:, None] * INDEX_DIM + offs_i[None, :]
    before = tl.load(out, mask=mask_n[:, None], other=0.0)
    tl.store(out, before + d_ik, mask=mask_n[:, None])
