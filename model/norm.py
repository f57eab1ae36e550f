"""RMS norms on torch's fused op, and what tensor parallelism makes of them."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F


def sharded_over_tensor_ranks(
    module: Any, axes: dict[str, int], prefix: str, sharded_offsets: tuple, metadata: dict | None
) -> dict:
    """What Megatron's `sharded_state_dict` of `module` must return: parameters of `axes` are split along that axis over
    its `tp_group`, the others are alike on every rank."""
    assert metadata is not None
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, returned in x's dtype.

    Zero-centred weights w act as 1 + w, added up in fp32: in bf16 a sum near 1 would lose most of w.

    The constructor is what Megatron's specs expect of a layer norm. Megatron's own torch norm refuses sequence
    parallelism; this one carries the mark by which Megatron sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: object, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, getattr(config, "layernorm_zero_centered_gamma", False)
        dtype = getattr(config, "params_dtype", torch.float32)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), float(not self.zero_centered), dtype=dtype))
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _rms_norm(hidden_states, self.weight, self.eps, self.zero_centered)


class HeadNorm(torch.nn.Module):
    """RMS norm of each head [..., d] with one weight [d] for all, of which a tensor-parallel rank sees its own heads.

    The weight is the same on every rank and its gradient is summed over them in the backward pass.
    """

    def __init__(self, config: object, head_dim: int, eps: float, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.tp_group = eps, tp_group
        self.zero_centered = getattr(config, "layernorm_zero_centered_gamma", False)
        dtype = getattr(config, "params_dtype", torch.float32)
        self.weight = torch.nn.Parameter(torch.full((head_dim,), float(not self.zero_centered), dtype=dtype))

    def forward(self, heads: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, self.tp_group)
        return _rms_norm(heads, weight, self.eps, self.zero_centered)


class FullVectorNorm(torch.nn.Module):
    """RMS norm over all heads together (MiniMax-M2's QK norm), of which each tensor-parallel rank holds a share.

    Input and output [..., local channels]; the mean is taken over the `size` channels of all ranks. The weight is
    sharded as the channels are.
    """

    def __init__(self, config: object, size: int, eps: float, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.size, self.eps, self.tp_group = size, eps, tp_group
        dtype = getattr(config, "params_dtype", torch.float32)
        self.weight = torch.nn.Parameter(torch.ones(size // tp_group.size(), dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, channels: Tensor) -> Tensor:
        if self.tp_group.size() == 1:
            return F.rms_norm(channels, channels.shape[-1:], self.weight, self.eps)
        values = channels.float()
        total = reduce_from_tensor_model_parallel_region(values.square().sum(dim=-1, keepdim=True), self.tp_group)
        # every rank's output depends on the common sum, so its gradient is summed as well
        total = copy_to_tensor_model_parallel_region(total, self.tp_group)
        return (values * (total / self.size + self.eps).rsqrt() * self.weight).to(channels.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return sharded_over_tensor_ranks(self, {"weight": 0}, prefix, sharded_offsets, metadata)


def _rms_norm(values: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if not zero_centered:
        return F.rms_norm(values, values.shape[-1:], weight, eps)
    return F.rms_norm(values.float(), values.shape[-1:], 1 + weight.float(), eps).to(values.dtype)
