"""The one translation of this project's configs to Megatron's TransformerConfig."""

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from .config import Activation, ModelSpec, Precision, Recompute

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def transformer_config(spec: ModelSpec) -> TransformerConfig:
    """Megatron's view of `spec`. The router, its bias and the auxiliary losses are ours, so their switches stay off."""
    model, moe, parallel = spec.model, spec.moe, spec.parallel
    chunks = parallel.pipeline * parallel.virtual_pipeline
    uneven = chunks > 1 and model.num_layers % chunks != 0
    dtype = DTYPES[spec.precision]
    has_moe = bool(spec.moe_layers)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_query_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=moe.dense_hidden_size or moe.expert_hidden_size,
        mtp_num_layers=model.mtp_layers or None,
        layernorm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=model.zero_centered_norms,
        gated_linear_unit=True,
        **_activation(model.activation),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # mixture of experts
        num_moe_experts=moe.num_experts if has_moe else None,
        moe_ffn_hidden_size=moe.expert_hidden_size if has_moe else None,
        moe_shared_expert_intermediate_size=(moe.shared_hidden_size or None) if has_moe else None,
        moe_router_topk=moe.top_k,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_router_enable_expert_bias=False,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=parallel.dispatcher.name,
        moe_grouped_gemm=False,
        # weights are set afterwards, by seed and global name
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=spec.precision is Precision.bf16,
        # layout
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        account_for_embedding_in_pipeline_split=uneven,
        account_for_loss_in_pipeline_split=uneven,
        # with two stages and virtual stages the batched default pairs messages by order and computes a wrong model
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        # gradients are summed over tokens and divided once by the global number of LM targets
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **_recompute(spec.recompute),
    )


def _activation(activation: Activation) -> dict[str, Any]:
    if activation is Activation.swiglu:
        return dict(activation_func=F.silu)
    return dict(activation_func=_quick_gelu, activation_func_clamp_value=7.0, glu_linear_offset=1.0)


def _quick_gelu(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate)


def _recompute(recompute: Recompute) -> dict:
    if recompute is Recompute.full:
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    if recompute is Recompute.selective:
        return dict(recompute_granularity="selective", recompute_modules=["moe", "mlp"])
    return {}
