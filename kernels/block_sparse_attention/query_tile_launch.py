"""Launches of the query-tile forward of block-sparse attention."""

import torch
import triton
from torch import Tensor

from ..segments import Segments
from ..triton_support import dot_precision, next_power_of_two, unit_stride
from ..tuning import TileConfig
from ..work_tables import query_tiles
from .query_tile_kernel import _list_blocks_kernel, _query_tile_fwd_kernel

LISTED_BLOCKS = 64
"""Blocks that the list of a tile is made from at a time."""


def tile_queries(tile: TileConfig, heads: int) -> int:
    """Queries of a tile: as many as its rows hold, up to the bits of a word."""
    return min(32, tile.rows // heads)


def query_tile_table(segments: Segments, tile: TileConfig, heads: int, device: torch.device) -> Tensor:
    """int64 [tiles, 4] for `query_tile_forward`, built once for the segments; see `query_tiles`."""
    return query_tiles(segments, device, rows=tile_queries(tile, heads))


def query_tile_forward(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    tiles: Tensor,
    tile: TileConfig,
    *,
    block_size: int,
    softmax_scale: float,
    num_keys: int,
) -> None:
    """Write the rows of all `tiles`, of documents of at most `num_keys` keys, to output [t_q, n, d] and lse [t_q, n].

    Both dense; 0 and -inf in rows without a visible id.
    """
    _, num_heads, head_dim = query.shape
    num_groups, num_selected = block_indices.shape[1:]
    heads = num_heads // num_groups
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    queries = tile_queries(tile, heads)
    programs = len(tiles) * num_groups
    # A tile's list holds no more than the document's blocks, and one for each id.
    list_size = min(triton.cdiv(num_keys, block_size), queries * num_selected)
    lists = torch.empty((programs, list_size, 2), dtype=torch.int32, device=query.device)
    counts = torch.empty((programs, 2), dtype=torch.int32, device=query.device)
    _list_blocks_kernel[(programs,)](
        block_indices, tiles, lists, counts, list_size, *block_indices.stride(),
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, BLOCK_SIZE=block_size,
        QUERIES=next_power_of_two(queries), BLOCKS=LISTED_BLOCKS, num_warps=4,
    )  # fmt: skip
    _query_tile_fwd_kernel[(programs,)](
        query, key, value, tiles, lists, counts, output, lse, list_size, softmax_scale * 1.4426950408889634,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        NUM_GROUPS=num_groups, HEADS=heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=tile.rows,
        COLUMNS=min(tile.columns, block_size), PRECISION=dot_precision(query.dtype), STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )  # fmt: skip
