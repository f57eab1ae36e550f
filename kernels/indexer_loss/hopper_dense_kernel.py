"""Value of the full-sequence KL and its gradient by the student's scores for Hopper, in Gluon.

    P     = mean over a group's heads of exp(scale q.k - lse)
    P_idx = exp(index_scale index_q.index_k - index_lse)
    value = sum of weight P (log P - log P_idx);    D = P_idx - P in 16 bits, left in memory

A program takes 64 query rows and some tiles of keys, tile by tile and head by head; the student comes after the last
head. Each of two groups of four warps has its own 128 keys of a tile and makes the next scores on the tensor cores
beside its exponentials of these. One warp brings queries and keys, one those of the student.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_support import make_barriers, tma_load
from .dense_products_kernel import LOST_AT

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(128)
PARTS = gl.constexpr(2)
DIM = gl.constexpr(128)
# Places for the queries of two heads; one more place is the student's.
PAIR_STAGES = gl.constexpr(3)
STUDENT = gl.constexpr(6)
# 64 for each of two scores and the sum, and what ptxas wants beside them; a warp that only copies has the least.
MAKE_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _log2(x):
    """log2 of x >= 2^-126 by the GPU's own instruction, off by at most 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _load(
    query_desc, key_desc, query_smem, key_smem, query_full, query_empty, key_full, key_empty,
    row, key_row, num_tiles, group, HEADS: gl.constexpr,
):  # fmt: skip
    """Keys tile after tile; the heads' queries by pairs, once if all have a place, else anew for each tile."""
    PAIRS: gl.constexpr = (HEADS + 1) // 2
    RESIDENT: gl.constexpr = PAIRS <= PAIR_STAGES
    for tile in range(num_tiles):
        for part in gl.static_range(PARTS):
            mbarrier.wait(key_empty.index(part), (tile + 1) & 1)
            mbarrier.expect(key_full.index(part), KEYS * DIM * 2)
            place = [key_row + (tile * PARTS + part) * KEYS, group * DIM]
            tma_load(key_desc, place, key_full.index(part), key_smem.index(part))
        if (not RESIDENT) or tile == 0:
            for pair in range(PAIRS):
                number = tile * PAIRS + pair
                stage = number % PAIR_STAGES
                if not RESIDENT:
                    mbarrier.wait(query_empty.index(stage), (number // PAIR_STAGES + 1) & 1)
                # An odd last head comes twice.
                mbarrier.expect(query_full.index(stage), 2 * ROWS * DIM * 2)
                for half in gl.static_range(2):
                    place = [row, (group * HEADS + gl.minimum(pair * 2 + half, HEADS - 1)) * DIM]
                    tma_load(query_desc, place, query_full.index(stage), query_smem.index(stage * 2 + half))


@gluon.jit
def _load_student(
    index_query_desc, index_key_desc, query_smem, key_smem, query_full, key_full, key_empty,
    row, key_row, num_tiles, group,
):  # fmt: skip
    """The student's queries once; its keys for one group of warps after the other, in one place.

    Each group has its own barrier: on a common one it could take the load before the other's for its own.
    """
    bar = query_full.index(PAIR_STAGES)
    mbarrier.expect(bar, ROWS * DIM * 2)
    tma_load(index_query_desc, [row, group * DIM], bar, query_smem.index(STUDENT))
    for number in range(num_tiles * PARTS):
        mbarrier.wait(key_empty.index(PARTS), (number + 1) & 1)
        bar = key_full.index(PARTS + number % PARTS)
        mbarrier.expect(bar, KEYS * DIM * 2)
        tma_load(index_key_desc, [key_row + number * KEYS, 0], bar, key_smem.index(PARTS))


@gluon.jit
def _pair_stage(tile, pair, HEADS: gl.constexpr):
    """Stage of a tile's pair of heads, and the parity of its "full" barrier."""
    PAIRS: gl.constexpr = (HEADS + 1) // 2
    number = pair if PAIRS <= PAIR_STAGES else tile * PAIRS + pair
    return number % PAIR_STAGES, (number // PAIR_STAGES) & 1


@gluon.jit
def _start(tiles, zeros, place, key_place):
    """Scores [ROWS, KEYS] of queries and keys in these places, on their way."""
    query_smem, key_smem = tiles[0], tiles[1]
    key = key_smem.index(key_place).permute([1, 0])
    return warpgroup_mma(query_smem.index(place), key, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_tile(tiles, zeros, tile, num_tiles, PART: gl.constexpr, HEADS: gl.constexpr):
    """Scores of a tile's first head, on their way; past the last tile of anything."""
    query_full, key_full = tiles[2], tiles[4]
    stage, parity = _pair_stage(tile, 0, HEADS)
    mbarrier.wait(key_full.index(PART), tile & 1, pred=tile < num_tiles)
    mbarrier.wait(query_full.index(stage), parity, pred=tile < num_tiles)
    return _start(tiles, zeros, stage * 2, PART)


@gluon.jit
def _add_head(total, scores, lse, coming, lse_ptrs, next_head, scale):
    """total + exp(scale scores - lse); the scores that come, and their lse."""
    next_lse = gl.load(lse_ptrs + next_head)
    total += gl.exp2(scores * (scale * LOG2E) - (lse * LOG2E)[:, None])
    return total, warpgroup_mma_wait(0, deps=[coming]), next_lse


@gluon.jit
def _mean_of_heads(
    tiles, scores, lse, zeros, lse_ptrs, tile, scale, PART: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """P of a tile from the first head's scores; then the student's scores and the first head's lse again."""
    query_full, query_empty, key_full = tiles[2], tiles[3], tiles[4]
    RESIDENT: gl.constexpr = (HEADS + 1) // 2 <= PAIR_STAGES
    total = zeros
    for pair in range(HEADS // 2):
        stage, _parity = _pair_stage(tile, pair, HEADS)
        coming = _start(tiles, zeros, stage * 2 + 1, PART)
        total, scores, lse = _add_head(total, scores, lse, coming, lse_ptrs, pair * 2 + 1, scale)
        # One wait for either: between waits for barriers of one array the compiler lets the warps meet.
        is_last = pair * 2 + 2 == HEADS
        next_stage, parity = _pair_stage(tile, pair + 1, HEADS)
        next_stage = gl.where(is_last, PAIR_STAGES, next_stage)
        mbarrier.wait(query_full.index(next_stage), gl.where(is_last, 0, parity))
        mbarrier.wait(key_full.index(PARTS + PART), tile & 1, pred=is_last)
        coming = _start(tiles, zeros, next_stage * 2, gl.where(is_last, PARTS, PART))
        total, scores, lse = _add_head(total, scores, lse, coming, lse_ptrs, (pair * 2 + 2) % HEADS, scale)
        if not RESIDENT:
            mbarrier.arrive(query_empty.index(stage), count=1)
    if HEADS % 2:
        mbarrier.wait(query_full.index(PAIR_STAGES), 0)
        mbarrier.wait(key_full.index(PARTS + PART), tile & 1)
        coming = _start(tiles, zeros, STUDENT, PARTS)
        total, scores, lse = _add_head(total, scores, lse, coming, lse_ptrs, 0, scale)
        if not RESIDENT:
            mbarrier.arrive(query_empty.index(_pair_stage(tile, HEADS // 2, HEADS)[0]), count=1)
    return total * (1.0 / HEADS), scores, lse


@gluon.jit
def _make(
    tiles, pointers, numbers,
    STRIDE: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr, DIFFERENCE_SCALE: gl.constexpr,
):  # fmt: skip
    """D and value of the rows and this group of warps' keys of each tile; STRIDE: of rows with one number a group."""
    key_empty = tiles[5]
    lse_ptr, index_lse_ptr, weight_ptr, difference_ptr, value_ptr = pointers
    num_rows, position, first_position, num_tiles, stride_lt, stride_dt, scale, index_scale, index_scale_rest = numbers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    # A thread stores eight keys at once, a warp whole rows; no number leaves its warp.
    wide: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[16, 0], [32, 0]], [], [ROWS, KEYS],
    )  # fmt: skip
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=layout)
    offs_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs_n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    # Rows past the last have its numbers: what they make is dropped.
    rows = gl.minimum(offs_m, num_rows - 1)
    lse_ptrs = lse_ptr + rows * stride_lt
    index_lse = gl.load(index_lse_ptr + rows * STRIDE) * LOG2E
    wide_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    wide_n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, wide))
    # A document's first rows have the largest D, and as their other keys are hidden, room for what its rounding loses.
    is_early = position + num_rows <= LOST_AT
    differences = difference_ptr + wide_m[:, None] * stride_dt + (PART * KEYS + wide_n)[None, :]
    value = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, layout))
    lse = gl.load(lse_ptrs)
    scores = warpgroup_mma_wait(0, deps=[_start_tile(tiles, zeros, 0, num_tiles, PART, HEADS)])
    for tile in range(num_tiles):
        probs, scores, lse = _mean_of_heads(tiles, scores, lse, zeros, lse_ptrs, tile, scale, PART, HEADS)
        # No product reads this tile's keys any more.
        mbarrier.arrive(key_empty.index(PART), count=1)
        mbarrier.arrive(key_empty.index(PARTS), count=1)
        first_key = first_position + (tile * PARTS + PART) * KEYS
        if first_key + (KEYS - 1) > position:
            is_visible = (first_key + offs_n)[None, :] <= (position + offs_m)[:, None]
            probs = gl.where(is_visible, probs, 0.0)
            scores = gl.where(is_visible, scores, -1e30)
        log_student = scores * index_scale + (scores * index_scale_rest - index_lse[:, None])
        value += gl.sum(probs * (_log2(gl.maximum(probs, 1e-37)) - log_student), 1)
        difference = (gl.exp2(log_student) - probs) * DIFFERENCE_SCALE
        rounded = difference.to(difference_ptr.dtype.element_ty)
        if PART == 0 and is_early:
            lost = (difference - rounded.to(gl.float32)).to(rounded.dtype)
            gl.store(differences + LOST_AT, gl.convert_layout(lost, wide), mask=(wide_m < num_rows)[:, None])
        # Named here, they are made before the next product takes its registers.
        value, rounded = warpgroup_mma_wait(0, deps=[value, rounded])
        scores = _start_tile(tiles, zeros, tile + 1, num_tiles, PART, HEADS)
        num_stored = gl.where(is_early, 0, num_rows) if PART else num_rows
        is_stored = (wide_m < num_stored)[:, None]
        gl.store(differences + tile * (PARTS * KEYS), gl.convert_layout(rounded, wide), mask=is_stored)
        scores = warpgroup_mma_wait(0, deps=[scores])
    value = gl.where(offs_m < num_rows, value * gl.load(weight_ptr + rows * STRIDE), 0.0)
    gl.store(value_ptr + PART, gl.sum(value, 0) * LN2)


@gluon.jit(do_not_specialize=["first_row"])
def hopper_dense_kernel(
    query_desc,
    key_desc,
    index_query_desc,
    index_key_desc,
    lse_ptr,
    index_lse_ptr,
    weight_ptr,
    items_ptr,
    difference_ptr,
    value_ptr,
    first_row,
    first_key,
    scale,
    index_scale,
    index_scale_rest,
    stride_lt,
    stride_dt,
    stride_dg,
    NUM_GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
    DIFFERENCE_SCALE: gl.constexpr,
):
    """One program per item and group; D [rows from first_row on, group, keys from first_key on] has whole tiles.

    Rows whose item ends at position LOST_AT or before have what the rounding of D lost LOST_AT columns behind it.

    Items int64 [items, 6]: first query row, number of rows, position of the first, key row of position 0, first tile of
    keys, tiles of keys. index_scale: for scores in log2, in two parts. value fp32 [programs, 2].
    """
    item = items_ptr + gl.program_id(0) // NUM_GROUPS * 6
    group = gl.program_id(0) % NUM_GROUPS
    row = gl.load(item)
    num_rows = gl.load(item + 1).to(gl.int32)
    position = gl.load(item + 2).to(gl.int32)
    first_position = gl.load(item + 4).to(gl.int32) * (PARTS * KEYS)
    key_row = gl.load(item + 3).to(gl.int32) + first_position
    num_tiles = gl.load(item + 5).to(gl.int32)
    lse_ptr += row * stride_lt + group * HEADS
    index_lse_ptr += row * NUM_GROUPS + group
    weight_ptr += row * NUM_GROUPS + group
    difference_ptr += (row - first_row) * stride_dt + group * stride_dg + (first_position - first_key)
    value_ptr += gl.program_id(0) * PARTS

    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = query_desc.dtype
    # The last place of each is the student's.
    query_smem = gl.allocate_shared_memory(dtype, [STUDENT + 1, ROWS, DIM], matrix)
    key_smem = gl.allocate_shared_memory(dtype, [PARTS + 1, KEYS, DIM], matrix)
    RESIDENT: gl.constexpr = (HEADS + 1) // 2 <= PAIR_STAGES
    query_full = make_barriers(PAIR_STAGES + 1, 1)
    query_empty = query_full if RESIDENT else make_barriers(PAIR_STAGES, PARTS)
    key_full, key_empty = make_barriers(2 * PARTS, 1), make_barriers(PARTS + 1, 1)
    tiles = (query_smem, key_smem, query_full, query_empty, key_full, key_empty)
    pointers = (lse_ptr, index_lse_ptr, weight_ptr, difference_ptr, value_ptr)
    numbers = (
        num_rows, position, first_position, num_tiles, stride_lt, stride_dt, scale, index_scale, index_scale_rest,
    )  # fmt: skip
    # The copies that complete the barriers see them as they were made.
    fence_async_shared()
    row = row.to(gl.int32)
    gl.warp_specialize(
        [
            (_make, (tiles, pointers, numbers, NUM_GROUPS, 0, HEADS, DIFFERENCE_SCALE)),
            (_make, (tiles, pointers, numbers, NUM_GROUPS, 1, HEADS, DIFFERENCE_SCALE)),
            (_load, (
                query_desc, key_desc, query_smem, key_smem, query_full, query_empty, key_full, key_empty,
                row, key_row, num_tiles, group, HEADS)),
            (_load_student, (
                index_query_desc, index_key_desc, query_smem, key_smem, query_full, key_full, key_empty,
                row, key_row, num_tiles, group)),
        ],
        [4, 1, 1],
        [MAKE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
