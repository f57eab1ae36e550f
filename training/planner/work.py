"""Floating-point operations of one rank by kind: products with weights of a layer, and those that recompute repeats."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.config import Recompute
from ...model.parameters import mlp_parameters
from .activations import Activations
from .stages import Held


@dataclass(frozen=True)
class Products:
    """FLOPs of products with weights of one micro-batch on one rank, one forward pass and one backward pass."""

    linear_forward: float = 0.0
    linear_backward: float = 0.0
    experts_forward: float = 0.0
    experts_backward: float = 0.0

    def __add__(self, other: "Products") -> "Products":
        return Products(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def linear(self) -> float:
        return self.linear_forward + self.linear_backward

    @property
    def experts(self) -> float:
        return self.experts_forward + self.experts_backward


def attention_products(a: Activations, layer: int) -> Products:
    """QKV, output and index projections; of an MTP layer also that of its two inputs."""
    model, (heads, groups) = a.spec.model, a.heads
    main = 2.0 * a.tokens * model.hidden_size * 2 * (heads + groups) * model.head_dim
    if a.spec.is_mtp(layer):
        main += 2.0 * a.tokens * 2 * model.hidden_size**2 / a.spec.parallel.tensor
    index = 0.0
    if a.spec.is_msa(layer):
        index = 2.0 * a.tokens * model.hidden_size * (groups + 1) * a.spec.attention.index_dim
    return Products(main + index, 2 * main + (1 if a.spec.attention.detach else 2) * index)


def mlp_products(a: Activations, layer: int) -> Products:
    """The MLP, or router, shared expert and experts."""
    moe, hidden, tensor = a.spec.moe, a.spec.model.hidden_size, a.spec.parallel.tensor
    if not a.spec.is_moe(layer):
        forward = 2.0 * a.tokens * mlp_parameters(hidden, moe.dense_hidden_size) / tensor
        return Products(forward, 2 * forward)
    forward = 2.0 * (
        a.rows * moe.num_experts * hidden + a.tokens * mlp_parameters(hidden, moe.shared_hidden_size) / tensor
    )
    experts = 2.0 * a.expert_rows * mlp_parameters(hidden, moe.expert_hidden_size) / a.spec.parallel.expert_tensor
    return Products(forward, 2 * forward, experts, 2 * experts)


def head_products(a: Activations) -> Products:
    forward = 2.0 * a.tokens * a.spec.model.hidden_size * a.spec.model.vocab_size / a.spec.parallel.tensor
    return Products(forward, 2 * forward)


def products_done(a: Activations, held: Held) -> float:
    """FLOPs of products with weights of one micro-batch through a rank's slots, with what recompute repeats."""
    total = 0.0
    for slot, count in held.items():
        if slot == "head":
            total += head_products(a).linear
        if isinstance(slot, int):
            attention, mlp = attention_products(a, slot), mlp_products(a, slot)
            total += count * (attention.linear + mlp.linear + mlp.experts)
            if a.spec.recompute is not Recompute.none:
                total += count * (mlp.linear_forward + mlp.experts_forward)
            if a.spec.recompute is Recompute.full:
                total += count * attention.linear_forward
            if a.spec.is_mtp(slot):
                total += count * head_products(a).linear
    return total


def grouped_mm_flops(a_shape: Sequence[int], b_shape: Sequence[int], *_: object, **__: object) -> int:
    """FLOPs of torch's grouped_mm for its FlopCounterMode, which does not know it: each row of the long side once.

    Rows by expert [r, m] x [e, m, n], or for a weight's gradient [m, r] x [r, n] in e pieces: 2 r m n both times.
    """
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]
