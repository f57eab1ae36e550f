"""Losses that ride on a layer's own graph (the indexer's KL, the router's balance losses)."""

from typing import Any

import torch
from torch import Tensor


class AttachLoss(torch.autograd.Function):
    """Identity on `output` whose backward starts `loss` with gradient 1: the loss rides on the layer's own graph.

    Megatron's per-token mode sums gradients over micro-batches and divides them once by the LM tokens, so 1 is right
    in every layout and no hook in the schedules is needed.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(loss)
