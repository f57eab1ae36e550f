"""Triton kernels of decoding: scan the index keys, rank in two steps, attend to each kept block, combine.

The scan moves `capacity x i` numbers and is bound by memory; everything after it touches k blocks. Lengths are read on
the device, so that a CUDA graph of a step serves every length up to the capacity: programs past a length leave at once.

Example (block 4, k=2, length 10): the scan scores blocks 0, 1, 2; block 2 holds the query and is kept first; say 0
wins. Two programs a group attend to tokens 0..3 and 8..9, each with its own lse, and the combine weighs their outputs.
"""

import triton
import triton.language as tl

from ..block_selection.kernel import (
    INFINITY_WORD,
    NOT_VISIBLE,
    _magnitude_word,
    _merge_top,
    _rank_keys,
    _store_ascending,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _decode_scores_kernel(
    iq_ptr, ik_ptr, lengths_ptr, scores_ptr, report_ptr, num_blocks, num_parts,
    stride_iqb, stride_iqg, stride_iqi, stride_ikb, stride_ikt, stride_iki,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per PART blocks of a sequence: block scores [b, NUM_GROUPS, num_blocks]; GROUPS pads the groups."""
    pid = tl.program_id(0)
    sequence = (pid // num_parts).to(tl.int64)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = (pid % num_parts) * PART
    end = tl.minimum(first + PART, (length + BLOCK_SIZE - 1) // BLOCK_SIZE)
    if first < end:
        offs_g = tl.arange(0, GROUPS)
        offs_n = tl.arange(0, BLOCK_SIZE)
        offs_i = tl.arange(0, INDEX_DIM)
        mask_g = offs_g < NUM_GROUPS
        # [GROUPS, INDEX_DIM]
        iq_tile = tl.load(
            iq_ptr + sequence * stride_iqb + offs_g[:, None].to(tl.int64) * stride_iqg + offs_i[None, :] * stride_iqi,
            mask=mask_g[:, None], other=0.0,
        )  # fmt: skip
        ik_sequence = ik_ptr + sequence * stride_ikb
        out_ptr = scores_ptr + (sequence * NUM_GROUPS + offs_g) * num_blocks
        bad = tl.zeros((GROUPS,), dtype=tl.int32)
        for block in tl.range(first, end, num_stages=STAGES):
            position = block * BLOCK_SIZE + offs_n
            visible = position < length
            # [INDEX_DIM, BLOCK_SIZE]
            ik_tile = tl.load(
                ik_sequence + position[None, :].to(tl.int64) * stride_ikt + offs_i[:, None] * stride_iki,
                mask=visible[None, :], other=0.0,
            )  # fmt: skip
            x = tl.dot(iq_tile, ik_tile, input_precision=PRECISION)
            bad = tl.maximum(bad, tl.max(tl.where(visible[None, :], _magnitude_word(x), 0), axis=1))
            x = tl.where(visible[None, :], x, float("-inf"))
            tl.store(out_ptr + block, tl.max(x, axis=1), mask=mask_g)
        if tl.max(bad, axis=0) >= INFINITY_WORD:
            tl.store(report_ptr + 2, sequence + 1)


@triton.jit
def _decode_rank_kernel(
    scores_ptr, lengths_ptr, best_ptr, num_blocks, num_parts,
    NUM_GROUPS: tl.constexpr, NUM_BEST: tl.constexpr, INIT_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr, BITONIC: tl.constexpr,
):  # fmt: skip
    """One program per PART block scores of a (sequence, group): its NUM_BEST best rank keys."""
    pid = tl.program_id(0)
    row = (pid // num_parts).to(tl.int64)
    length = tl.load(lengths_ptr + row // NUM_GROUPS).to(tl.int32)
    num_visible = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    block = (pid % num_parts) * PART + tl.arange(0, PART)[None, :]
    scores = tl.load(scores_ptr + row * num_blocks + block, mask=block < num_visible, other=0.0)
    best = tl.full((1, NUM_BEST), NOT_VISIBLE, dtype=tl.int64)
    best = _merge_top(best, _rank_keys(scores, block, num_visible, INIT_BLOCKS), NUM_BEST, BITONIC)
    tl.store(best_ptr + pid.to(tl.int64) * NUM_BEST + tl.arange(0, NUM_BEST)[None, :], best)


@triton.jit
def _decode_merge_kernel(
    best_ptr, ids_ptr, num_keys,
    NUM_SELECTED: tl.constexpr, NUM_BEST: tl.constexpr, COLUMNS: tl.constexpr, BITONIC: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, group): the kept ids from the best keys of all parts."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((1, NUM_BEST), NOT_VISIBLE, dtype=tl.int64)
    for start in range(0, num_keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        keys = tl.load(best_ptr + row * num_keys + column, mask=column < num_keys, other=NOT_VISIBLE)
        best = _merge_top(best, keys, NUM_BEST, BITONIC)
    no_mask = tl.full((1, 1), 1, dtype=tl.int1)
    _store_ascending(ids_ptr + row * NUM_SELECTED, best, no_mask, NUM_SELECTED, NUM_BEST)


@triton.jit
def _decode_fwd_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ids_ptr, partial_ptr, partial_lse_ptr, scale,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kt, stride_kg, stride_kd,
    stride_vb, stride_vt, stride_vg, stride_vd,
    NUM_GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, group, slot): output and lse of the group's heads over one kept block, fp32."""
    pid = tl.program_id(0).to(tl.int64)
    block = tl.load(ids_ptr + pid)
    group = (pid // NUM_SELECTED) % NUM_GROUPS
    sequence = pid // (NUM_SELECTED * NUM_GROUPS)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    offs_h = tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_SIZE)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_h = offs_h < HEADS
    lse_ptrs = partial_lse_ptr + pid * HEADS + offs_h
    if block >= 0:
        position = block * BLOCK_SIZE + offs_n
        visible = position < length
        token = position.to(tl.int64)
        # [ROWS, HEAD_DIM], the heads of one group
        q_tile = tl.load(
            q_ptr + sequence * stride_qb + (group * HEADS + offs_h)[:, None] * stride_qh + offs_d[None, :] * stride_qd,
            mask=mask_h[:, None], other=0.0,
        )  # fmt: skip
        k_tile = tl.load(
            k_ptr + sequence * stride_kb + token[None, :] * stride_kt + group * stride_kg + offs_d[:, None] * stride_kd,
            mask=visible[None, :], other=0.0,
        )  # fmt: skip
        x = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale
        x = tl.where(visible[None, :], x, float("-inf"))
        # A kept block has a visible token, so the maximum is finite.
        largest = tl.max(x, axis=1)
        probs = tl.exp2((x - largest[:, None]) * LOG2E)
        total = tl.sum(probs, axis=1)
        v_tile = tl.load(
            v_ptr + sequence * stride_vb + token[:, None] * stride_vt + group * stride_vg + offs_d[None, :] * stride_vd,
            mask=visible[:, None], other=0.0,
        )  # fmt: skip
        high = probs.to(v_tile.dtype)
        out = tl.dot(high, v_tile, input_precision=PRECISION)
        if SPLIT:
            out = tl.dot((probs - high.to(tl.float32)).to(v_tile.dtype), v_tile, out)
        out_ptrs = partial_ptr + (pid * HEADS + offs_h)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_ptrs, out * (1.0 / total)[:, None], mask=mask_h[:, None])
        tl.store(lse_ptrs, largest + tl.log2(total) * LN2, mask=mask_h)
    else:
        tl.store(lse_ptrs, tl.full((ROWS,), float("-inf"), dtype=tl.float32), mask=mask_h)


@triton.jit
def _decode_combine_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    NUM_SELECTED: tl.constexpr, NUM_SLOTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, head): the weighted sum of its slots, in slot order."""
    pid = tl.program_id(0).to(tl.int64)
    group = pid // HEADS
    first = group * NUM_SELECTED * HEADS + pid % HEADS
    slots = tl.arange(0, NUM_SLOTS)
    offs_d = tl.arange(0, HEAD_DIM)
    lse = tl.load(partial_lse_ptr + first + slots * HEADS, mask=slots < NUM_SELECTED, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp2((lse - largest) * LOG2E)
    total = tl.sum(weight, axis=0)
    # [NUM_SLOTS, HEAD_DIM]; an empty slot was never written
    out = tl.load(
        partial_ptr + (first + slots * HEADS)[:, None] * HEAD_DIM + offs_d[None, :],
        mask=(weight > 0.0)[:, None], other=0.0,
    )  # fmt: skip
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    out = tl.sum(out * weight[:, None], axis=0) / divisor
    tl.store(out_ptr + pid * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + pid, tl.where(some, largest + tl.log2(divisor) * LN2, float("-inf")))
