"""Forward kernel of block-sparse attention for Hopper, in Gluon: the items and results of kernel.py.

Three groups of warps take the tiles of an item in turn, so that one's softmax runs beside the others' products; one
warp brings queries, one stores partial outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_support import make_barriers, reinterpret
from .hopper_tiles import COPY_REGISTERS, HALF, ROWS, SIZE, find_item, load_block, load_pairs, store_pairs

WORKERS = gl.constexpr(3)
# Two tiles of queries for each.
STAGES = gl.constexpr(6)
WORKER_REGISTERS = gl.constexpr(152)


@gluon.jit
def _load_queries(
    query_desc, pairs_ptr, query_boxes, query_full, query_empty, start, end, group,
    PER_QUERY: gl.constexpr, HEADS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Bring each tile's queries."""
    for tile in range(0, gl.cdiv(end - start, STEP)):
        load_pairs(
            query_desc, query_boxes, tile % STAGES, query_full, query_empty, tile, pairs_ptr, start + tile * STEP, end,
            group * HEADS, PER_QUERY, STEP, STAGES,
        )  # fmt: skip


@gluon.jit
def _attend(
    tiles, pointers, numbers,
    PER_QUERY: gl.constexpr, HEADS: gl.constexpr, PLACES: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    """Normalised partial outputs of every WORKERS-th tile, and their lse in log2."""
    key_smem, value_smem, query_smem, output_smem, query_full, query_empty, output_full, output_empty = tiles
    pairs_ptr, query_table_ptr, lse_ptr, weight_ptr = pointers
    start, end, local_end, first_pair, first_key, scale_log2, unit = numbers
    STEP: gl.constexpr = ROWS // PLACES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([ROWS, SIZE], gl.float32, layout=layout)
    offs = gl.arange(0, ROWS, layout=row_layout)
    head = offs % PLACES
    offs_k = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    to_unit = gl.exp2(-unit)
    for turn in range(0, gl.cdiv(gl.cdiv(end - start, STEP) - WORKER, WORKERS)):
        tile = turn * WORKERS + WORKER
        stage = tile % STAGES
        # 0, which the compiler cannot know: addresses made before the loop would have no registers.
        only = turn >> 24
        number = start + tile * STEP + offs // PLACES
        pair = gl.load(pairs_ptr + gl.minimum(number, end - 1))
        mbarrier.wait(query_full.index(stage), (tile // STAGES) & 1)
        key = key_smem.index(only).permute([1, 0])
        scores = warpgroup_mma(query_smem.index(stage), key, zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(query_empty.index(stage), count=1)
        if start + tile * STEP < local_end:
            last_key = gl.load(query_table_ptr + pair // PER_QUERY * 3 + 2)
            is_visible = (offs_k + (first_key + only))[None, :] <= last_key[:, None]
            scores = gl.where(is_visible, scores, float("-inf"))
        largest = gl.max(scores, 1) * scale_log2
        probs = gl.exp2(scores * scale_log2 - largest[:, None])
        total = gl.sum(probs, 1)
        left = gl.convert_layout(probs.to(value_smem.dtype), gl.DotOperandLayout(0, layout, 2))
        output = warpgroup_mma(left, value_smem.index(only), zeros, use_acc=False, is_async=True)
        place = (pair - first_pair).to(gl.int64) * HEADS + head
        lse = largest + gl.log2(total)
        is_real = (number < end) & (head < HEADS)
        gl.store(lse_ptr + place, lse, mask=is_real)
        gl.store(weight_ptr + place, lse + unit, mask=is_real)
        output = warpgroup_mma_wait(0, deps=[output])
        mbarrier.wait(output_empty.index(WORKER), (turn + 1) & 1)
        output_smem.index(WORKER + only).store((output * (to_unit / total)[:, None]).to(output_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(output_full.index(WORKER), count=1)


@gluon.jit
def _store_outputs(
    partial_desc, pairs_ptr, output_boxes, output_full, output_empty, start, end, first_pair, STEP: gl.constexpr,
):  # fmt: skip
    """Copy each tile's outputs to their slots."""
    for tile in range(0, gl.cdiv(end - start, STEP)):
        worker = tile % WORKERS
        mbarrier.wait(output_full.index(worker), (tile // WORKERS) & 1)
        store_pairs(partial_desc, output_boxes, worker, pairs_ptr, start + tile * STEP, end, first_pair, STEP)
        tma.store_wait(0)
        mbarrier.arrive(output_empty.index(worker), count=1)


@gluon.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def hopper_fwd_kernel(
    query_desc,
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
    partial_desc,
    partial_lse_ptr,
    partial_weight_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale_log2,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    NUM_GROUPS: gl.constexpr,
    NUM_SELECTED: gl.constexpr,
    HEADS: gl.constexpr,
    PLACES: gl.constexpr,
):
    """One program per item, as _sparse_attention_fwd_kernel."""
    item = gl.load(chunk_item_ptr + chunk) + gl.program_id(0)
    if item < gl.load(chunk_item_ptr + chunk + 1):
        row, start, end, local_end, _number, _num_items = find_item(
            item, row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr
        )
        block = row % num_blocks
        group = (row // num_blocks) % NUM_GROUPS
        first_key = gl.load(block_table_ptr + 3 * block)
        num_keys = gl.load(block_table_ptr + 3 * block + 1)
        unit = gl.load(value_size_ptr + block * NUM_GROUPS + group) - 15.0

        STEP: gl.constexpr = ROWS // PLACES
        dtype: gl.constexpr = key_ptr.dtype.element_ty
        matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        key_smem = gl.allocate_shared_memory(dtype, [1, SIZE, SIZE], matrix)
        value_smem = gl.allocate_shared_memory(dtype, [1, SIZE, SIZE], matrix)
        # What TMA copies at once: half the dimensions of a pair's heads. A tile's halves lie one after the other.
        query_boxes = gl.allocate_shared_memory(dtype, [STAGES * 2 * STEP, 1, PLACES, HALF], box)
        output_boxes = gl.allocate_shared_memory(gl.float16, [WORKERS * 2 * STEP, 1, PLACES, HALF], box)
        query_smem = reinterpret(query_boxes, dtype, [STAGES, ROWS, SIZE], matrix)
        output_smem = reinterpret(output_boxes, gl.float16, [WORKERS, ROWS, SIZE], matrix)
        query_full, query_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
        output_full, output_empty = make_barriers(WORKERS, 1), make_barriers(WORKERS, 1)
        wide_group = group.to(gl.int64)
        load_block(key_ptr + wide_group * stride_kg, first_key, num_keys, stride_kt, key_smem.index(0))
        load_block(value_ptr + wide_group * stride_vg, first_key, num_keys, stride_vt, value_smem.index(0))
        fence_async_shared()
        PER_QUERY: gl.constexpr = NUM_GROUPS * NUM_SELECTED
        tiles = (key_smem, value_smem, query_smem, output_smem, query_full, query_empty, output_full, output_empty)
        pointers = (pairs_ptr, query_table_ptr, partial_lse_ptr, partial_weight_ptr)
        numbers = (start, end, local_end, first_pair, first_key, scale_log2, unit)
        gl.warp_specialize(
            [
                (_attend, (tiles, pointers, numbers, PER_QUERY, HEADS, PLACES, 0)),
                (_attend, (tiles, pointers, numbers, PER_QUERY, HEADS, PLACES, 1)),
                (_attend, (tiles, pointers, numbers, PER_QUERY, HEADS, PLACES, 2)),
                (_load_queries, (
                    query_desc, pairs_ptr, query_boxes, query_full, query_empty, start, end, group,
                    PER_QUERY, HEADS, STEP,
                )),
                (_store_outputs, (
                    partial_desc, pairs_ptr, output_boxes, output_full, output_empty, start, end, first_pair, STEP,
                )),
            ],
            [4, 4, 1, 1],
            [WORKER_REGISTERS, WORKER_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
