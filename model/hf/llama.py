"""Llama 3.x, Qwen3 and Qwen3-MoE: dense GQA attention; QK norm per head in the Qwens; a softmax router in the last."""

from collections.abc import Callable, Iterator
from typing import Any

from ..config import (
    Activation,
    ModelConfig,
    ModelSpec,
    MoEConfig,
    QKNorm,
    ScoreFunction,
)
from .common import dense_attention, read_model, write_common
from .config_reader import ConfigReader, rope_parameters
from .family import EXPERTS_PROJ, NO_ROUTER_BIAS, ROUTER, Architecture, ExportOptions, Family
from .limits import limits


def _read_dense(config: dict[str, Any], qk_norm: QKNorm) -> Architecture:
    reader = ConfigReader(config)
    model = _read_plain(reader, qk_norm)
    reader.finish()
    width = reader.need("intermediate_size")
    moe = MoEConfig(
        num_experts=1,
        top_k=1,
        expert_hidden_size=width,
        dense_mlp_layers=list(range(model.num_layers)),
        dense_hidden_size=width,
    )
    return Architecture(model, dense_attention(), moe)


def _read_plain(reader: ConfigReader, qk_norm: QKNorm) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        reader.expect(key, False)
    reader.expect("hidden_act", "silu")
    head_dim = reader.get("head_dim", reader.need("hidden_size") // reader.need("num_attention_heads"))
    if (factor := reader.partial_rotary_factor()) not in (None, 1.0):
        reader.refuse(f"partial_rotary_factor is {factor}; this family rotates whole heads.")
    return read_model(
        reader,
        head_dim=head_dim,
        rotary_dim=head_dim,
        qk_norm=qk_norm,
        activation=Activation.swiglu,
        **reader.rope(),
    )


def _read_llama(config: dict[str, Any]) -> Architecture:
    return _read_dense(config, QKNorm.none)


def _read_qwen3(config: dict[str, Any]) -> Architecture:
    return _read_dense(config, QKNorm.per_head)


def _read_qwen3_moe(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config)
    model = _read_plain(reader, QKNorm.per_head)
    if not reader.get("norm_topk_prob", False):  # absent means false in transformers
        reader.refuse("norm_topk_prob is false; the router here renormalises the chosen experts' scores.")
    reader.finish()
    step, plain = reader.get("decoder_sparse_step", 1), reader.get("mlp_only_layers", [])
    # transformers 5 saves the second name
    experts = reader.need("num_experts" if "num_experts" in config else "num_local_experts")
    dense = [n for n in range(model.num_layers) if n in plain or not experts or (n + 1) % step]
    moe = MoEConfig(
        num_experts=experts,
        top_k=reader.need("num_experts_per_tok"),
        expert_hidden_size=reader.need("moe_intermediate_size"),
        score_function=ScoreFunction.softmax,
        bias_update_rate=0.0,
        dense_mlp_layers=dense,
        dense_hidden_size=reader.need("intermediate_size") if dense else 0,
    )
    return Architecture(model, dense_attention(), moe)


def _write_dense(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    return {
        **write_common(spec, options),
        "intermediate_size": spec.moe.dense_hidden_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": rope_parameters(spec.model.rope_theta, spec.model.rope_scaling),
    }


def _write_llama(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_write_dense(spec, options)} | {
        "mlp_bias": False
    }


def _write_qwen3(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_write_dense(spec, options)} | {
        "use_sliding_window": False
    }


def _write_qwen3_moe(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    moe = spec.moe
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_write_dense(spec, options),
        "use_sliding_window": False,
        "intermediate_size": moe.dense_hidden_size or moe.expert_hidden_size,
        "moe_intermediate_size": moe.expert_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": moe.dense_mlp_layers,
    }


def _cannot(qk_norm: QKNorm, *, has_moe: bool) -> Callable[[ModelSpec], Iterator[str]]:
    def problems(spec: ModelSpec) -> Iterator[str]:
        yield from limits(
            spec,
            qk_norm=qk_norm,
            activation=Activation.swiglu,
            score_function=ScoreFunction.softmax if has_moe else None,
            index_branch=False,
            rope_scaling=True,
        )

    return problems


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    ignored=("rotary_emb.inv_freq",),
    read_config=_read_llama,
    cannot_express=_cannot(QKNorm.none, has_moe=False),
    write_config=_write_llama,
)
QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    read_config=_read_qwen3,
    cannot_express=_cannot(QKNorm.per_head, has_moe=False),
    write_config=_write_qwen3,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    moe=(ROUTER, NO_ROUTER_BIAS),
    fp32_router=False,
    experts=EXPERTS_PROJ,
    read_config=_read_qwen3_moe,
    cannot_express=_cannot(QKNorm.per_head, has_moe=True),
    write_config=_write_qwen3_moe,
)
