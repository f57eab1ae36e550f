"""select_blocks in Triton: the tables it works from, the launches, and the registered op."""

import torch
import triton
from torch import Tensor

from ..segments import Segments
from ..triton_support import check_choice, check_triton, dot_precision, next_power_of_two
from ..tuning import tile_config
from ..work_tables import first_key_tile, key_tiles, query_tiles
from . import kernel
from .report import new_magnitudes, score_report

INDEX_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
NUM_SELECTED = tuple(range(1, 33))

SCORE_BUFFER = 2**30
"""Block scores held at once (4 GiB): longer batches are scored and ranked in chunks of query tiles."""

CHECK_ROWS = 128


def _build_score_plan(tiles: Tensor, num_groups: int, rows: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Offset in the score buffer and number of blocks of each tile, and the chunks (first tile, tiles, scores)."""
    blocks = (tiles[:, 2] + tiles[:, 1] - 1) // block_size + 1
    sizes = (blocks * num_groups * rows).tolist()
    offsets, chunks, used = [], [[0, 0, 0]], 0
    for number, size in enumerate(sizes):
        if used and used + size > SCORE_BUFFER:
            chunks.append([number, 0, 0])
            used = 0
        offsets.append(used)
        used += size
        chunks[-1][1:] = [number + 1 - chunks[-1][0], used]
    table = torch.stack([torch.tensor(offsets, dtype=torch.int64), blocks], dim=1)
    return table, torch.tensor(chunks, dtype=torch.int64)


@torch.library.custom_op("msa_pretrain::select_blocks", mutates_args=())
def _select_blocks(
    index_query: Tensor,
    index_key: Tensor,
    tiles: Tensor,
    score_tiles: Tensor,
    chunks: Tensor,
    blocks: Tensor,
    first_block: Tensor,
    positions: Tensor,
    block_size: int,
    num_selected: int,
    init_blocks: int,
    all_rows_valid: bool,
) -> tuple[Tensor, Tensor]:
    """`chunks` is on the CPU; the other tables are on the device of the index tensors."""
    num_rows, num_groups, index_dim = index_query.shape
    device, dtype = index_query.device, index_query.dtype
    shape = (num_rows, num_groups, num_selected)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    if not all_rows_valid:
        ids.fill_(-1)
    lse = torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=device)
    if not len(tiles):
        return ids, lse
    precision = dot_precision(dtype)
    config = tile_config("block_scores", device, head_dim=index_dim, itemsize=dtype.itemsize)
    rank = tile_config("rank_blocks", device, head_dim=index_dim, itemsize=dtype.itemsize)
    strides = (*index_query.stride(), *index_key.stride())
    num_best = max(2, next_power_of_two(num_selected))  # the network needs two
    report = score_report(device)
    report.raise_if_arrived("select_blocks")
    magnitudes = new_magnitudes(device)
    kernel._select_check_kernel[(len(tiles) + len(blocks),)](
        index_query, index_key, tiles, blocks, report.words, magnitudes, len(tiles), *strides,
        NUM_GROUPS=num_groups, INDEX_DIM=index_dim, QUERY_ROWS=config.rows, KEY_ROWS=block_size,
    )  # fmt: skip
    if dtype != torch.float16:  # 65504^2 times any index dim is far from the fp32 limit
        kernel._select_overflow_kernel[(len(tiles) * num_groups,)](
            index_query, index_key, tiles, report.words, magnitudes, *strides,
            NUM_GROUPS=num_groups, INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_SIZE=block_size,
            PRECISION=precision,
        )  # fmt: skip
    plan = chunks.tolist()
    scores = torch.empty(max(size for _, _, size in plan), dtype=torch.float32, device=device)
    for first, count, _ in plan:
        kernel._block_scores_kernel[(count * num_groups,)](
            index_query, index_key, tiles, score_tiles, scores, first, *strides,
            NUM_GROUPS=num_groups, INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_SIZE=block_size,
            PRECISION=precision, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        kernel._rank_blocks_kernel[(count * num_groups * (config.rows // rank.rows),)](
            scores, tiles, score_tiles, ids, first,
            NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, NUM_BEST=num_best, INIT_BLOCKS=init_blocks,
            BLOCK_M=config.rows, BLOCK_SIZE=block_size, ROWS=rank.rows, COLUMNS=rank.columns,
            BITONIC=device.type == "cuda", num_warps=rank.num_warps,
        )  # fmt: skip
    del scores
    _kept_lse(index_query, index_key, ids, lse, blocks, first_block, positions, block_size)
    report.send()
    if device.type == "cpu":
        report.raise_if_arrived("select_blocks")
    return ids, lse


@_select_blocks.register_fake
def _(
    index_query, index_key, tiles, score_tiles, chunks, blocks, first_block, positions, block_size, num_selected,
    init_blocks, all_rows_valid,
):  # fmt: skip
    shape = index_query.shape[:2]
    ids = index_query.new_empty((*shape, num_selected), dtype=torch.int32)
    return ids, index_query.new_empty(shape, dtype=torch.float32)


def _kept_lse(
    index_query: Tensor,
    index_key: Tensor,
    ids: Tensor,
    lse: Tensor,
    blocks: Tensor,
    first_block: Tensor,
    positions: Tensor,
    block_size: int,
) -> None:
    """Fill `lse` over the kept tokens: keys outer, so that a key block is read once for all queries that kept it."""
    num_rows, num_groups, num_selected = ids.shape
    device, dtype, index_dim = ids.device, index_query.dtype, index_query.shape[2]
    config = tile_config("kept_lse", device, head_dim=index_dim, itemsize=dtype.itemsize)
    # Work row = (key block, group). Picks sorted by work row, then by their own order; -1 ids go to the end.
    num_work_rows = len(blocks) * num_groups
    group = torch.arange(num_groups, dtype=torch.int32, device=device)[None, :, None]
    work_row = (first_block[:, None, None] + ids) * num_groups + group
    work_row = torch.where(ids >= 0, work_row, num_work_rows).flatten()
    sorted_rows, picks = torch.sort(work_row, stable=True)
    borders = torch.arange(num_work_rows + 1, dtype=torch.int32, device=device)
    pick_starts = torch.searchsorted(sorted_rows, borders)
    chunk_ends = ((pick_starts.diff() + config.columns - 1) // config.columns).cumsum(0)
    # The number of chunks is known on the device only; programs past it have no work row.
    num_programs = len(picks) // config.columns + min(num_work_rows, len(picks))
    work = torch.searchsorted(chunk_ends, torch.arange(num_programs, device=device), right=True, out_int32=True)
    partial = torch.full((len(picks),), -torch.inf, dtype=torch.float32, device=device)
    kernel._kept_lse_kernel[(num_programs,)](
        index_query, index_key, picks, work, chunk_ends, pick_starts, blocks, positions, partial,
        num_work_rows, index_dim**-0.5 * kernel.LOG2E.value, *index_query.stride(), *index_key.stride(),
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, INDEX_DIM=index_dim, BLOCK_SIZE=block_size,
        ROWS=config.rows, CHUNK=config.columns, PRECISION=dot_precision(dtype), STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    merge_rows = 128
    kernel._merge_lse_kernel[(triton.cdiv(num_rows * num_groups, merge_rows),)](
        partial, lse, num_rows * num_groups,
        NUM_SELECTED=num_selected, NUM_BEST=next_power_of_two(num_selected), ROWS=merge_rows,
    )  # fmt: skip


def select_blocks_triton(
    index_query: Tensor,
    index_key: Tensor,
    segments: Segments,
    *,
    block_size: int,
    num_selected_blocks: int,
    init_blocks: int,
) -> tuple[Tensor, Tensor]:
    """See `select_blocks`."""
    op = "select_blocks"
    num_groups, index_dim = index_query.shape[1:]
    check_triton(op, index_query, index_key)
    check_choice(op, "an index dim of", index_dim, INDEX_DIMS)
    check_choice(op, "a block_size of", block_size, BLOCK_SIZES)
    check_choice(op, "num_selected_blocks of", num_selected_blocks, NUM_SELECTED)
    device = index_query.device
    rows = tile_config("block_scores", device, head_dim=index_dim, itemsize=index_query.dtype.itemsize).rows
    name = f"score_plan_{num_groups}_{rows}_{block_size}"

    def plan(part: int) -> Tensor:
        return _build_score_plan(query_tiles(segments, "cpu", rows=rows), num_groups, rows, block_size)[part]

    return _select_blocks(
        index_query.detach(),
        index_key.detach(),
        query_tiles(segments, device, rows=rows),
        segments.cached(name + "_tiles", device, lambda: plan(0)),
        segments.cached(name + "_chunks", "cpu", lambda: plan(1)),
        key_tiles(segments, device, rows=block_size),
        first_key_tile(segments, device, rows=block_size),
        segments.positions(device),
        block_size,
        num_selected_blocks,
        init_blocks,
        segments.num_valid_rows == segments.num_queries,
    )
