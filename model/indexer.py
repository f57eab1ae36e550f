"""The index branch: one index query head per KV group and one index key head for all (spec 2.2)."""

from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelSpec
from .norm import HeadNorm, sharded_over_tensor_ranks
from .rope import apply_rotation


class Indexer(nn.Module):
    """x [t, h] -> index_query [t, g, i], index_key [t, i], normed and rotated as the main branch is.

    Under tensor parallelism a rank has the index query heads of its own KV groups, while the key projection and both
    norms are the same on every rank. Their gradient is that of the local groups, so the weights themselves go through
    Megatron's identity whose backward sums over the ranks: fewer bytes than summing the index key's own gradient
    [t, i], and right without the detach too, where x needs the local share of its gradient from either projection.
    """

    def __init__(self, config: TransformerConfig, spec: ModelSpec, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        attention, self.tp_group = spec.attention, tp_group
        self.num_groups = spec.model.num_kv_heads // tp_group.size()
        self.detach, self.rope = attention.detach, attention.index_rope
        self.sequence_parallel = config.sequence_parallel
        size, dim = spec.model.hidden_size, attention.index_dim
        options: dict[str, Any] = dict(bias=False, dtype=config.params_dtype)
        self.query_proj = nn.Linear(size, self.num_groups * dim, **options)
        set_tensor_model_parallel_attributes(self.query_proj.weight, True, 0, 1)
        self.key_proj = nn.Linear(size, dim, **options)
        self.query_norm, self.key_norm = (
            HeadNorm(config, dim, spec.model.norm_eps, tp_group) if attention.index_norm else nn.Identity()
            for _ in range(2)
        )
        for parameter in self.parameters():
            parameter.is_indexer = True  # type: ignore[attr-defined]  # its own optimizer group and clip

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [t, h], or [t / tensor-parallel size, h] under sequence parallelism; cos and sin of all t."""
        if self.detach:
            hidden_states = hidden_states.detach()
        enter = gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        hidden_states = enter(hidden_states, group=self.tp_group)
        index_query = self.query_norm(self.query_proj(hidden_states).unflatten(-1, (self.num_groups, -1)))
        key_weight = copy_to_tensor_model_parallel_region(self.key_proj.weight, self.tp_group)
        index_key = self.key_norm(F.linear(hidden_states, key_weight))[:, None]
        if self.rope:
            index_query, index_key = apply_rotation(index_query, cos, sin), apply_rotation(index_key, cos, sin)
        return index_query, index_key.squeeze(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return sharded_over_tensor_ranks(self, {"query_proj.weight": 0}, prefix, sharded_offsets, metadata)
