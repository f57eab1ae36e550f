"""attach_dense_kl in Triton: the autograd function whose backward makes the full-sequence KL and its gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..indexer_loss.dense_gradient import dense_kl_gradient
from ..segments import Segments
from ..sparse_training.launch import IndexLoss


class AttachDenseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        index_query: Tensor,
        index_key: Tensor,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
        loss: IndexLoss,
    ) -> Tensor:
        ctx.save_for_backward(index_query, index_key, query, key, lse)
        ctx.segments, ctx.scale, ctx.loss = segments, scale, loss
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index_query, index_key, query, key, lse = ctx.saved_tensors
        loss = ctx.loss
        inputs = (index_query, index_key, query, key, lse, ctx.segments, loss.weight_of(index_query), loss.factor)
        value, *index_grads = dense_kl_gradient(*inputs, softmax_scale=ctx.scale)
        loss.record(value)
        return grad, *index_grads, *[None] * 6
