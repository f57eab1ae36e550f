"""Expert load: the bias update after a successful step, and the load metrics."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from ..model.config import ModelSpec
from ..model.gpt import routers
from ..model.parallel import device, token_group

# What is known of a layer after a step, in the order of `_measure`.
LOADS = ("max_over_mean_load", "min_over_mean_load", "load_std", "dead_experts", "bias_range")


@torch.no_grad()
def balance_experts(
    chunks: Sequence[nn.Module], spec: ModelSpec, *, applied: bool, valid_rows: int, num_layers_logged: int
) -> dict[str, float]:
    """Count the step's tokens over all ranks, update each layer's bias if the step was applied, return `moe/...`.

    Args:
        applied: whether the optimizer stepped; a skipped step moves no bias.
        valid_rows: tokens of the global batch, padding left out: what the balance losses are means over.
        num_layers_logged: MoE layers that get keys of their own, evenly spread from first to last.
    """
    layers = [*spec.moe_layers, *filter(spec.is_moe, spec.mtp_layers)]
    num_layers = spec.model.num_layers + spec.model.mtp_layers
    found = torch.zeros(num_layers, len(LOADS) + 2, dtype=torch.float64, device=device())
    local = list(routers(chunks))
    if local:
        counts = torch.stack([router.take_counts() for _, router in local])
        losses = torch.stack([router.take_losses() for _, router in local])
        dist.all_reduce(counts, group=token_group())
        if spec.moe.has_losses:
            dist.all_reduce(losses, group=token_group())
        for (layer, router), count, loss in zip(local, counts, losses, strict=True):
            if applied:
                router.update_expert_bias(count)
            found[layer] = torch.cat([_measure(count, router.expert_bias), loss / max(valid_rows, 1)])
    dist.all_reduce(found, group=parallel_state.get_pipeline_model_parallel_group())
    return _metrics(spec, dict(zip(layers, found[layers].tolist(), strict=True)), num_layers_logged)


def _measure(count: Tensor, bias: Tensor) -> Tensor:
    """One layer's `LOADS` from its global counts, fp64."""
    load = count.double() * count.numel() / count.sum().clamp_min(1)
    dead = (count == 0).sum().double()
    return torch.stack([load.max(), load.min(), load.std(correction=0), dead, (bias.max() - bias.min()).double()])


def _metrics(spec: ModelSpec, by_layer: dict[int, list[float]], num_layers_logged: int) -> dict[str, float]:
    """Worst layer, sum or mean over all MoE layers, and the keys of some layers."""
    if not by_layer:
        return {}
    most, least, spread, dead, bias_range, aux, z = zip(*by_layer.values(), strict=True)
    values: dict[str, float] = {
        "moe/max_over_mean_load": max(most),
        "moe/min_over_mean_load": min(least),
        "moe/load_std": max(spread),
        "moe/dead_experts": sum(dead),
        "moe/bias_range": max(bias_range),
    }
    if spec.moe.force_balance:
        values["moe/forced_balance"] = 1
    if spec.moe.has_losses:
        values |= {"moe/aux_loss": sum(aux) / len(aux), "moe/z_loss": sum(z) / len(z)}
        values["moe/weighted_losses"] = spec.moe.aux_loss_coef * sum(aux) + spec.moe.z_loss_coef * sum(z)
    for layer in spread_out(list(by_layer), num_layers_logged):
        values |= {f"moe/{name}/layer_{layer}": by_layer[layer][place] for place, name in enumerate(LOADS)}
    return values


def spread_out(layers: list[int], limit: int) -> list[int]:
    """At most `limit` of `layers`, evenly spread with the first and the last. Example: 0..61 by 4 -> 0, 20, 41, 61."""
    if limit >= len(layers):
        return layers
    last = len(layers) - 1
    return [layers[round(place * last / max(limit - 1, 1))] for place in range(limit)]
