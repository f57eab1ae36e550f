"""Backward kernel of block-sparse attention for Hopper, in Gluon: the items and results of backward_kernel.py.

A Triton program waits at each of its products. Here five groups of warps work side by side and meet at barriers in
shared memory: one brings rows of queries, one makes P, dS and dQ of each tile, one adds up dV and one dK from what that
one leaves in shared memory, and one stores dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_support import async_load, make_barriers, reinterpret
from .backward_kernel import TEACHER_UNIT
from .hopper_tiles import COPY_REGISTERS, HALF, ROWS, SIZE, find_item, load_block, load_pairs, store_pairs

# Queries of the next tile are needed before dK of this one is done; their gradients are not.
QUERY_STAGES = gl.constexpr(3)
GRAD_STAGES = gl.constexpr(2)
# 128 accumulators and what ptxas wants beside them. The group that makes P gets the rest, 168.
SUM_REGISTERS = gl.constexpr(160)
# Columns of the smallest product.
PAIRS = gl.constexpr(8)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_rows(
    query_desc, grad_desc, lse_ptr, delta_ptr, unit_ptr, infinity_ptr, query_table_ptr, pairs_ptr,
    query_boxes, grad_boxes, rows_smem, last_key_smem, query_full, query_empty, grad_full, grad_empty,
    start, end, group, PER_QUERY: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Queries and their gradients by TMA, heads past the last one as 0; what belongs to single rows by cp.async."""
    STEP: gl.constexpr = ROWS // PLACES
    offs = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    head = gl.minimum(offs % PLACES, HEADS - 1)
    for tile in range(0, gl.cdiv(end - start, STEP)):
        first = start + tile * STEP
        number = first + offs // PLACES
        is_real = (number < end) & (offs % PLACES < HEADS)
        query_row = gl.load(pairs_ptr + gl.minimum(number, end - 1)) // PER_QUERY
        place = query_row.to(gl.int64) * NUM_HEADS + group * HEADS + head
        load_pairs(
            query_desc, query_boxes, tile % QUERY_STAGES, query_full, query_empty, tile, pairs_ptr, first, end,
            group * HEADS, PER_QUERY, STEP, QUERY_STAGES,
        )  # fmt: skip
        stage = tile % GRAD_STAGES
        load_pairs(
            grad_desc, grad_boxes, stage, grad_full, grad_empty, tile, pairs_ptr, first, end,
            group * HEADS, PER_QUERY, STEP, GRAD_STAGES,
        )  # fmt: skip
        # Rows that only fill the tile up get P = 0.
        lse_address = gl.where(is_real, lse_ptr + place, infinity_ptr + head * 0)
        async_load(rows_smem.index(4 * stage), lse_address)
        async_load(rows_smem.index(4 * stage + 1), delta_ptr + place)
        async_load(rows_smem.index(4 * stage + 2), unit_ptr + place)
        async_load(last_key_smem.index(4 * stage + 3), query_table_ptr + query_row * 3 + 2)
        async_copy.mbarrier_arrive(grad_full.index(stage), increment_count=False)


@gluon.jit
def _make_rows(
    key_smem, value_smem, centred_smem, query_smem, grad_smem, rows_smem, last_key_smem, probs_smem, dscores_smem,
    dq_smem, query_full, query_empty, grad_full, grad_empty, probs_full, probs_empty, dscores_full, dscores_empty,
    dk_done, dq_full, start, end, local_end, first_key, scale, STEP: gl.constexpr,
):  # fmt: skip
    """P and dS [ROWS, SIZE] of each tile, then dQ from this block; the next tile's scores are made beside dQ."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([ROWS, SIZE], gl.float32, layout=layout)
    offs_k = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    mbarrier.wait(query_full.index(0), 0)
    scores = warpgroup_mma(query_smem.index(0), key_smem.index(0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for tile in range(0, gl.cdiv(end - start, STEP)):
        first = start + tile * STEP
        # 0, which the compiler cannot know: else it makes the addresses of all that has one place before the loop and
        # has no registers for them.
        only = tile >> 24
        stage = tile % GRAD_STAGES
        mbarrier.arrive(query_empty.index(tile % QUERY_STAGES), count=1)
        mbarrier.wait(grad_full.index(stage), (tile // GRAD_STAGES) & 1)
        value = value_smem.index(only).permute([1, 0])
        dprobs = warpgroup_mma(grad_smem.index(stage), value, zeros, use_acc=False, is_async=True)
        lse = rows_smem.index(4 * stage).load(row_layout) * LOG2E
        probs = gl.exp2(scores * (scale * LOG2E) - lse[:, None])
        if first < local_end:
            last_key = last_key_smem.index(4 * stage + 3).load(row_layout)
            probs = gl.where((offs_k + (first_key + only))[None, :] <= last_key[:, None], probs, 0.0)
        mbarrier.wait(probs_empty, (tile + 1) & 1)
        probs_smem.index(only).store(probs.to(probs_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(probs_full, count=1)
        delta = rows_smem.index(4 * stage + 1).load(row_layout)
        inverse = 1.0 / rows_smem.index(4 * stage + 2).load(row_layout)
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        dscores = (probs * (dprobs - delta[:, None])).to(dscores_smem.dtype)
        mbarrier.arrive(grad_empty.index(stage), count=1)
        mbarrier.wait(dscores_empty, (tile + 1) & 1)
        dscores_smem.index(only).store(dscores)
        fence_async_shared()
        mbarrier.arrive(dscores_full, count=1)
        dq = warpgroup_mma(dscores_smem.index(only), centred_smem.index(only), zeros, use_acc=False, is_async=True)
        stage = (tile + 1) % QUERY_STAGES
        mbarrier.wait(query_full.index(stage), ((tile + 1) // QUERY_STAGES) & 1, pred=first + STEP < end)
        key = key_smem.index(only).permute([1, 0])
        scores = warpgroup_mma(query_smem.index(stage), key, zeros, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        # dQ takes the place of dS.
        mbarrier.wait(dk_done, tile & 1)
        dq_smem.index(only).store((dq * inverse[:, None]).to(dq_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(dq_full, count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _store_dq(
    dq_boxes, dq_full, dscores_empty, dq_desc, pairs_ptr, start, end, first_pair, STEP: gl.constexpr,
):  # fmt: skip
    """Copy each tile's rows of dQ to their slots."""
    for tile in range(0, gl.cdiv(end - start, STEP)):
        mbarrier.wait(dq_full, tile & 1)
        store_pairs(dq_desc, dq_boxes, 0, pairs_ptr, start + tile * STEP, end, first_pair, STEP)
        tma.store_wait(0)
        mbarrier.arrive(dscores_empty, count=1)


@gluon.jit
def _put_sum(total, grad_ptr, slot_ptr, first_key, num_keys, group, is_only, slot, NUM_GROUPS: gl.constexpr):
    """Add a sum over tiles [SIZE, SIZE] to the gradient, or write it to the item's slot."""
    offs = gl.arange(0, SIZE, layout=gl.SliceLayout(1, total.type.layout))
    offs_d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, total.type.layout))
    if is_only:
        place = (first_key + offs).to(gl.int64) * NUM_GROUPS + group
        mask = (offs < num_keys)[:, None]
        address = grad_ptr + place[:, None] * SIZE + offs_d[None, :]
        gl.store(address, gl.load(address, mask=mask, other=0.0) + total, mask=mask)
    else:
        place = slot.to(gl.int64) * SIZE + offs
        gl.store(slot_ptr + place[:, None] * SIZE + offs_d[None, :], total)


@gluon.jit
def _make_dk(
    dscores_smem, query_smem, query_full, query_empty, dscores_full, dk_done, dk_ptr, dk_slot_ptr,
    start, end, first_key, num_keys, group, is_only, slot, scale, STEP: gl.constexpr, NUM_GROUPS: gl.constexpr,
):  # fmt: skip
    """dK = scale x the sum over tiles of dS^T Q."""
    dk = gl.zeros([SIZE, SIZE], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    for tile in range(0, gl.cdiv(end - start, STEP)):
        stage = tile % QUERY_STAGES
        mbarrier.wait(query_full.index(stage), (tile // QUERY_STAGES) & 1)
        mbarrier.wait(dscores_full, tile & 1)
        dk = warpgroup_mma(dscores_smem.index(0).permute([1, 0]), query_smem.index(stage), dk, is_async=True)
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(dk_done, count=1)
        mbarrier.arrive(query_empty.index(stage), count=1)
    _put_sum(dk * scale, dk_ptr, dk_slot_ptr, first_key, num_keys, group, is_only, slot, NUM_GROUPS)


@gluon.jit
def _make_dv(
    probs_smem, grad_smem, heads_smem, grad_full, grad_empty, probs_full, probs_empty, pairs_ptr, teacher_ptr,
    dv_ptr, dv_slot_ptr, start, end, first_pair, first_key, num_keys, group, is_only, slot,
    HEADS: gl.constexpr, STEP: gl.constexpr, NUM_GROUPS: gl.constexpr, TEACHER: gl.constexpr,
):  # fmt: skip
    """dV = the sum over tiles of P^T dO. With TEACHER, also the mean of P over the heads of each pair."""
    dv = gl.zeros([SIZE, SIZE], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
    if TEACHER:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIRS, 16])
        zeros = gl.zeros([HALF, PAIRS], gl.float32, layout=layout)
        offs_p = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))
        offs_k = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    for tile in range(0, gl.cdiv(end - start, STEP)):
        first = start + tile * STEP
        stage = tile % GRAD_STAGES
        mbarrier.wait(grad_full.index(stage), (tile // GRAD_STAGES) & 1)
        mbarrier.wait(probs_full, tile & 1)
        dv = warpgroup_mma(probs_smem.index(0).permute([1, 0]), grad_smem.index(stage), dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=[dv])
        if TEACHER:
            is_pair = (first + offs_p < end) & (offs_p < STEP)
            place = (gl.load(pairs_ptr + first + offs_p, mask=is_pair, other=0) - first_pair) * SIZE
            for half in gl.static_range(2):
                probs = probs_smem.index(0).slice(half * HALF, HALF, dim=1).permute([1, 0])
                mean = warpgroup_mma(probs, heads_smem.permute([1, 0]), zeros, use_acc=False, is_async=True)
                mean = warpgroup_mma_wait(0, deps=[mean]) * (1.0 / (HEADS * TEACHER_UNIT))
                address = teacher_ptr + ((place + half * HALF)[None, :] + offs_k[:, None])
                gl.store(address, mean.to(teacher_ptr.dtype.element_ty), mask=is_pair[None, :])
        mbarrier.arrive(probs_empty, count=1)
        mbarrier.arrive(grad_empty.index(stage), count=1)
    _put_sum(dv, dv_ptr, dv_slot_ptr, first_key, num_keys, group, is_only, slot, NUM_GROUPS)


@gluon.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def hopper_bwd_kernel(
    query_desc,
    key_ptr,
    centred_ptr,
    value_ptr,
    grad_desc,
    lse_ptr,
    delta_ptr,
    unit_ptr,
    infinity_ptr,
    query_table_ptr,
    block_table_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    row_slot_ptr,
    item_row_ptr,
    chunk_item_ptr,
    dq_desc,
    teacher_ptr,
    dk_ptr,
    dv_ptr,
    dk_slot_ptr,
    dv_slot_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    NUM_GROUPS: gl.constexpr,
    NUM_SELECTED: gl.constexpr,
    HEADS: gl.constexpr,
    PLACES: gl.constexpr,
    TEACHER: gl.constexpr,
):
    """One program per item, as _sparse_attention_bwd_kernel; infinity_ptr points at one +inf."""
    item = gl.load(chunk_item_ptr + chunk) + gl.program_id(0)
    if item < gl.load(chunk_item_ptr + chunk + 1):
        row, start, end, local_end, number, num_items = find_item(
            item, row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr
        )
        slot = gl.load(row_slot_ptr + row) + number
        is_only = num_items == 1
        block = row % num_blocks
        group = (row // num_blocks) % NUM_GROUPS
        first_key = gl.load(block_table_ptr + 3 * block)
        num_keys = gl.load(block_table_ptr + 3 * block + 1)

        STEP: gl.constexpr = ROWS // PLACES
        dtype: gl.constexpr = key_ptr.dtype.element_ty
        matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        key_smem = gl.allocate_shared_memory(dtype, [1, SIZE, SIZE], matrix)
        value_smem = gl.allocate_shared_memory(dtype, [1, SIZE, SIZE], matrix)
        centred_smem = gl.allocate_shared_memory(dtype, [1, SIZE, SIZE], matrix)
        # What TMA copies at once: half the dimensions of a pair's heads. A tile's halves lie one after the other.
        box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        query_boxes = gl.allocate_shared_memory(dtype, [QUERY_STAGES * 2 * STEP, 1, PLACES, HALF], box)
        grad_boxes = gl.allocate_shared_memory(dtype, [GRAD_STAGES * 2 * STEP, 1, PLACES, HALF], box)
        query_smem = reinterpret(query_boxes, dtype, [QUERY_STAGES, ROWS, SIZE], matrix)
        grad_smem = reinterpret(grad_boxes, dtype, [GRAD_STAGES, ROWS, SIZE], matrix)
        probs_smem = gl.allocate_shared_memory(dtype, [1, ROWS, SIZE], matrix)
        dscores_smem = gl.allocate_shared_memory(dtype, [1, ROWS, SIZE], matrix)
        dq_smem = reinterpret(dscores_smem, gl.float16, [1, ROWS, SIZE], matrix)
        dq_boxes = reinterpret(dscores_smem, gl.float16, [2 * STEP, 1, PLACES, HALF], box)
        # Of each row lse, delta, unit, last key.
        rows_smem = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES * 4, ROWS], flat)
        last_key_smem = reinterpret(rows_smem, gl.int32, [GRAD_STAGES * 4, ROWS], flat)
        # [PAIRS, ROWS]: which rows of a tile are a pair's.
        heads_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        owner = gl.arange(0, ROWS, layout=gl.SliceLayout(0, heads_layout)) // PLACES
        is_owner = owner[None, :] == gl.arange(0, PAIRS, layout=gl.SliceLayout(1, heads_layout))[:, None]
        heads_smem = gl.allocate_shared_memory(dtype, [PAIRS, ROWS], matrix, is_owner.to(dtype))
        query_full = make_barriers(QUERY_STAGES, 1)
        query_empty = make_barriers(QUERY_STAGES, 2)
        # The loader's own word, and one from each of its threads when its cp.async are there.
        grad_full = make_barriers(GRAD_STAGES, 33)
        grad_empty = make_barriers(GRAD_STAGES, 2)
        probs_full, probs_empty = make_barriers(1, 1).index(0), make_barriers(1, 1).index(0)
        dscores_full, dscores_empty = make_barriers(1, 1).index(0), make_barriers(1, 1).index(0)
        dk_done, dq_full = make_barriers(1, 1).index(0), make_barriers(1, 1).index(0)
        wide_group = group.to(gl.int64)
        load_block(key_ptr + wide_group * stride_kg, first_key, num_keys, stride_kt, key_smem.index(0))
        load_block(value_ptr + wide_group * stride_vg, first_key, num_keys, stride_vt, value_smem.index(0))
        load_block(centred_ptr + wide_group * SIZE, first_key, num_keys, NUM_GROUPS * SIZE, centred_smem.index(0))
        fence_async_shared()
        gl.warp_specialize(
            [
                (_make_rows, (
                    key_smem, value_smem, centred_smem, query_smem, grad_smem, rows_smem, last_key_smem, probs_smem,
                    dscores_smem, dq_smem, query_full, query_empty, grad_full, grad_empty, probs_full, probs_empty,
                    dscores_full, dscores_empty, dk_done, dq_full, start, end, local_end, first_key, scale, STEP,
                )),
                (_make_dv, (
                    probs_smem, grad_smem, heads_smem, grad_full, grad_empty, probs_full, probs_empty, pairs_ptr,
                    teacher_ptr, dv_ptr, dv_slot_ptr, start, end, first_pair, first_key, num_keys, group, is_only, slot,
                    HEADS, STEP, NUM_GROUPS, TEACHER,
                )),
                (_make_dk, (
                    dscores_smem, query_smem, query_full, query_empty, dscores_full, dk_done, dk_ptr, dk_slot_ptr,
                    start, end, first_key, num_keys, group, is_only, slot, scale, STEP, NUM_GROUPS,
                )),
                (_load_rows, (
                    query_desc, grad_desc, lse_ptr, delta_ptr, unit_ptr, infinity_ptr, query_table_ptr, pairs_ptr,
                    query_boxes, grad_boxes, rows_smem, last_key_smem, query_full, query_empty, grad_full, grad_empty,
                    start, end, group, NUM_GROUPS * NUM_SELECTED, NUM_GROUPS * HEADS, HEADS, PLACES,
                )),
                (_store_dq, (dq_boxes, dq_full, dscores_empty, dq_desc, pairs_ptr, start, end, first_pair, STEP)),
            ],
            [4, 4, 1, 1],
            [SUM_REGISTERS, SUM_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
