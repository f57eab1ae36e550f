"""Exact softmax attention over a token mask, in plain PyTorch."""

import torch
from torch import Tensor

from ..segments import Segments
from ..tiling import (
    QueryTile,
    group_heads,
    grouped_scores,
    join_rows,
    masked_softmax,
    query_tiles,
    run_tile,
    split_rows,
    token_mask,
    zero_of,
)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [rows, n, d] in the dtype of `query` and lse [rows, n] in fp32 (fp64 for fp64 inputs).

    query [rows, n, d], key and value [keys, g, d], mask bool [1 or g, rows, keys]. A row without tokens: 0 and -inf.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    # [g, n/g, rows, keys] and [g, n/g, rows]
    probs, lse = masked_softmax(grouped_scores(query.to(dtype), key.to(dtype), scale), mask[:, None])
    # [g, n/g, rows, d], with the group's heads and rows as one long axis for the product
    output = (probs.flatten(1, 2) @ value.to(dtype).transpose(0, 1)).unflatten(1, probs.shape[1:3])
    output = output * (lse > -torch.inf)[..., None]
    return output.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype), lse.permute(2, 0, 1).flatten(1, 2)


def attend_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor | None,
    tile: QueryTile,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`attend` for the rows of one tile; the mask is made here, so that a checkpointed tile does not keep it."""
    return attend(query, key, value, token_mask(tile, block_indices, block_size, query.device), scale)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor | None,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and lse over the kept blocks, or over all visible tokens where `block_indices` is None."""
    outputs, lses = [], []
    tiles = list(query_tiles(segments))
    queries = split_rows(query, [tile for tile, _ in tiles])
    for (tile, bounded), query_rows in zip(tiles, queries, strict=True):
        ids = None if block_indices is None else block_indices[tile.queries]
        rows = (query_rows, key[tile.keys], value[tile.keys], ids)
        output, lse = run_tile(attend_tile, *rows, tile, block_size, softmax_scale, bounded=bounded)
        outputs.append((tile.q_start, output))
        lses.append((tile.q_start, lse))
    lse_like = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
    output = join_rows(outputs, query, 0.0)
    if not outputs:
        output = output + zero_of(query, key, value)
    return output, join_rows(lses, lse_like, -torch.inf)


def dense_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """See `dense_attention`."""
    return attention_reference(query, key, value, None, segments, block_size=1, softmax_scale=softmax_scale)


def dense_gradients_reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    segments: Segments,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `dense_attention_reference` from its output and lse, for where autograd cannot be asked.

    dS = P (dO V^T - <O, dO>), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO; in fp32 or better, fragment by fragment.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    num_groups = key.shape[1]
    d_query, d_key, d_value = (torch.zeros_like(x, dtype=dtype) for x in (query, key, value))
    for tile, _ in query_tiles(segments):
        # [g, n/g, rows, d] and [g, keys, d]
        q, dout, out = (group_heads(x[tile.queries].to(dtype), num_groups) for x in (query, grad, output))
        k, v = (x[tile.keys].to(dtype).transpose(0, 1)[:, None] for x in (key, value))
        row_lse = group_heads(lse[tile.queries][..., None].to(dtype), num_groups)
        probs = (softmax_scale * q @ k.mT - row_lse).exp() * tile.visible_tokens(query.device)
        dscores = softmax_scale * probs * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        d_query[tile.queries] = (dscores @ k).permute(2, 0, 1, 3).flatten(1, 2)
        d_key[tile.keys] += (dscores.mT @ q).sum(1).transpose(0, 1)
        d_value[tile.keys] += (probs.mT @ dout).sum(1).transpose(0, 1)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)
