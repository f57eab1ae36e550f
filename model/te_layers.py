"""Transformer Engine's RMS norm and linear layers with the parameters and the checkpoint of the torch backend's.

Imported only where `model.backend=transformer_engine` builds a model. Tensor and sequence parallelism are those of
Megatron's wrappers. Transformer Engine's modules save FP8 scales as `_extra_state` beside each weight: here that is
what the torch backend has there, or a checkpoint of one would not load in the other.
"""

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformer_engine.pytorch import RMSNorm


class TERMSNorm(RMSNorm):
    """As `model.norm.RMSNorm`, with its weight's mark for the sum over tensor-parallel ranks."""

    # torch saves no extra state of a class that has torch's own methods for it
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        device = torch.device("cpu" if config.use_cpu_initialization else "cuda")
        options = dict(dtype=config.params_dtype, device=device, sequence_parallel=config.sequence_parallel)
        super().__init__(hidden_size, eps=eps, **options)


class TEColumnLinear(TEColumnParallelLinear):
    get_extra_state = ColumnParallelLinear.get_extra_state
    set_extra_state = ColumnParallelLinear.set_extra_state


class TERowLinear(TERowParallelLinear):
    get_extra_state = RowParallelLinear.get_extra_state
    set_extra_state = RowParallelLinear.set_extra_state
