"""Why a model cannot be written in a format: what each format can say, against what the model is."""

from collections.abc import Iterator

from ..config import Activation, ModelSpec, QKNorm, ScoreFunction


def limits(
    spec: ModelSpec,
    *,
    qk_norm: QKNorm,
    activation: Activation,
    score_function: ScoreFunction | None,
    index_branch: bool,
    partial_rotation: bool = False,
    rope_scaling: bool = False,
    routed_scaling: bool = False,
    zero_centered_norms: bool = False,
) -> Iterator[str]:
    """Every way in which `spec` goes beyond a format, with the key and its value. `score_function` None: it has no
    experts; the switches say what it has beside."""
    model, moe = spec.model, spec.moe
    if model.qk_norm is not qk_norm:
        yield f"model.qk_norm is {model.qk_norm.name}; the format has {qk_norm.name}."
    if model.activation is not activation:
        yield f"model.activation is {model.activation.name}; the format has {activation.name}."
    if model.zero_centered_norms and not zero_centered_norms:
        yield "model.zero_centered_norms is true; the format's norm weights are plain, and 1 + w would be rounded."
    if model.rotary_dim != model.head_dim and not partial_rotation:
        yield f"model.rotary_dim is {model.rotary_dim} of {model.head_dim}; the format rotates whole heads."
    if model.rope_scaling.factor != 1 and not rope_scaling:
        yield f"model.rope_scaling.factor is {model.rope_scaling.factor}; the format has no such scaling."
    if spec.msa_layers and not index_branch:
        yield "attention.kind is msa; the format has no index branch. Use minimax_m3."
    if not spec.moe_layers:
        return
    if score_function is None:
        yield f"layers {spec.moe_layers} have experts; the format has none."
        return
    if moe.score_function is not score_function:
        yield f"moe.score_function is {moe.score_function.name}; the format has {score_function.name}."
    if moe.num_groups > 1:
        yield f"moe.num_groups is {moe.num_groups}; the format has no groups of experts."
    if moe.routed_scaling != 1 and not routed_scaling:
        yield f"moe.routed_scaling is {moe.routed_scaling}; the format has no such factor."
    if moe.force_balance:
        yield "moe.force_balance is true: the router chose nothing. There is no model to export."
