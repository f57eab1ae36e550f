"""The teacher P of the full-sequence KL for Hopper, in Gluon: P = mean over a group's heads of exp(scale q.k - lse).

A program makes P of 64 query rows and some tiles of keys, tile by tile and head by head. One warp loads; each of two
groups of four warps has its own 128 keys of a tile, makes the next head's scores on the tensor cores beside its
exponentials of this head's, and leaves the sum over the heads in memory. Both read the same queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..gluon_support import make_barriers, tma_load

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(128)
PARTS = gl.constexpr(2)
DIM = gl.constexpr(128)
KEY_STAGES = gl.constexpr(2)
QUERY_STAGES = gl.constexpr(6)
# 64 for each of two scores and the sum, and what ptxas wants beside them; a warp that only copies has the least.
MAKE_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load(
    query_desc, key_desc, query_smem, key_smem, query_full, query_empty, key_full, key_empty,
    row, key_row, num_tiles, group, HEADS: gl.constexpr,
):  # fmt: skip
    """Keys tile after tile; the heads' queries [ROWS, DIM] once if all have a place, else anew for each tile."""
    RESIDENT: gl.constexpr = HEADS <= QUERY_STAGES
    for tile in range(num_tiles):
        stage = tile % KEY_STAGES
        mbarrier.wait(key_empty.index(stage), (tile // KEY_STAGES + 1) & 1)
        for part in gl.static_range(PARTS):
            bar = key_full.index(stage * PARTS + part)
            mbarrier.expect(bar, KEYS * DIM * 2)
            place = [key_row + (tile * PARTS + part) * KEYS, group * DIM]
            tma_load(key_desc, place, bar, key_smem.index(stage * PARTS + part))
        if (not RESIDENT) or tile == 0:
            for head in range(HEADS):
                step = tile * HEADS + head
                bar = query_full.index(step % QUERY_STAGES)
                if not RESIDENT:
                    mbarrier.wait(query_empty.index(step % QUERY_STAGES), (step // QUERY_STAGES + 1) & 1)
                mbarrier.expect(bar, ROWS * DIM * 2)
                place = [row, (group * HEADS + head) * DIM]
                tma_load(query_desc, place, bar, query_smem.index(step % QUERY_STAGES))


@gluon.jit
def _start_scores(
    query_smem, key_smem, query_full, key_full, zeros, tile, head, num_tiles, PART: gl.constexpr, HEADS: gl.constexpr
):
    """Scores [ROWS, KEYS] of a head and a tile of keys, on their way; past the last tile of anything."""
    RESIDENT: gl.constexpr = HEADS <= QUERY_STAGES
    place = tile % KEY_STAGES * PARTS + PART
    step = head if RESIDENT else tile * HEADS + head
    stage = step % QUERY_STAGES
    is_tile = tile < num_tiles
    mbarrier.wait(key_full.index(place), (tile // KEY_STAGES) & 1, pred=is_tile & (head == 0))
    mbarrier.wait(query_full.index(stage), (step // QUERY_STAGES) & 1, pred=is_tile)
    return warpgroup_mma(
        query_smem.index(stage), key_smem.index(place).permute([1, 0]), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _add_head(
    total, scores, query_smem, key_smem, query_full, query_empty, key_full, zeros, lse_ptrs, tile, head, num_tiles,
    scale, PART: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """total + exp(scale scores - lse), and the scores of what comes next: the next head or the next tile's first."""
    RESIDENT: gl.constexpr = HEADS <= QUERY_STAGES
    lse = gl.load(lse_ptrs + head) * LOG2E
    is_last = head == HEADS - 1
    next_tile = gl.where(is_last, tile + 1, tile)
    next_head = gl.where(is_last, 0, head + 1)
    coming = _start_scores(
        query_smem, key_smem, query_full, key_full, zeros, next_tile, next_head, num_tiles, PART, HEADS
    )
    total += gl.exp2(scores * (scale * LOG2E) - lse[:, None])
    coming = warpgroup_mma_wait(0, deps=[coming])
    if not RESIDENT:
        stage = (next_tile * HEADS + next_head) % QUERY_STAGES
        mbarrier.arrive(query_empty.index(stage), count=1, pred=next_tile < num_tiles)
    return total, coming


@gluon.jit
def _make_probs(
    query_smem, key_smem, query_full, query_empty, key_full, key_empty, lse_ptr, probs_ptr,
    num_rows, stride_lt, stride_pt, num_tiles, scale, PART: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """P of the rows and of this group of warps' keys of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=layout)
    offs_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs_n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    # Rows past the tile's end have the lse of its last: what they make is not stored.
    lse_ptrs = lse_ptr + gl.minimum(offs_m, num_rows - 1) * stride_lt
    probs_ptrs = probs_ptr + offs_m[:, None] * stride_pt + (PART * KEYS + offs_n)[None, :]
    scores = _start_scores(query_smem, key_smem, query_full, key_full, zeros, 0, 0, num_tiles, PART, HEADS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if HEADS > QUERY_STAGES:
        mbarrier.arrive(query_empty.index(0), count=1)
    for tile in range(num_tiles):
        total = zeros
        # Two at once, so that both scores keep their registers.
        for pair in range(HEADS // 2):
            for half in gl.static_range(2):
                total, scores = _add_head(
                    total, scores, query_smem, key_smem, query_full, query_empty, key_full, zeros, lse_ptrs,
                    tile, pair * 2 + half, num_tiles, scale, PART, HEADS,
                )  # fmt: skip
        if HEADS % 2:
            total, scores = _add_head(
                total, scores, query_smem, key_smem, query_full, query_empty, key_full, zeros, lse_ptrs,
                tile, HEADS - 1, num_tiles, scale, PART, HEADS,
            )  # fmt: skip
        mbarrier.arrive(key_empty.index(tile % KEY_STAGES), count=1)
        gl.store(probs_ptrs + tile * (PARTS * KEYS), total * (1.0 / HEADS), mask=(offs_m < num_rows)[:, None])


@gluon.jit(do_not_specialize=["first_row"])
def hopper_teacher_kernel(
    query_desc,
    key_desc,
    lse_ptr,
    items_ptr,
    probs_ptr,
    first_row,
    scale,
    stride_lt,
    stride_pt,
    stride_pg,
    NUM_GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
):
    """One program per item and group; P [rows from first_row on, group, key position] has whole tiles of keys.

    Items int64 [items, 5]: first query row, number of rows, key row of position 0, first tile of keys, tiles of keys.
    """
    item = items_ptr + gl.program_id(0) // NUM_GROUPS * 5
    group = gl.program_id(0) % NUM_GROUPS
    row = gl.load(item)
    num_rows = gl.load(item + 1).to(gl.int32)
    first_position = gl.load(item + 3) * (PARTS * KEYS)
    key_row = (gl.load(item + 2) + first_position).to(gl.int32)
    num_tiles = gl.load(item + 4).to(gl.int32)
    lse_ptr += row * stride_lt + group * HEADS
    probs_ptr += (row - first_row) * stride_pt + group * stride_pg + first_position

    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query_smem = gl.allocate_shared_memory(query_desc.dtype, [QUERY_STAGES, ROWS, DIM], shared)
    key_smem = gl.allocate_shared_memory(key_desc.dtype, [KEY_STAGES * PARTS, KEYS, DIM], shared)
    query_full = make_barriers(QUERY_STAGES, 1)
    query_empty = make_barriers(QUERY_STAGES, PARTS)
    key_full = make_barriers(KEY_STAGES * PARTS, 1)
    key_empty = make_barriers(KEY_STAGES, PARTS)
    gl.warp_specialize(
        [
            (_make_probs, (
                query_smem, key_smem, query_full, query_empty, key_full, key_empty, lse_ptr, probs_ptr,
                num_rows, stride_lt, stride_pt, num_tiles, scale, 0, HEADS)),
            (_make_probs, (
                query_smem, key_smem, query_full, query_empty, key_full, key_empty, lse_ptr, probs_ptr,
                num_rows, stride_lt, stride_pt, num_tiles, scale, 1, HEADS)),
            (_load, (
                query_desc, key_desc, query_smem, key_smem, query_full, query_empty, key_full, key_empty,
                row.to(gl.int32), key_row, num_tiles, group, HEADS)),
        ],
        [4, 1],
        [MAKE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
