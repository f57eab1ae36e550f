"""MiniMax-M3's text model with its released names, alone or inside the vision-language envelope (`language_model.`)."""

from collections.abc import Iterator
from typing import Any

from ..config import (
    Activation,
    AttentionBackend,
    AttentionConfig,
    AttentionKind,
    ModelSpec,
    MoEConfig,
    QKNorm,
    ScoreFunction,
)
from .common import read_model, write_common
from .config_reader import ConfigReader, ConversionError
from .family import EXPERTS_W123, ROUTER, ROUTER_BIAS, SHARED_EXPERT, Architecture, ExportOptions, Family, Row
from .forms import NORM
from .limits import limits
from .minimax_m2 import rotary_dim

INDEX_BRANCH = (
    Row("self_attention.indexer.query_proj.weight", ("self_attn.index_q_proj.weight",)),
    Row("self_attention.indexer.key_proj.weight", ("self_attn.index_k_proj.weight",)),
    Row("self_attention.indexer.query_norm.weight", ("self_attn.index_q_norm.weight",), NORM),
    Row("self_attention.indexer.key_norm.weight", ("self_attn.index_k_norm.weight",), NORM),
)


def _read(config: dict[str, Any]) -> Architecture:
    reader = ConfigReader(config.get("text_config", config))
    if reader.get("layer_types", []) and reader.get("sparse_attention_config", None) is None:
        raise ConversionError(
            "config.json was rewritten by transformers' text class, which drops sparse_attention_config and writes "
            "fused names of its own. Use the released layout, with or without the vision-language envelope."
        )
    reader.expect("hidden_act", "swigluoai")
    reader.expect("swiglu_alpha", 1.702)
    reader.expect("swiglu_limit", 7.0)
    reader.expect("swiglu_beta", 1.0)
    reader.expect("scoring_func", "sigmoid")
    reader.expect("use_routing_bias", True)
    reader.expect("use_qk_norm", True)
    reader.expect("qk_norm_type", "per_head")
    reader.expect("use_gemma_norm", True)
    reader.expect("attention_output_gate", False)
    reader.expect("tie_word_embeddings", False)
    head_dim, layers = reader.need("head_dim"), reader.need("num_hidden_layers")
    if reader.partial_rotary_factor() is None:
        raise ConversionError(
            "config.json has no partial_rotary_factor: transformers would rotate whole heads and others rotary_dim "
            "channels. Add it."
        )
    model = read_model(
        reader,
        head_dim=head_dim,
        rotary_dim=rotary_dim(reader, head_dim),
        qk_norm=QKNorm.per_head,
        zero_centered_norms=True,
        activation=Activation.swiglu_oai,
        **reader.rope(),
    )
    attention = _read_attention(reader, layers, model.num_kv_heads)
    dense = [layer for layer, flag in enumerate(_flags(reader.config, "moe_layer_freq", layers)) if not flag]
    width = reader.need("intermediate_size")
    if len(dense) < layers:
        reader.expect("n_shared_experts", 1)
        if (shared := reader.get("shared_intermediate_size", width)) != width:
            reader.refuse(
                f"shared_intermediate_size ({shared}) is not intermediate_size ({width}): servers read either."
            )
    reader.finish()
    moe = MoEConfig(
        num_experts=reader.need("num_local_experts"),
        top_k=reader.need("num_experts_per_tok"),
        expert_hidden_size=width,
        shared_hidden_size=width,
        routed_scaling=float(reader.need("routed_scaling_factor")),
        dense_mlp_layers=dense,
        dense_hidden_size=reader.need("dense_intermediate_size") if dense else 0,
    )
    return Architecture(model, attention, moe)


def _read_attention(reader: ConfigReader, layers: int, kv_heads: int) -> AttentionConfig:
    sparse = reader.get("sparse_attention_config", {})
    if not sparse.get("use_sparse_attention", bool(sparse)):
        return AttentionConfig(kind=AttentionKind.dense, backend=AttentionBackend.reference)
    inner = ConfigReader(sparse)
    inner.need("sparse_local_block")  # servers differ in its default
    inner.expect("sparse_local_block", 1)
    inner.expect("sparse_score_type", "max")
    inner.expect("sparse_num_index_heads", kv_heads)
    full = [layer for layer, flag in enumerate(_flags(sparse, "sparse_attention_freq", layers)) if not flag]
    without_value = _flags(sparse, "sparse_disable_index_value", layers)
    if with_value := [layer for layer, flag in enumerate(without_value) if not flag and layer not in full]:
        reader.refuse(f"sparse_disable_index_value is 0 in layers {with_value}; the model here has no index values.")
    attention = AttentionConfig(
        kind=AttentionKind.dense if len(full) == layers else AttentionKind.msa,
        block_size=inner.need("sparse_block_size"),
        top_k=inner.need("sparse_topk_blocks"),
        index_dim=inner.need("sparse_index_dim"),
        init_blocks=inner.get("sparse_init_block", 0),
        backend=AttentionBackend.reference,
        full_layers=[] if len(full) == layers else full,
    )
    reader.problems += inner.problems
    return attention


def _flags(config: dict[str, Any], key: str, layers: int) -> list[int]:
    """A list of one flag for each layer. Raises ConversionError where it is missing or of another length."""
    flags = config.get(key)
    if flags is None or len(flags) != layers:
        raise ConversionError(
            f"config.json: {key} is {flags}; it must be a list of {layers} flags, one for each layer."
        )
    return flags


def _cannot(spec: ModelSpec) -> Iterator[str]:
    moe, attention = spec.moe, spec.attention
    yield from limits(
        spec,
        qk_norm=QKNorm.per_head,
        activation=Activation.swiglu_oai,
        score_function=ScoreFunction.sigmoid,
        index_branch=True,
        partial_rotation=True,
        routed_scaling=True,
        zero_centered_norms=True,
    )
    if spec.moe_layers and moe.shared_hidden_size not in (0, moe.expert_hidden_size):
        yield (
            f"moe.shared_hidden_size is {moe.shared_hidden_size}; the format's shared expert is as wide as the others "
            f"({moe.expert_hidden_size})."
        )
    if not spec.msa_layers:
        return
    if not attention.index_norm:
        yield "attention.index_norm is false; the format norms its index heads."
    if not attention.index_rope and spec.model.rotary_dim:
        yield "attention.index_rope is false; the format rotates its index heads."
    if attention.init_blocks:
        yield f"attention.init_blocks is {attention.init_blocks}; transformers would leave them out without a word."


def _write(spec: ModelSpec, options: ExportOptions) -> dict[str, Any]:
    """The text_config, by hand: transformers would drop keys that servers need. No model_type, as in the release."""
    model, moe, attention = spec.model, spec.moe, spec.attention
    sparse = [int(spec.is_msa(layer)) for layer in range(model.num_layers)]
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        **write_common(spec, options),
        "tie_word_embeddings": False,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rotary_dim": model.rotary_dim,
        "partial_rotary_factor": model.rotary_dim / model.head_dim,
        "rope_theta": model.rope_theta,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_hidden_size,
        "shared_intermediate_size": moe.expert_hidden_size,
        "n_shared_experts": 1,
        "dense_intermediate_size": moe.dense_hidden_size or moe.expert_hidden_size,
        "moe_layer_freq": [int(spec.is_moe(layer)) for layer in range(model.num_layers)],
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": moe.routed_scaling,
        "num_mtp_modules": 0,
        "num_nextn_predict_layers": 0,
        "sparse_attention_config": {
            "use_sparse_attention": bool(spec.msa_layers),
            "sparse_index_dim": attention.index_dim,
            "sparse_num_index_heads": model.num_kv_heads,
            "sparse_topk_blocks": attention.top_k,
            "sparse_block_size": attention.block_size,
            "sparse_score_type": "max",
            "sparse_init_block": attention.init_blocks,
            "sparse_local_block": 1,
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        },
    }


MINIMAX_M3 = Family(
    name="minimax_m3",
    model_types=("minimax_m3_vl", "minimax_m3_vl_text"),
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
    moe_block="block_sparse_moe",
    index=INDEX_BRANCH,
    moe=(ROUTER, ROUTER_BIAS),
    shared=SHARED_EXPERT,
    experts=EXPERTS_W123,
    zero_centered_norms=True,
    separate_head=True,
    always_shared=True,
    ignored=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.", "mtp."),
    read_config=_read,
    cannot_express=_cannot,
    write_config=_write,
)
