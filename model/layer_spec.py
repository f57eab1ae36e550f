"""Which modules make each layer of this rank's pipeline chunk."""

from functools import partial
from types import SimpleNamespace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
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
from .backend import LayerModules, layer_modules
from .config import ModelSpec
from .experts import GroupedExperts
from .moe_layer import DocumentMoELayer
from .router import SigmoidRouter


def block_spec(spec: ModelSpec, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers this rank builds for virtual stage `vp_stage` (None without virtual stages)."""
    first = get_transformer_layer_offset(config, vp_stage, get_pipeline_model_parallel_rank())
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(spec, layer) for layer in range(first, first + count)],
        layer_norm=layer_modules(spec.model.backend).norm,
    )


def layer_spec(spec: ModelSpec, layer: int) -> ModuleSpec:
    """The modules of 0-based global `layer`. The input norm is not fused into QKV: the indexer reads its output."""
    modules = layer_modules(spec.model.backend)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=ModuleSpec(module=MSAAttention, params={"spec": spec, "modules": modules}),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=_moe(spec, modules) if spec.is_moe(layer) else ModuleSpec(module=MLP, submodules=_mlp(modules)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe(spec: ModelSpec, modules: LayerModules) -> SimpleNamespace:
    # Megatron warns of every ModuleSpec whose module is not one of its own; anything else with these names it builds
    return SimpleNamespace(
        module=DocumentMoELayer,
        submodules=MoESubmodules(
            router=partial(SigmoidRouter, moe=spec.moe),
            experts=ModuleSpec(module=GroupedExperts, params={"grouped_product": modules.grouped_product}),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_mlp(modules)),
        ),
    )


def _mlp(modules: LayerModules) -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=modules.column_linear, linear_fc2=modules.row_linear)
