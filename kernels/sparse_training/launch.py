"""sparse_attention_with_kl in Triton: the autograd function that runs both backward passes together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..block_sparse_attention.launch import attention_gradients, sparse_attention_triton
from ..block_sparse_attention.reverse_index import document_tables
from ..dense_causal_attention.library import dense_tables
from ..indexer_loss.dense_launch import dense_indexer_kl_triton
from ..indexer_loss.sparse_backward import IndexGradient
from ..segments import Segments
from ..triton_support import unit_stride


@dataclass(frozen=True)
class IndexLoss:
    """factor x sum(row_weight x KL); `record` gets the sum without the factor."""

    factor: float
    row_weight: Tensor | None
    record: Callable[[Tensor], None]


class SparseAttentionWithKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index_query: Tensor,
        index_key: Tensor,
        block_indices: Tensor,
        index_lse: Tensor,
        segments: Segments,
        routes: dict[str, Any],
        loss: IndexLoss,
    ) -> Tensor:
        output, lse = sparse_attention_triton(query, key, value, block_indices, segments, **routes)
        ctx.save_for_backward(query, key, value, output, lse, index_query, index_key, block_indices, index_lse)
        ctx.segments, ctx.routes, ctx.loss = segments, routes, loss
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, index_query, index_key, block_indices, index_lse = ctx.saved_tensors
        loss, block_size, scale = ctx.loss, ctx.routes["block_size"], ctx.routes["softmax_scale"]
        short, long = ctx.segments.split_at(ctx.routes["dense_up_to"])
        weight = (
            torch.ones_like(index_lse) if loss.row_weight is None else loss.row_weight.expand(index_lse.shape).float()
        )
        tables = document_tables(long, block_size, query.device)
        index_inputs = unit_stride(index_query), unit_stride(index_key)
        gradient = IndexGradient(*index_inputs, index_lse, weight, loss.factor, block_indices, *tables, block_size)
        grads = attention_gradients(
            grad, query, key, value, output, lse, block_indices, *tables, *dense_tables(short, query.device),
            block_size, scale, ctx.routes["query_chunk"], on_teacher=gradient.add,
        )  # fmt: skip
        index_grads = gradient.result()
        kl = (gradient.slot_kl.sum(2) * gradient.weight).double().sum()
        if short.num_valid_rows:
            short_kl, short_grads = _short_kl(
                index_query, index_key, query, key, lse, weight, loss.factor, short, scale
            )
            kl += short_kl
            # each is 0 in the other's rows
            index_grads = index_grads[0] + short_grads[0], index_grads[1] + short_grads[1]
        loss.record(kl)
        return *grads, *index_grads, *[None] * 5


def _short_kl(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    weight: Tensor,
    factor: float,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The weighted sum, and factor x its gradients, over the documents whose attention was dense."""
    index_query, index_key = index_query.detach().requires_grad_(), index_key.detach().requires_grad_()
    with torch.enable_grad():
        kl = dense_indexer_kl_triton(index_query, index_key, query, key, lse, segments, softmax_scale=scale)
    gradients = torch.autograd.grad(kl, (index_query, index_key), weight * factor)
    return (kl.detach() * weight).double().sum(), gradients
