"""Parameter counts by arithmetic: what a dry run prints, and what a built model is checked against."""

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
    mtp: int
    """All of the MTP layers, their index branches included; no part of the backbone, as they only train."""

    @property
    def backbone(self) -> int:
        """All but the index branch: the size that is quoted for a model."""
        return self.embedding + self.head + self.attention + self.router + self.experts + self.dense_mlp + self.norms

    @property
    def total(self) -> int:
        return self.backbone + self.index + self.mtp

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
        mtp=model.mtp_layers * mtp_parameters(spec) if model.mtp_layers else 0,
    )


def mlp_or_moe_parameters(spec: ModelSpec, layer: int, num_experts: int) -> int:
    """Router, `num_experts` experts and the shared one of one layer, or its plain MLP."""
    moe, size = spec.moe, spec.model.hidden_size
    if not spec.is_moe(layer):
        return mlp_parameters(size, moe.dense_hidden_size)
    expert, shared = mlp_parameters(size, moe.expert_hidden_size), mlp_parameters(size, moe.shared_hidden_size)
    return moe.num_experts * size + num_experts * expert + shared


def mtp_parameters(spec: ModelSpec) -> int:
    """One MTP layer: its projection of two inputs, three norms, and a whole layer with its two."""
    size, layer = spec.model.hidden_size, spec.mtp_layers[0]
    index = index_parameters(spec) if spec.is_msa(layer) else 0
    rest = mlp_or_moe_parameters(spec, layer, spec.moe.num_experts)
    return 2 * size * size + 5 * size + attention_parameters(spec) + index + rest


def mlp_parameters(hidden_size: int, ffn_size: int) -> int:
    """Gate, up and down projection of one MLP or expert."""
    return 3 * hidden_size * ffn_size


def attention_parameters(spec: ModelSpec) -> int:
    """QKV and output projections and the QK norms of one layer."""
    model = spec.model
    heads, kv_heads = model.num_query_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.hidden_size * (2 * heads + 2 * kv_heads) + head_norm_parameters(spec)


def head_norm_parameters(spec: ModelSpec) -> int:
    """QK norms of one layer."""
    model = spec.model
    heads = model.num_query_heads + model.num_kv_heads
    return model.head_dim * {QKNorm.none: 0, QKNorm.per_head: 2, QKNorm.full_vector: heads}[model.qk_norm]


def index_parameters(spec: ModelSpec) -> int:
    """One index query head per KV group, one index key head, two norms."""
    norms = 2 * spec.attention.index_dim if spec.attention.index_norm else 0
    return index_matmul_parameters(spec) + norms


def index_matmul_parameters(spec: ModelSpec) -> int:
    """Index projections of one layer."""
    return spec.model.hidden_size * (spec.model.num_kv_heads + 1) * spec.attention.index_dim


def active_matmul_parameters(spec: ModelSpec) -> int:
    """Weights that multiply each token in training: active ones with the head (once more for each MTP layer) and the
    index branch, without embedding and norms."""
    counts = count_parameters(spec)
    norms = counts.norms + spec.model.num_layers * head_norm_parameters(spec)
    head = spec.model.vocab_size * spec.model.hidden_size
    index = index_matmul_parameters(spec)
    mtp = 0
    for layer in spec.mtp_layers:
        attention = attention_parameters(spec) - head_norm_parameters(spec) + index * spec.is_msa(layer)
        mtp += 2 * spec.model.hidden_size**2 + attention + mlp_or_moe_parameters(spec, layer, spec.moe.top_k) + head
    return counts.active_outside_embeddings - norms + head + len(spec.msa_layers) * index + mtp
