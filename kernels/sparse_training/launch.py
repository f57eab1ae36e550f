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
from ..indexer_loss.dense_gradient import dense_kl_gradient
from ..indexer_loss.hopper_dense_launch import takes_hopper_dense
from ..indexer_loss.sparse_backward import IndexGradient
from ..segments import Segments
from ..triton_support import unit_stride


@dataclass(frozen=True)
class IndexLoss:
    """factor x sum(row_weight x KL); `record` gets the sum without the factor."""

    factor: float
    row_weight: Tensor | None
    record: Callable[[Tensor], None]

    def weight_of(self, index_query: Tensor) -> Tensor:
        """fp32 [t_q, g]."""
        shape = index_query.shape[:2]
        if self.row_weight is None:
            return index_query.new_ones(shape, dtype=torch.float32)
        return self.row_weight.expand(shape).float()


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
        query_chunk = ctx.routes["query_chunk"]
        short, long = ctx.segments.split_at(ctx.routes["dense_up_to"])
        weight = loss.weight_of(index_query)
        index_inputs = unit_stride(index_query), unit_stride(index_key)

        def gradient_over(segments: Segments) -> IndexGradient:
            tables = document_tables(segments, block_size, query.device)
            inputs = (*index_inputs, index_lse, weight, loss.factor, block_indices, *tables, block_size)
            return IndexGradient(*inputs, measure=True)

        parts = [gradient_over(long)] if long.num_valid_rows or not short.num_valid_rows else []
        tables = document_tables(long, block_size, query.device)
        grads = attention_gradients(
            grad, query, key, value, output, lse, block_indices, *tables, *dense_tables(short, query.device),
            block_size, scale, query_chunk, on_teacher=parts[0].add if parts else None,
        )  # fmt: skip
        results = [(part.kl, *part.result()) for part in parts]
        if short.num_valid_rows and takes_hopper_dense(query, index_query):
            # All tokens are kept, so the student is the one over all visible tokens.
            teacher = (query, key, lse, short, weight, loss.factor)
            results.append(dense_kl_gradient(*index_inputs, *teacher, softmax_scale=scale, index_lse=index_lse))
        elif short.num_valid_rows:
            part = gradient_over(short)
            part.add_all((query, key, lse, scale), query_chunk)
            results.append((part.kl, *part.result()))
        # Each part is 0 in the other's rows.
        value, *index_grads = (sum(each[1:], each[0]) for each in zip(*results, strict=True))
        loss.record(value)
        return *grads, *index_grads, *[None] * 5
