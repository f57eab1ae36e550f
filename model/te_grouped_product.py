"""tokens @ weights[e].T for the rows of every expert e, by Transformer Engine's grouped GEMM.

Its public module, `GroupedLinear`, has one parameter an expert: other checkpoint keys and, at 256 experts, as many
parameters for the optimizer and for DDP. So the weights stay those of `GroupedExperts`, and only the function below
that module is called, on slices of them. It is no part of Transformer Engine's public interface and changes between
minor versions (2.11 put `quantization_params` before `out_dtype`): hence the version check of `training/machine.py`.

Transformer Engine gets the number of rows of each expert as Python integers. Both of Megatron's dispatchers have them
on the host by then (the all-gather one waits for them, the all-to-all one needs them to size its buffers), so nothing
waits here for the GPU. The price is on the host: a cuBLAS call for each expert that has rows, on four streams.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


@cache
def _general_grouped_gemm() -> Callable:
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    return general_grouped_gemm


def _grouped_gemm(left: list[Tensor], right: list[Tensor], out: list[Tensor], layout: str, **options: object) -> None:
    """out[e] = right[e] @ left[e] as cuBLAS sees it: transposed where the layout, of left and right, has a T.

    TN: right @ left.T. NN: right @ left. NT: right.T @ left. An `out[e]` of an expert without rows becomes zero.
    """
    unquantized = [None] * len(left)
    _general_grouped_gemm()(left, right, out, unquantized, out[0].dtype, layout=layout, **options)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, weights: Tensor, rows: list[int]) -> Tensor:
        output = tokens.new_empty(tokens.shape[0], weights.shape[1])
        options = dict(m_splits=rows, single_output=True)
        _grouped_gemm(list(weights.unbind()), list(tokens.split(rows)), [output], "TN", **options)
        ctx.save_for_backward(tokens, weights)
        ctx.rows = rows  # type: ignore[attr-defined]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The weights' gradient is a tensor of its own, which Megatron's DDP adds to `main_grad` as any other."""
        tokens, weights = ctx.saved_tensors  # type: ignore[attr-defined]
        rows, needed = ctx.rows, ctx.needs_input_grad  # type: ignore[attr-defined]
        grads = list(grad_output.contiguous().split(rows))
        grad_tokens = grad_weights = None
        if needed[0]:
            grad_tokens = torch.empty_like(tokens)
            options = dict(m_splits=rows, single_output=True, grad=True)
            _grouped_gemm(list(weights.unbind()), grads, [grad_tokens], "NN", **options)
        if needed[1]:
            grad_weights = torch.empty_like(weights)
            each = list(grad_weights.unbind())
            _grouped_gemm(list(tokens.split(rows)), grads, each, "NT", m_splits=rows, grad=True)
        return grad_tokens, grad_weights, None


class TEGroupedProduct:
    """As `TorchGroupedProduct`; differentiable once, in tokens and weights. fp32 would be computed in TF32."""

    def __init__(self, tokens_per_expert: Tensor, device: torch.device) -> None:
        self.rows: list[int] = tokens_per_expert.tolist()

    def __call__(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """tokens [t, k] sorted by expert, t > 0, weights [e, n, k], contiguous -> [t, n]."""
        return _GroupedProduct.apply(tokens.contiguous(), weights, self.rows)
