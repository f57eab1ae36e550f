"""Value and gradients of the full-sequence KL in one go, for row weights that are known beforehand.

On Hopper one kernel makes the value and the score gradient D of some query rows and a window of keys and leaves D in
memory; the gradients of index queries and keys are products with it. Elsewhere the two kernels of `dense_indexer_kl`
each make all they need themselves.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..segments import Segments
from ..triton_support import dot_precision
from ..tuning import TileConfig, tile_config
from ..work_tables import query_tiles
from . import dense_products_kernel
from .dense_launch import (
    _dense_indexer_kl,
    _dense_indexer_kl_backward,
    dense_student,
    difference_scale,
    key_tiles_in_layers,
    op_tables,
    several_tokens,
)
from .hopper_dense_launch import KEYS, HopperDense, takes_hopper_dense

DIFFERENCE_BYTES = 2**30
"""Most memory for D of one chunk and window, as long as that is CHUNK_ROWS or more."""
CHUNK_ROWS = 128
"""Chunks are a multiple of so many query rows."""
WINDOW_KEYS = 16384
"""Keys of a window. Each chunk adds to the gradient of the keys in memory, each window to that of the queries."""
WEIGHED_ROWS = 128
"""(query, group) rows of a program that weighs queries."""

MakeDifference = Callable[[Segments, int, int, Tensor], Tensor]
"""Writes D of a chunk and window and returns parts of the value: see `HopperDense`."""


def dense_kl_gradient(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    segments: Segments,
    weight: Tensor,
    factor: Tensor | float,
    *,
    softmax_scale: float,
    index_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of weight x `dense_indexer_kl`, gradients of factor x that sum by index_query and by index_key).

    Args: inputs as `dense_indexer_kl`, none of them differentiated; weight fp32 [t_q, g] in 0..1, anything in rows of
        no document; factor a number or a scalar tensor; index_lse fp32 [t_q, g], the student's lse over all visible
        tokens, where the caller has it.

    Returns the sum as fp64 scalar and the gradients in the dtypes of their inputs.
    """
    several = several_tokens(segments, query.device)
    weight = torch.where(several[:, None], weight, 0.0)
    if takes_hopper_dense(query, index_query):
        if index_lse is None:
            config = _config("dense_student", index_query)
            tiles = query_tiles(segments, query.device, rows=config.rows)
            index_lse = dense_student(index_query, index_key, tiles, config)
        make = HopperDense(index_query, index_key, query, key, lse, index_lse, weight, softmax_scale)
        return gradient_by_chunks(make, index_query, index_key, segments, weight, factor)
    tensors = (index_query, index_key, query, key, lse.float())
    query_table, *tables = op_tables(index_query, query, key.shape[1], segments)
    kl, student, d_unit = _dense_indexer_kl(*tensors, query_table, *tables, softmax_scale, True)
    gradients = _dense_indexer_kl_backward(weight * factor, *tensors, student, d_unit, *tables, softmax_scale)
    return (weight * kl).sum(dtype=torch.float64), *gradients


def chunk_rows(num_groups: int, columns: int, itemsize: int) -> int:
    """Query rows of a chunk, for D of so many columns."""
    return max(DIFFERENCE_BYTES // (itemsize * num_groups * columns) // CHUNK_ROWS, 1) * CHUNK_ROWS


def gradient_by_chunks(
    make_difference: MakeDifference,
    index_query: Tensor,
    index_key: Tensor,
    segments: Segments,
    weight: Tensor,
    factor: Tensor | float,
    *,
    rows: int | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dense_kl_gradient`; weight is 0 in rows of less than two tokens.

    rows: query rows of a chunk; window: keys. In fp16 D and what it makes is FP16_SCALE times as large until the end.
    """
    num_queries, num_groups, index_dim = index_query.shape
    device, dtype = index_query.device, index_query.dtype
    columns = min(window or WINDOW_KEYS, -(-max(segments.max_k_len, 1) // KEYS) * KEYS)
    rows = min(rows or chunk_rows(num_groups, columns, index_query.element_size()), num_queries)
    d_index_query = torch.zeros_like(index_query, memory_format=torch.contiguous_format)
    if not segments.num_valid_rows:
        return weight.new_zeros((), dtype=torch.float64), d_index_query, torch.zeros_like(index_key)
    # Weights near 1: fp16 has no room for small ones.
    largest = weight.amax().clamp(min=torch.finfo(torch.float32).tiny)
    scale = index_dim**-0.5 / difference_scale(dtype)
    unit = weight * (scale * factor)
    queries = _weigh(index_query, weight, largest)
    difference = index_query.new_empty((rows, num_groups, columns))
    partial = weight.new_empty((num_queries if segments.max_k_len > columns else 0, num_groups, index_dim))
    d_index_key = weight.new_zeros((index_key.shape[0], num_groups, index_dim))
    config = _config("dense_kl_products", index_query)
    values = []
    for chunk in segments.chunks(rows):
        first_row = min(row[0] for row in chunk.rows)
        tiles = query_tiles(chunk, device, rows=config.rows)
        key_tiles, layers = key_tiles_in_layers(chunk, device, config.columns)
        for first_key in range(0, chunk.max_k_len, columns):
            values.append(make_difference(chunk, first_row, first_key, difference))
            # The query tiles go with the first key tiles.
            query_programs = len(tiles) * num_groups
            for first_tile, count in layers.tolist():
                dense_products_kernel._dense_products_kernel[(query_programs + count * num_groups,)](
                    difference, index_key, queries, unit, tiles, key_tiles, partial, d_index_query, d_index_key,
                    first_row, first_key, first_key + columns, query_programs, first_tile,
                    *difference.stride()[:2], *index_key.stride(),
                    NUM_GROUPS=num_groups, INDEX_DIM=index_dim, PRECISION=dot_precision(dtype),
                    **products_sizes(config), num_warps=config.num_warps,
                )  # fmt: skip
                query_programs = 0
    value = torch.cat([part.flatten() for part in values]).sum(dtype=torch.float64)
    return value, d_index_query, _sum_groups(d_index_key, largest * (scale * factor), index_key)


def _config(op: str, index_query: Tensor) -> TileConfig:
    return tile_config(op, index_query.device, head_dim=index_query.shape[2], itemsize=index_query.dtype.itemsize)


def products_sizes(config: TileConfig) -> dict[str, int]:
    """Tiles of `_dense_products_kernel`: a step of a key tile's program takes half of the rows in one stage more."""
    stages = {"STAGES": config.num_stages, "KEY_STAGES": config.num_stages + 1}
    return {"BLOCK_M": config.rows, "BLOCK_N": config.columns, "QUERIES": config.rows // 2} | stages


def _weigh(index_query: Tensor, weight: Tensor, largest: Tensor) -> Tensor:
    """Queries times weight / largest, contiguous."""
    weighted = torch.empty_like(index_query, memory_format=torch.contiguous_format)
    dense_products_kernel._weigh_queries_kernel[(triton.cdiv(weight.numel(), WEIGHED_ROWS),)](
        index_query, weight.contiguous(), largest, weighted, weight.shape[0], *index_query.stride(),
        NUM_GROUPS=weight.shape[1], INDEX_DIM=index_query.shape[2], BLOCK_M=WEIGHED_ROWS,
    )  # fmt: skip
    return weighted


def _sum_groups(d_index_key: Tensor, unit: Tensor, index_key: Tensor) -> Tensor:
    result = torch.empty_like(index_key, memory_format=torch.contiguous_format)
    rows = 16
    dense_products_kernel._sum_groups_kernel[(triton.cdiv(len(result), rows),)](
        d_index_key, unit, result, len(result),
        NUM_GROUPS=d_index_key.shape[1], INDEX_DIM=index_key.shape[1], BLOCK_N=rows,
    )  # fmt: skip
    return result
