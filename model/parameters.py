"""Parameter counts by arithmetic: what a dry run prints, and what a built model is checked against."""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import ModelSpec, QKNorm


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the whole model by part. `active` parts are those that one token goes through."""

    embedding: int
    head: int
    """0 when tied to the embedding."""
    attention: int
    index: int
    router: int
    experts: int
    active_experts: int
    """Shared experts included, in both."""
    dense_mlp: int
    norms: int
    """Layer norms and the final one; those of heads belong to their branch."""

    @property
    def backbone(self) -> int:
        """All but the index branch: the size that is quoted for a model."""
        return self.embedding + self.head + self.attention + self.router + self.experts + self.dense_mlp + self.norms

    @property
    def total(self) -> int:
        return self.backbone + self.index

    @property
    def active_outside_embeddings(self) -> int:
        """What one token goes through, without embedding, head and index branch."""
        return self.attention + self.router + self.active_experts + self.dense_mlp + self.norms


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    model, moe = spec.model, spec.moe
    size, moe_layers = model.hidden_size, len(spec.moe_layers)
    expert = mlp_parameters(size, moe.expert_hidden_size)
    shared = mlp_parameters(size, moe.shared_hidden_size)
    return ParameterCounts(
        embedding=model.vocab_size * size,
        head=0 if model.tie_embeddings else model.vocab_size * size,
        attention=model.num_layers * attention_parameters(spec),
        index=len(spec.msa_layers) * index_parameters(spec),
        router=moe_layers * moe.num_experts * size,
        experts=moe_layers * (moe.num_experts * expert + shared),
        active_experts=moe_layers * (moe.top_k * expert + shared),
        dense_mlp=(model.num_layers - moe_layers) * mlp_parameters(size, moe.dense_hidden_size),
        norms=(2 * model.num_layers + 1) * size,
    )


def mlp_parameters(hidden_size: int, ffn_size: int) -> int:
    """Gate, up and down projection of one MLP or expert."""
    return 3 * hidden_size * ffn_size


def attention_parameters(spec: ModelSpec, tensor: int = 1) -> int:
    """QKV and output projections and the QK norms of one layer, on one of `tensor` ranks that share it."""
    model = spec.model
    heads, kv_heads = (count // tensor * model.head_dim for count in (model.num_query_heads, model.num_kv_heads))
    norms = {QKNorm.none: 0, QKNorm.per_head: 2 * model.head_dim, QKNorm.full_vector: heads + kv_heads}
    return model.hidden_size * (2 * heads + 2 * kv_heads) + norms[model.qk_norm]


def index_parameters(spec: ModelSpec, tensor: int = 1) -> int:
    """One index query head per KV group, one index key head, two norms; on one of `tensor` ranks that share a layer.

    Key projection and norms are whole on each of them.
    """
    model, attention = spec.model, spec.attention
    norms = 2 * attention.index_dim if attention.index_norm else 0
    return model.hidden_size * (model.num_kv_heads // tensor + 1) * attention.index_dim + norms


@dataclass(frozen=True)
class RankParameters:
    """Parameters that one rank holds; data-parallel ranks hold copies, of experts fewer than of the rest."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def rank_parameters(spec: ModelSpec, slots: Sequence[int | str]) -> RankParameters:
    """What each rank of a pipeline stage holds of its `slots`: 0-based layers, 'embedding', 'head'."""
    model, moe, parallel = spec.model, spec.moe, spec.parallel
    size, tensor = model.hidden_size, parallel.tensor
    dense = experts = 0
    for slot in slots:
        if isinstance(slot, str):
            shared = slot == "head" and model.tie_embeddings and "embedding" in slots
            dense += 0 if shared else model.vocab_size // tensor * size
            dense += size if slot == "head" else 0  # the final norm
            continue
        dense += attention_parameters(spec, tensor) + 2 * size
        dense += index_parameters(spec, tensor) if spec.is_msa(slot) else 0
        if spec.is_moe(slot):
            dense += moe.num_experts * size + mlp_parameters(size, moe.shared_hidden_size // tensor)
            expert = mlp_parameters(size, moe.expert_hidden_size // parallel.expert_tensor)
            experts += moe.num_experts // parallel.expert * expert
        else:
            dense += mlp_parameters(size, moe.dense_hidden_size // tensor)
    return RankParameters(dense=dense, experts=experts)


def active_matmul_parameters(spec: ModelSpec) -> int:
    """Weights that multiply each token: active ones with the head and the index branch, without embedding and norms."""
    counts = count_parameters(spec)
    head = spec.model.vocab_size * spec.model.hidden_size
    return counts.active_outside_embeddings - counts.norms + head + counts.index
