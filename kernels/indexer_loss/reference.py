"""The indexer's KL in plain PyTorch: teacher and student over one token mask."""

import math

import torch
from torch import Tensor

from ..segments import Segments
from ..tiling import (
    QueryTile,
    grouped_scores,
    join_rows,
    mask_floor,
    query_tiles,
    run_tile,
    split_rows,
    token_mask,
    zero_of,
)


@torch.no_grad()
def teacher_probs(query: Tensor, key: Tensor, lse: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Mean over the group's heads of exp(scale <q, k> - lse), 0 outside the mask: [g, rows, keys].

    query [rows, n, d], key [keys, g, d], lse [rows, n], mask bool [1 or g, rows, keys].
    """
    scores = grouped_scores(query, key, scale)
    num_groups, heads_per_group, num_rows, _ = scores.shape
    # [g, n/g, rows, 1]
    lse = lse.T.reshape(num_groups, heads_per_group, num_rows, 1)
    return scores.sub_(lse).exp_().mean(dim=1).masked_fill(~mask, 0.0)


def kl_rows(
    index_query: Tensor, index_key: Tensor, query: Tensor, key: Tensor, lse: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """KL(P || P_idx) of each row and group over the masked tokens: [rows, g] in fp32 (fp64 for fp64 index inputs)."""
    dtype = torch.promote_types(index_query.dtype, torch.float32)
    teacher = teacher_probs(query.detach().to(dtype), key.detach().to(dtype), lse.detach().to(dtype), mask, scale)
    # [g, rows, keys]
    index_scores = (index_query.to(dtype).transpose(0, 1) / math.sqrt(index_query.shape[2])) @ index_key.to(dtype).T
    # Hidden tokens have a finite log, made 0: no 0 * inf and no inf - inf, in forward or in backward.
    log_student = (index_scores + mask_floor(mask, dtype)).log_softmax(dim=2) * mask.to(dtype)
    kl = (torch.special.xlogy(teacher, teacher) - teacher * log_student).sum(dim=2)
    # With one token both distributions are 1; rounding in the teacher must not show.
    return kl.masked_fill(mask.sum(dim=2) <= 1, 0.0).T


def kl_tile(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor | None,
    tile: QueryTile,
    block_size: int,
    scale: float,
) -> Tensor:
    """`kl_rows` for the rows of one tile; the mask is made here, so that a checkpointed tile does not keep it."""
    mask = token_mask(tile, block_indices, block_size, query.device)
    return kl_rows(index_query, index_key, query, key, lse, mask, scale)


def indexer_kl_reference(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor | None,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float,
) -> Tensor:
    """See `sparse_indexer_kl`; without `block_indices` over all visible tokens, see `dense_indexer_kl`."""
    pieces = []
    tiles = list(query_tiles(segments))
    index_queries = split_rows(index_query, [tile for tile, _ in tiles])
    for (tile, bounded), index_query_rows in zip(tiles, index_queries, strict=True):
        ids = None if block_indices is None else block_indices[tile.queries]
        index_rows = (index_query_rows, index_key[tile.keys])
        rows = (query[tile.queries], key[tile.keys], lse[tile.queries], ids)
        kl = run_tile(kl_tile, *index_rows, *rows, tile, block_size, softmax_scale, bounded=bounded)
        pieces.append((tile.q_start, kl))
    like = index_query.new_empty(index_query.shape[:2], dtype=torch.promote_types(index_query.dtype, torch.float32))
    kl = join_rows(pieces, like, 0.0)
    return kl if pieces else kl + zero_of(index_query, index_key)
