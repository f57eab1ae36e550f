"""select_blocks in Triton: the tables it works from, the launches, and the registered op."""

import torch
import triton
from torch import Tensor

from ..block_sparse_attention.launch_support import index_arguments
from ..block_sparse_attention.reverse_index import build_reverse_index, document_tables
from ..segments import Segments
from ..triton_support import check_choice, check_triton, dot_precision, next_power_of_two, unit_stride
from ..tuning import tile_config
from ..work_tables import key_tiles, query_tiles
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
    key_tile_table: Tensor,
    short_tiles: Tensor,
    long_tiles: Tensor,
    score_tiles: Tensor,
    chunks: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_selected: int,
    init_blocks: int,
    all_rows_valid: bool,
) -> tuple[Tensor, Tensor]:
    """`chunks` is on the CPU; the other tables are on the device of the index tensors.

    Short documents have no more blocks than are kept: there is nothing to rank. What follows `short_tiles` is of the
    others alone.
    """
    num_rows, num_groups, index_dim = index_query.shape
    device, dtype = index_query.device, index_query.dtype
    shape = (num_rows, num_groups, num_selected)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    if not all_rows_valid:
        ids.fill_(-1)
    if not len(tiles):
        return ids, torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=device)
    precision = dot_precision(dtype)
    config = tile_config("block_scores", device, head_dim=index_dim, itemsize=dtype.itemsize)
    rank = tile_config("rank_blocks", device, head_dim=index_dim, itemsize=dtype.itemsize)
    strides = (*index_query.stride(), *index_key.stride())
    num_best = max(2, next_power_of_two(num_selected))  # the network needs two
    report = score_report(device)
    report.raise_if_arrived("select_blocks")
    magnitudes = new_magnitudes(device)
    kernel._select_check_kernel[(len(tiles) * num_groups + len(key_tile_table),)](
        index_query, index_key, tiles, key_tile_table, report.words, magnitudes, len(tiles), *strides,
        NUM_GROUPS=num_groups, INDEX_DIM=index_dim, QUERY_ROWS=config.rows, KEY_ROWS=block_size,
    )  # fmt: skip
    if dtype != torch.float16:  # 65504^2 times any index dim is far from the fp32 limit
        kernel._select_overflow_kernel[(len(tiles) * num_groups,)](
            index_query, index_key, tiles, report.words, magnitudes, *strides,
            NUM_GROUPS=num_groups, INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_SIZE=block_size,
            PRECISION=precision,
        )  # fmt: skip
    plan = chunks.tolist() if len(long_tiles) else []
    scores = torch.empty(max((size for _, _, size in plan), default=0), dtype=torch.float32, device=device)
    for first, count, _ in plan:
        kernel._block_scores_kernel[(count * num_groups,)](
            index_query, index_key, long_tiles, score_tiles, scores, first, *strides,
            NUM_GROUPS=num_groups, INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_SIZE=block_size,
            PRECISION=precision, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
        kernel._rank_blocks_kernel[(count * num_groups * (config.rows // rank.rows),)](
            scores, long_tiles, score_tiles, ids, first,
            NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, NUM_BEST=num_best, INIT_BLOCKS=init_blocks,
            BLOCK_M=config.rows, BLOCK_SIZE=block_size, ROWS=rank.rows, COLUMNS=rank.columns,
            BITONIC=device.type == "cuda", num_warps=rank.num_warps,
        )  # fmt: skip
    del scores
    if plan:
        lse = _kept_lse(index_query, index_key, ids, query_table, block_table, block_size)
    else:
        lse = torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=device)
    if len(short_tiles):
        config = tile_config("select_all", device, head_dim=index_dim, itemsize=dtype.itemsize)
        kernel._select_all_kernel[(len(short_tiles) * num_groups,)](
            index_query, index_key, short_tiles, ids, lse, index_dim**-0.5 * kernel.LOG2E.value, *strides,
            NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, NUM_BEST=next_power_of_two(num_selected),
            INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_SIZE=block_size, PRECISION=precision,
            STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    if device.type == "cpu":
        report.raise_if_arrived("select_blocks")
    return ids, lse


@_select_blocks.register_fake
def _(
    index_query, index_key, tiles, key_tile_table, short_tiles, long_tiles, score_tiles, chunks, query_table,
    block_table, block_size, num_selected, init_blocks, all_rows_valid,
):  # fmt: skip
    shape = index_query.shape[:2]
    ids = index_query.new_empty((*shape, num_selected), dtype=torch.int32)
    return ids, index_query.new_empty(shape, dtype=torch.float32)


def _kept_lse(
    index_query: Tensor,
    index_key: Tensor,
    ids: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
) -> Tensor:
    """fp32 [t_q, g] over the kept tokens: keys outer, so that a key block is read once for all queries that kept it."""
    num_rows, num_groups, num_selected = ids.shape
    device, dtype, index_dim = ids.device, index_query.dtype, index_query.shape[2]
    index_query, index_key = unit_stride(index_query), unit_stride(index_key)
    config = tile_config("kept_lse", device, head_dim=index_dim, itemsize=dtype.itemsize)
    index = build_reverse_index(
        ids,
        query_table,
        len(block_table),
        block_size=block_size,
        query_chunk=num_rows,
        item_queries=config.columns,
    )
    partial = torch.empty(ids.shape, dtype=torch.float32, device=device)
    kernel._kept_lse_kernel[(index.max_items,)](
        index_query, index_key, query_table, block_table, *index_arguments(index), partial,
        len(block_table), index_dim**-0.5 * kernel.LOG2E.value, *index_query.stride()[:2], index_key.stride(0),
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, INDEX_DIM=index_dim, BLOCK_SIZE=block_size,
        ROWS=config.rows, PRECISION=dot_precision(dtype), STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    lse = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    merge_rows = 128
    kernel._merge_lse_kernel[(triton.cdiv(num_rows * num_groups, merge_rows),)](
        partial, ids, lse, num_rows * num_groups,
        NUM_SELECTED=num_selected, NUM_BEST=next_power_of_two(num_selected), ROWS=merge_rows,
    )  # fmt: skip
    return lse


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
    short_rows = tile_config("select_all", device, head_dim=index_dim, itemsize=index_query.dtype.itemsize).rows
    short, long = segments.split_at(num_selected_blocks * block_size)
    name = f"score_plan_{num_groups}_{rows}_{block_size}"

    def plan(part: int) -> Tensor:
        return _build_score_plan(query_tiles(long, "cpu", rows=rows), num_groups, rows, block_size)[part]

    return _select_blocks(
        index_query.detach(),
        index_key.detach(),
        query_tiles(segments, device, rows=rows),
        key_tiles(segments, device, rows=block_size),
        query_tiles(short, device, rows=short_rows),
        query_tiles(long, device, rows=rows),
        long.cached(name + "_tiles", device, lambda: plan(0)),
        long.cached(name + "_chunks", "cpu", lambda: plan(1)),
        *document_tables(long, block_size, device),
        block_size,
        num_selected_blocks,
        init_blocks,
        segments.num_valid_rows == segments.num_queries,
    )
