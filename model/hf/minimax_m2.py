"""MiniMax-M2: dense GQA attention, QK norm over all heads, sigmoid router with a selection bias, no shared expert."""

from collections.abc import Iterator
from typing import Any

from ..config import Activation, ModelSpec, MoEConfig, QKNorm, ScoreFunction
from .common import dense_attention, read_model, write_common
from .config_reader import ConfigReader, rope_parameters
from .family import EXPERTS_W123, ROUTER, ROUTER_BIAS, Architecture, ExportOptions, Family
from .limits import limits


def _read(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    reader.expect("hidden_act", "silu")
    reader.expect("scoring_func", "sigmoid")
    reader.expect("use_routing_bias", True)
    reader.expect("use_qk_norm", True)
    reader.expect("qk_norm_type", "per_layer")
    reader.expect("shared_intermediate_size", 0)
    reader.expect("routed_scaling_factor", 1.0)
    reader.expect("sliding_window", 0)
    reader.expect("tie_word_embeddings", False)
    if set(kinds := reader.get("attn_type_list", [])) - {1}:
        reader.refuse(f"attn_type_list is {kinds}; the model here has full attention (1) in every layer.")
    head_dim = reader.need("head_dim")
    model = read_model(
        reader,
        head_dim=head_dim,
        rotary_dim=rotary_dim(reader, head_dim),
        qk_norm=QKNorm.full_vector,
        activation=Activation.swiglu,
        **reader.rope(),
    )
    reader.finish()
    moe = MoEConfig(
        num_experts=reader.need("num_local_experts"),
        top_k=reader.need("num_experts_per_tok"),
        expert_hidden_size=reader.need("intermediate_size"),
    )
    return Architecture(model, dense_attention(), moe)


def rotary_dim(reader: ConfigReader, head_dim: int) -> int:
    """`rotary_dim` and `partial_rotary_factor` say the same or one is absent; readers that know one alone differ."""
    factor, rotary = reader.partial_rotary_factor(), reader.get("rotary_dim", None)
    if factor is None and rotary is None:
        reader.need("rotary_dim")
    from_factor = rotary if factor is None else int(head_dim * factor)
    if rotary is not None and rotary != from_factor:
        reader.refuse(f"rotary_dim ({rotary}) and partial_rotary_factor ({factor}) of {head_dim} channels differ.")
    return int(from_factor)


def _cannot(spec: ModelSpec) -> Iterator[str]:
    yield from limits(
        spec,
        qk_norm=QKNorm.full_vector,
        activation=Activation.swiglu,
        score_function=ScoreFunction.sigmoid,
        index_branch=False,
        partial_rotation=True,
    )
    if spec.moe.dense_mlp_layers:
        yield f"moe.dense_mlp_layers is {spec.moe.dense_mlp_layers}; the format has experts in every layer."
    if spec.moe.shared_hidden_size:
        yield f"moe.shared_hidden_size is {spec.moe.shared_hidden_size}; the format has no shared expert."


def _write(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    model, moe = spec.model, spec.moe
    factor = model.rotary_dim / model.head_dim
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        **write_common(spec, options),
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rotary_dim": model.rotary_dim,
        "partial_rotary_factor": factor,
        "rope_theta": model.rope_theta,
        "rope_parameters": {**rope_parameters(model.rope_theta, model.rope_scaling), "partial_rotary_factor": factor},
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_hidden_size,
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1] * model.num_layers,
        "use_mtp": False,
        "num_mtp_modules": 0,
    }


MINIMAX_M2 = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    moe_block="block_sparse_moe",
    moe=(ROUTER, ROUTER_BIAS),
    experts=EXPERTS_W123,
    separate_head=True,
    ignored=("mtp.",),
    read_config=_read,
    cannot_express=_cannot,
    write_config=_write,
)
