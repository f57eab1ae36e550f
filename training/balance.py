"""Expert load: the bias update after a successful step, and the load metrics."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from ..model.config import ModelSpec
from ..model.gpt import routers
from ..model.parallel import device, token_group


@torch.no_grad()
def balance_experts(chunks: Sequence[nn.Module], spec: ModelSpec, *, applied: bool) -> dict[str, float]:
    """Count the step's tokens over all ranks, update each layer's bias if the step was applied, return load metrics.

    The metrics are means and extremes over all MoE layers: max over mean load, experts without a token, bias range.
    """
    loads = torch.zeros(spec.model.num_layers, 3, dtype=torch.float64, device=device())
    local = list(routers(chunks))
    if local:
        counts = torch.stack([router.take_counts() for _, router in local])
        dist.all_reduce(counts, group=token_group())
        for (layer, router), count in zip(local, counts, strict=True):
            if applied:
                router.update_expert_bias(count)
            bias = router.expert_bias
            loads[layer] = torch.stack(
                [
                    count.max() / count.double().mean().clamp_min(1),
                    (count == 0).sum().double(),
                    (bias.max() - bias.min()).double(),
                ]
            )
    dist.all_reduce(loads, group=parallel_state.get_pipeline_model_parallel_group())
    layers = loads[spec.moe_layers].cpu()
    if not len(layers):
        return {}
    return {
        "moe/max_over_mean_load": layers[:, 0].max().item(),
        "moe/dead_experts": layers[:, 1].sum().item(),
        "moe/bias_range": layers[:, 2].max().item(),
    }
