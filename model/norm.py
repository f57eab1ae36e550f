"""RMS norm on torch's fused op, with the constructor Megatron's specs expect."""

import torch
from torch import Tensor
from torch.nn import functional as F


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32, returned in x's dtype.

    Megatron's own torch norm refuses sequence parallelism; this one carries the mark by which Megatron sums its
    gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: object, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        dtype = getattr(config, "params_dtype", torch.float32)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.eps)
