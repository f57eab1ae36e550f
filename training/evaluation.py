"""Validation, and the index branch's quality as metrics."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.data import Dataset

from ..data.dataset import Sample
from ..data.loader import evaluation_batches
from ..kernels import SelectionQuality, skill
from ..model.config import ModelSpec, Phase
from .step import StepPlan, StepSums, run_micro_batches

# Measures that are logged for training rows alone.
TRAINING_ONLY = ("entropy", "local_fraction", "sink_fraction")


def evaluate(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    dataset: Dataset[Sample],
    *,
    phase: Phase,
    num_samples: int,
    sample_rows: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
) -> StepSums:
    """Forward passes over the same global samples in any layout, the selection measured on about `sample_rows` rows.

    Under no_grad and in eval mode: expert counts and biases stay as they are.
    """
    batches = list(evaluation_batches(dataset, num_samples, micro_batch_size, dp_rank, dp_size))
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        plan = StepPlan(phase=phase, forward_only=True, sample_rows=sample_rows if spec.msa_layers else 0)
        sums = run_micro_batches(chunks, spec, batches, plan)
    for chunk in chunks:
        chunk.train()
    return sums


def evaluation_metrics(
    name: str, sums: Mapping[str, StepSums], shares: Mapping[str, float], spec: ModelSpec
) -> dict[str, float]:
    """`eval/<name>/...` of one evaluation of several sources: the mean by `shares`, and the loss of each beside it."""
    loss = sum(shares[source] * one.mean_lm_loss for source, one in sums.items())
    values = {f"eval/{name}/lm_loss": loss, f"eval/{name}/ppl": math.exp(min(loss, 700.0))}
    if len(sums) > 1:
        values |= {f"eval/{name}/lm_loss/{source}": one.mean_lm_loss for source, one in sums.items()}
    if spec.msa_layers:
        quality = _quality(f"eval/{name}", [part for one in sums.values() for part in one.quality.values()])
        values |= {key: value for key, value in quality.items() if key.rsplit("/", 1)[1] not in TRAINING_ONLY}
    return values


def loss_metrics(
    sums: StepSums, spec: ModelSpec, *, kl_coef: float, mtp_coef: float, balance: float
) -> dict[str, float]:
    """`train/loss`, all that a training step minimises, and its parts. balance: the weighted losses of the routers."""
    weighted_kl = kl_coef * sum(sums.mean_kl(layer, spec.model.num_kv_heads) for layer in sums.kl)
    total = sums.mean_lm_loss + weighted_kl + balance
    values = {"train/lm_loss": sums.mean_lm_loss}
    if sums.mtp_losses:
        values |= {f"train/mtp_loss/depth_{depth}": loss for depth, loss in enumerate(sums.mtp_losses, start=1)}
        values["train/mtp_loss"] = sum(sums.mtp_losses) / len(sums.mtp_losses)
        total += mtp_coef * values["train/mtp_loss"]
    if spec.msa_layers:
        values["indexer/kl_share_of_loss"] = weighted_kl / total
    return {**values, "train/loss": total}


def indexer_metrics(sums: StepSums, spec: ModelSpec) -> dict[str, float]:
    """`indexer/...` of one training step of a model with MSA layers: the exact KL and, on sampled rows, the quality."""
    groups = spec.model.num_kv_heads
    # an MTP layer's number is past the decoder's; its KL is logged apart and not part of the mean
    layers = {f"indexer/kl/layer_{layer}": sums.mean_kl(layer, groups) for layer in sums.kl}
    return {
        **layers,
        "indexer/kl": _mean_kl(sums, spec),
        **(quality_metrics("indexer", sums.quality) if sums.quality else {}),
    }


def quality_metrics(prefix: str, by_layer: dict[int, SelectionQuality]) -> dict[str, float]:
    """Means over sampled rows, groups and layers; recalls over the rows with more than k visible blocks.

    A recall is left out when no sampled row has more than k blocks. The exact KL over all rows is logged beside.
    """
    values = _quality(prefix, list(by_layer.values()))
    values.pop(f"{prefix}/kl", None)
    for layer, quality in by_layer.items():
        one = _quality(prefix, [quality])
        for name in ("score_recall", "block_recall"):
            if f"{prefix}/{name}" in one:
                values[f"{prefix}/{name}/layer_{layer}"] = one[f"{prefix}/{name}"]
    return values


def _quality(prefix: str, parts: list[SelectionQuality]) -> dict[str, float]:
    total = sum(parts[1:], start=parts[0])
    values = {f"{prefix}/long_row_fraction": total.num_long_rows / max(total.num_rows, 1)}
    if total.num_rows:
        for name in ("kl", "kl_uniform", "entropy", "local_fraction", "sink_fraction"):
            values[f"{prefix}/{name}"] = getattr(total, name).mean().item() / total.num_rows
    if total.num_long_rows:
        recalls = ("block_recall", "score_recall", "captured_mass", "random_block_recall", "random_score_recall")
        for name in recalls:
            values[f"{prefix}/{name}"] = getattr(total, name).mean().item() / total.num_long_rows
        mean, random = total.score_recall.mean(), total.random_score_recall.mean()
        values[f"{prefix}/score_recall_skill"] = skill(mean / total.num_long_rows, random / total.num_long_rows).item()
    return values


def _mean_kl(sums: StepSums, spec: ModelSpec) -> float:
    layers = [sums.mean_kl(layer, spec.model.num_kv_heads) for layer in spec.msa_layers]
    return sum(layers) / len(layers)
