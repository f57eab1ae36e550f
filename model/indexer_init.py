"""Index weights out of a dense checkpoint's own attention (spec section 4, CPT initialisation)."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from .attention import MSAAttention
from .config import QKNorm


@torch.no_grad()
def init_from_attention(attention: MSAAttention) -> None:
    """Fill the layer's index branch with averages of its main branch, which must hold trained weights.

    W_q_idx of a group is the mean of that group's query projections, W_k_idx the mean of all key projections; norm
    weights are those of the main QK norms, averaged over heads where each head has its own. Needs index_dim = head_dim.
    """
    indexer: Any = attention.indexer
    model = attention.spec.model
    assert indexer is not None and attention.spec.attention.index_dim == model.head_dim
    group_heads = model.num_query_heads // model.num_kv_heads
    # [groups of this rank, query heads of a group + key + value, d, h]
    weight: Tensor = attention.linear_qkv.weight
    mixed = weight.float().unflatten(0, (-1, group_heads + 2, model.head_dim))
    indexer.query_proj.weight.copy_(mixed[:, :group_heads].mean(dim=1).flatten(0, 1))
    indexer.key_proj.weight.copy_(_mean_over_heads(mixed[:, group_heads], model.num_kv_heads))
    if not attention.spec.attention.index_norm or model.qk_norm is QKNorm.none:
        return  # no norm to fill, or none to fill it from: it stays at one
    norms: tuple[Any, ...] = (
        (indexer.query_norm, attention.query_norm, model.num_query_heads),
        (indexer.key_norm, attention.key_norm, model.num_kv_heads),
    )
    for ours, main, heads in norms:
        weight = main.weight.float()
        if model.qk_norm is QKNorm.full_vector:
            weight = _mean_over_heads(weight.unflatten(0, (-1, model.head_dim)), heads)
        ours.weight.copy_(weight)


def _mean_over_heads(heads: Tensor, total: int) -> Tensor:
    """Mean over dimension 0 and the tensor-parallel ranks, which hold `total` heads together."""
    mean = heads.sum(dim=0) / total
    dist.all_reduce(mean, group=parallel_state.get_tensor_model_parallel_group())
    return mean
