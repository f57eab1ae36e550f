"""The index branch: one index query head per KV group and one index key head for all (spec 2.2)."""

import torch
from torch import Tensor, nn

from .config import ModelSpec
from .norm import RMSNorm
from .rope import apply_rotation


class Indexer(nn.Module):
    """x [t, h] -> index_query [t, g, i], index_key [t, i], normed and rotated as the main branch is."""

    def __init__(self, config: object, spec: ModelSpec) -> None:
        super().__init__()
        attention, self.num_groups = spec.attention, spec.model.num_kv_heads
        self.detach, self.rope = attention.detach, attention.index_rope
        dtype = getattr(config, "params_dtype", torch.float32)
        size, dim = spec.model.hidden_size, attention.index_dim
        self.query_proj = nn.Linear(size, self.num_groups * dim, bias=False, dtype=dtype)
        self.key_proj = nn.Linear(size, dim, bias=False, dtype=dtype)
        norm = RMSNorm if attention.index_norm else _no_norm
        self.query_norm = norm(config, dim, spec.model.norm_eps)
        self.key_norm = norm(config, dim, spec.model.norm_eps)
        for parameter in self.parameters():
            parameter.is_indexer = True  # type: ignore[attr-defined]  # its own optimizer group and clip

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.detach:
            hidden_states = hidden_states.detach()
        index_query = self.query_norm(self.query_proj(hidden_states).unflatten(-1, (self.num_groups, -1)))
        index_key = self.key_norm(self.key_proj(hidden_states))[:, None]
        if self.rope:
            index_query, index_key = apply_rotation(index_query, cos, sin), apply_rotation(index_key, cos, sin)
        return index_query, index_key.squeeze(1)


def _no_norm(config: object, hidden_size: int, eps: float) -> nn.Identity:
    return nn.Identity()
