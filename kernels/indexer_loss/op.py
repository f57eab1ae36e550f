"""sparse_indexer_kl and dense_indexer_kl: the row losses that train the indexer (README.md of this folder)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..checks import (
    check_attention_inputs,
    check_backend,
    check_block_indices,
    check_block_size,
    check_dense_up_to,
    check_device,
    check_floating,
    check_index_inputs,
    check_lse,
    resolve_scale,
)
from ..segments import Segments
from .reference import indexer_kl_reference

BACKENDS = ("reference",)


@torch.compiler.disable
def sparse_indexer_kl(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float | None = None,
    dense_up_to: int = 0,
    backend: str = "reference",
) -> Tensor:
    """KL(P || P_idx) of each row and group over the visible tokens of the kept blocks.

    Args: index_query [t_q, g, i] and index_key [t_k, i] of one floating dtype; query [t_q, n, d] and key [t_k, g, d]
        of one floating dtype; lse [t_q, n] and block_indices int32 [t_q, g, k] of the `sparse_attention` call that
        the teacher comes from, with its `softmax_scale` and `dense_up_to`.

    Returns kl fp32 (fp64 for fp64 index inputs) [t_q, g], not weighted and not summed. Differentiable in index_query
        and index_key only: the teacher P is detached. 0 with zero gradients: rows in no document and rows with one
        token.

    Raises ValueError for inputs that do not fit, and for ids that repeat, descend or are not visible. The Triton
        backend has the limits of `sparse_attention`, index dims of 16 to 128 (powers of two), and treats ids likewise.
    """
    op = "sparse_indexer_kl"
    check_backend(op, backend, ("reference", "triton"))
    check_kl_inputs(op, index_query, index_key, query, key, lse, segments)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    check_block_size(op, block_size)
    check_device(op, index_query=index_query, block_indices=block_indices)
    read_ids = backend == "reference" or not block_indices.is_cuda
    check_block_indices(op, block_indices, segments, key.shape[1], block_size, read_ids=read_ids)
    check_dense_up_to(op, dense_up_to, block_indices, block_size)
    indexer_kl: Callable[..., Tensor]
    if backend == "triton":
        from .sparse_launch import sparse_indexer_kl_triton

        indexer_kl = partial(sparse_indexer_kl_triton, dense_up_to=dense_up_to)
    else:
        indexer_kl = indexer_kl_reference
    with torch.autocast(index_query.device.type, enabled=False):
        return indexer_kl(
            index_query,
            index_key,
            query,
            key,
            lse,
            block_indices,
            segments,
            block_size=block_size,
            softmax_scale=scale,
        )


@torch.compiler.disable
def dense_indexer_kl(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    segments: Segments,
    *,
    softmax_scale: float | None = None,
    backend: str = "reference",
) -> Tensor:
    """KL(P || P_idx) of each row and group over all visible tokens of the document (warm-up).

    As `sparse_indexer_kl`, with the lse of the `dense_attention` call that the teacher comes from.
    """
    op = "dense_indexer_kl"
    check_backend(op, backend, ("reference", "triton"))
    check_kl_inputs(op, index_query, index_key, query, key, lse, segments)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    with torch.autocast(index_query.device.type, enabled=False):
        if backend == "triton":
            from .dense_launch import dense_indexer_kl_triton

            return dense_indexer_kl_triton(index_query, index_key, query, key, lse, segments, softmax_scale=scale)
        return indexer_kl_reference(
            index_query, index_key, query, key, lse, None, segments, block_size=1, softmax_scale=scale
        )


def check_kl_inputs(
    op: str, index_query: Tensor, index_key: Tensor, query: Tensor, key: Tensor, lse: Tensor, segments: Segments
) -> None:
    """Everything but the ids."""
    check_floating(op, index_query=index_query, index_key=index_key)
    check_floating(op, query=query, key=key)
    check_device(op, index_query=index_query, query=query, lse=lse)
    check_index_inputs(op, segments, index_query, index_key)
    check_attention_inputs(op, segments, query, key)
    if index_query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{op}: index_query has {index_query.shape[1]} groups but key has {key.shape[1]}. "
            "There is one index query head per KV group."
        )
    check_lse(op, lse, query)
