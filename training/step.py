"""One step: forward and backward over its micro-batches through Megatron's schedules, and what they add up to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ..data.packing import PADDING, PackedBatch
from ..kernels import SelectionQuality
from ..model.config import ModelSpec, Phase
from ..model.context import AttentionContext, Measurements
from ..model.parallel import data_group, device


@dataclass(frozen=True)
class StepSums:
    """Sums over all micro-batches and ranks, known to every rank."""

    lm_loss: float
    """Over LM target tokens, nats."""
    lm_tokens: int
    valid_rows: int
    kl: dict[int, float]
    """Layer -> sum over valid rows and groups, nats."""
    quality: dict[int, SelectionQuality]
    """Layer -> measures of the selection on the sampled rows; empty when none were sampled."""

    @property
    def mean_lm_loss(self) -> float:
        return self.lm_loss / max(self.lm_tokens, 1)

    def mean_kl(self, layer: int, num_groups: int) -> float:
        return self.kl[layer] / max(self.valid_rows * num_groups, 1)


@dataclass(frozen=True)
class StepPlan:
    """How a step's forward passes run."""

    phase: Phase
    kl_coef: float = 0.0
    sample_rows: int = 0
    """About how many query rows of the global batch have their selection measured."""
    forward_only: bool = False


def run_micro_batches(
    chunks: Sequence[nn.Module], spec: ModelSpec, batches: list[PackedBatch], plan: StepPlan
) -> StepSums:
    """Forward (and backward) of this rank's `batches`; gradients are left, reduced and divided by LM tokens, in DDP.

    Two denominators: LM tokens and valid rows are counted before the first backward, since Megatron divides every
    gradient by the LM tokens afterwards and the KL must come out divided by (valid rows x groups) instead.
    """
    counts = torch.tensor(
        [sum(batch.num_target_tokens for batch in batches), sum(batch.num_valid_rows for batch in batches)],
        dtype=torch.int64,
        device=device(),
    )
    dist.all_reduce(counts, group=data_group())
    lm_tokens, valid_rows = counts.tolist()
    measurements = Measurements()
    values = dict(
        phase=plan.phase,
        kl_weight=plan.kl_coef * lm_tokens / max(valid_rows * spec.model.num_kv_heads, 1),
        measurements=measurements,
    )
    share = plan.sample_rows / max(valid_rows, 1)

    def forward_step(batch_iterator: Iterator[PackedBatch], model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(batch_iterator).to(device())
        rows = sampled_rows(batch, share) if plan.sample_rows else None
        context = AttentionContext.build(spec, batch.segments, batch.positions[0], quality_rows=rows, **values)
        padding = ~batch.segments.query_mask(device())[None] if batch.num_valid_rows < batch.tokens.numel() else None
        losses = model(
            batch.tokens,
            batch.positions,
            None,
            labels=batch.labels,
            packed_seq_params=context,
            padding_mask=padding,
        )
        return losses, partial(_masked_sum, batch.loss_mask)

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        # every virtual stage reads each micro-batch once
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.numel(),
        micro_batch_size=1,
        forward_only=plan.forward_only,
    )
    lm_loss = torch.stack([output["lm_loss"] for output in outputs]).sum() if outputs else None
    return _reduce(spec, measurements, lm_loss, lm_tokens, valid_rows, bool(plan.sample_rows))


def sampled_rows(batch: PackedBatch, share: float) -> Tensor:
    """int64 [rows]: the query rows whose hash of (document, position) falls below `share`, in any layout the same."""
    mixed = batch.document_ids * 0x9E3779B1 + batch.positions[0] * 0x85EBCA77
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    chosen = (mixed ^ (mixed >> 15)) < share * 2**32
    return (chosen & (batch.document_ids != PADDING)).nonzero().flatten()


def _masked_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's per-token loss contract: (sum, number of tokens, what to report)."""
    total = (losses.float() * loss_mask).sum()
    return total, loss_mask.sum().to(torch.int), {"lm_loss": total.detach().double()}


def _reduce(
    spec: ModelSpec,
    measurements: Measurements,
    lm_loss: Tensor | None,
    lm_tokens: int,
    valid_rows: int,
    has_quality: bool,
) -> StepSums:
    """Sum over data-parallel ranks and pipeline stages; a stage without the loss or an MSA layer adds zeros."""
    layers, groups, place = spec.msa_layers, spec.model.num_kv_heads, device()
    none = SelectionQuality.zeros(groups, place)
    parts = [
        lm_loss.reshape(1).to(place) if lm_loss is not None else torch.zeros(1, dtype=torch.float64, device=place),
        *(measurements.kl.get(layer, none.kl.new_zeros(())).reshape(1) for layer in layers),
    ]
    if has_quality:
        parts += [measurements.quality.get(layer, none).to_vector() for layer in layers]
    sums = torch.cat(parts)
    dist.all_reduce(sums, group=data_group())
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    sums = sums.cpu()
    size = none.to_vector().numel()
    qualities = sums[1 + len(layers) :].split(size) if has_quality else []
    return StepSums(
        lm_loss=sums[0].item(),
        lm_tokens=lm_tokens,
        valid_rows=valid_rows,
        kl=dict(zip(layers, sums[1 : 1 + len(layers)].tolist(), strict=True)),
        quality={layer: SelectionQuality.from_vector(vector) for layer, vector in zip(layers, qualities, strict=False)},
    )
