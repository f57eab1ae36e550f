"""Which modules make each layer of this rank's pipeline chunk."""

from functools import partial
from types import SimpleNamespace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from .attention import MSAAttention
from .config import ModelSpec
from .experts import GroupedExperts
from .moe_layer import DocumentMoELayer
from .norm import RMSNorm
from .router import SigmoidRouter


def block_spec(spec: ModelSpec, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers this rank builds for virtual stage `vp_stage` (None without virtual stages)."""
    first = get_transformer_layer_offset(config, vp_stage, get_pipeline_model_parallel_rank())
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(spec, layer) for layer in range(first, first + count)], layer_norm=RMSNorm
    )


def layer_spec(spec: ModelSpec, layer: int) -> ModuleSpec:
    """The modules of 0-based global `layer`. The input norm is not fused into QKV: the indexer reads its output."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(module=MSAAttention, params={"spec": spec}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe(spec) if spec.is_moe(layer) else ModuleSpec(module=MLP, submodules=_mlp()),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe(spec: ModelSpec) -> SimpleNamespace:
    # Megatron warns of every ModuleSpec whose module is not one of its own; anything else with these names it builds
    return SimpleNamespace(
        module=DocumentMoELayer,
        submodules=MoESubmodules(
            router=partial(SigmoidRouter, moe=spec.moe),
            experts=GroupedExperts,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_mlp()),
        ),
    )


def _mlp() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
