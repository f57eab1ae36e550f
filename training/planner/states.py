"""Parameters of one rank by part, and the bytes of weights, gradients and optimizer states (`training/optim.py`).

Tensor parallelism splits the KV groups (with their query and index heads), the MLPs' channels and the vocabulary;
the index key, head norms of one weight, layer norms and the router are whole on every rank. Experts are split over
`expert` (whole) and `expert_tensor` (their channels). What a rank's optimizer holds is its share of the copies.
"""

from collections import Counter
from dataclasses import dataclass

from ...model.config import ModelSpec, Precision, QKNorm
from ...model.parameters import mlp_parameters
from .stages import Held, Layout


def rank_parameters(spec: ModelSpec, held: Held) -> Counter[str]:
    """Part -> parameters of one rank of the stage that holds these slots."""
    total: Counter[str] = Counter()
    for slot, count in held.items():
        if isinstance(slot, int):
            parts = _layer(spec, slot)
        else:
            parts = _head(spec, "embedding" in held) if slot == "head" else Counter(embedding=_vocabulary(spec))
        for part, size in parts.items():
            total[part] += count * size
    return total


def _vocabulary(spec: ModelSpec) -> int:
    return spec.model.vocab_size // spec.parallel.tensor * spec.model.hidden_size


def _head(spec: ModelSpec, with_embedding: bool) -> Counter[str]:
    """Final norm and head, and for MTP layers the embedding. What the stage of the embedding would share, another stage
    holds a copy of.
    """
    model, size = spec.model, spec.model.hidden_size
    parts = Counter(head=0 if model.tie_embeddings and with_embedding else _vocabulary(spec), norms=size)
    if spec.mtp_layers and not with_embedding and not model.tie_embeddings:
        parts["embedding"] = _vocabulary(spec)
    return parts


def _layer(spec: ModelSpec, layer: int) -> Counter[str]:
    model, attention, moe, tensor = spec.model, spec.attention, spec.moe, spec.parallel.tensor
    size = model.hidden_size
    heads, kv_heads = (number * model.head_dim // tensor for number in (model.num_query_heads, model.num_kv_heads))
    head_norms = {QKNorm.none: 0, QKNorm.per_head: 2 * model.head_dim, QKNorm.full_vector: heads + kv_heads}
    parts = Counter(attention=size * 2 * (heads + kv_heads) + head_norms[model.qk_norm], norms=2 * size)
    if spec.is_msa(layer):
        index_norms = 2 * attention.index_dim if attention.index_norm else 0
        index_heads = model.num_kv_heads // tensor + 1
        parts["index"] = size * index_heads * attention.index_dim + index_norms
    if spec.is_moe(layer):
        parts["router"] = moe.num_experts * size
        expert = mlp_parameters(size, moe.expert_hidden_size) // spec.parallel.expert_tensor
        parts["experts"] = moe.num_experts // spec.parallel.expert * expert
        parts["shared experts"] = mlp_parameters(size, moe.shared_hidden_size) // tensor
    else:
        parts["dense MLP"] = mlp_parameters(size, moe.dense_hidden_size) // tensor
    if spec.is_mtp(layer):  # a projection of its two inputs and three norms
        parts += Counter({"MTP projection": 2 * size * size // tensor, "norms": 3 * size})
    return +parts


@dataclass(frozen=True)
class States:
    """Bytes that one rank holds all the time, by part of the model."""

    weights: dict[str, float]
    gradients: dict[str, float]
    optimizer: dict[str, float]

    @property
    def total(self) -> float:
        return sum(sum(part.values()) for part in (self.weights, self.gradients, self.optimizer))


def states_of(spec: ModelSpec, layout: Layout, held: Held) -> States:
    """Weights in the training precision (the router in fp32), gradients in fp32 buffers, and the distributed optimizer:
    Adam's two fp32 moments, and fp32 main weights beside bf16 ones, sharded over the ranks with the same parameters.

    Megatron pads its buffers to multiples of the shards, which is not counted (under 0.1% at size).
    """
    parameters = rank_parameters(spec, held)
    bf16 = {part: spec.precision is Precision.bf16 and part != "router" for part in parameters}
    copies = {part: layout.expert_copies if part == "experts" else layout.dense_copies for part in parameters}
    return States(
        weights={part: count * (2.0 if bf16[part] else 4.0) for part, count in parameters.items()},
        gradients={part: count * 4.0 for part, count in parameters.items()},
        optimizer={part: count * (12 if bf16[part] else 8) / copies[part] for part, count in parameters.items()},
    )
