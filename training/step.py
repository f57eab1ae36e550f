"""One step: forward and backward over its micro-batches through Megatron's schedules, and what they add up to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from ..data.packing import PADDING, PackedBatch, own_chunks
from ..kernels import Segments, SelectionQuality
from ..model.config import ModelSpec, Phase
from ..model.context import AttentionContext, LookAhead, Measurements, shift_left
from ..model.gpt import routers
from ..model.parallel import data_group, device, model_group


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
    mtp_losses: list[float]
    """By MTP depth: mean over its targets, nats; zeros in validation, which leaves MTP out."""

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
    mtp_coef: float = 0.0
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
    num_tokens = batches[0].tokens.numel()
    context_rank = parallel_state.get_context_parallel_rank()
    ahead = [look_ahead(spec, batch, context_rank) for batch in batches]
    batches = [batch.share(context_rank, spec.parallel.context) for batch in batches]
    counts = torch.tensor(
        [
            sum(batch.num_target_tokens for batch in batches),
            sum(batch.num_valid_rows for batch in batches),
            *(sum(int(by_depth[depth].mask.sum()) for by_depth in ahead) for depth in range(spec.model.mtp_layers)),
        ],
        dtype=torch.int64,
        device=device(),
    )
    dist.all_reduce(counts, group=data_group())
    lm_tokens, valid_rows, *num_mtp_targets = counts.tolist()
    measurements = Measurements()
    values = dict(
        phase=plan.phase,
        kl_weight=plan.kl_coef * lm_tokens / max(valid_rows * spec.model.num_kv_heads, 1),
        measurements=measurements,
        mtp_weights=[plan.mtp_coef * lm_tokens / max(number * spec.model.mtp_layers, 1) for number in num_mtp_targets],
    )
    share = plan.sample_rows / max(valid_rows, 1)
    for _, router in routers(chunks):
        router.loss_weight = lm_tokens / max(valid_rows, 1)

    def forward_step(
        batch_iterator: Iterator[tuple[PackedBatch, list[LookAhead]]], model: nn.Module
    ) -> tuple[Tensor, Any]:
        batch, by_depth = next(batch_iterator)
        batch, numbers = batch.to(device()), documents(batch.segments, device())
        context = AttentionContext.build(
            spec,
            batch.segments,
            batch.positions[0],
            quality_rows=sampled_rows(batch, share) if plan.sample_rows else None,
            documents=numbers,
            mtp=[one.map(lambda values: values.to(device())) for one in by_depth],
            **values,
        )
        losses = model(
            batch.tokens,
            batch.positions,
            None,
            labels=batch.labels,
            packed_seq_params=context,
            padding_mask=numbers[None],
        )
        return losses, partial(_masked_sum, batch.loss_mask)

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        # every virtual stage reads each micro-batch once
        data_iterator=[zip(batches, ahead, strict=True) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=num_tokens,
        micro_batch_size=1,
        forward_only=plan.forward_only,
    )
    lm_loss = torch.stack([output["lm_loss"] for output in outputs]).sum() if outputs else None
    return _reduce(spec, measurements, lm_loss, lm_tokens, valid_rows, num_mtp_targets, bool(plan.sample_rows))


def look_ahead(spec: ModelSpec, batch: PackedBatch, context_rank: int) -> list[LookAhead]:
    """By MTP depth: this context rank's share of the whole micro-batch `batch`, so many tokens on."""
    numbers, depths = documents(batch.segments, "cpu"), [LookAhead(batch.tokens, batch.labels, batch.loss_mask)]
    for _ in spec.mtp_layers:
        depths.append(depths[-1].map(lambda values: shift_left(values, numbers)))
    return [one.map(lambda values: own_chunks(values, context_rank, spec.parallel.context)) for one in depths[1:]]


def documents(segments: Segments, place: torch.device | str) -> Tensor:
    """int32 [t] on `place`: a number for each row's document, its first key row; -1 for padding.

    Context-parallel ranks that share a document have the same number for it.
    """

    def build() -> Tensor:
        numbers = torch.full((segments.num_queries,), -1, dtype=torch.int32)
        for start, length, first_key, _ in segments.rows:
            numbers[start : start + length] = first_key
        return numbers

    return segments.cached("documents", place, build)


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
    num_mtp_targets: list[int],
    has_quality: bool,
) -> StepSums:
    """Sum over data-parallel ranks and over the parts of the model.

    A stage without the loss or an MSA layer adds zeros. A tensor-parallel rank adds the KL and the quality of its KV
    groups; what all of them know, the loss and the number of rows, is added by the first.
    """
    layers, groups, place = spec.msa_layers, spec.model.num_kv_heads, device()
    with_kl, depths = [*layers, *filter(spec.is_msa, spec.mtp_layers)], spec.model.mtp_layers
    none = SelectionQuality.zeros(groups, place)
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    if lm_loss is None or not is_first:
        lm_loss = torch.zeros((), dtype=torch.float64)
    mtp_losses = measurements.mtp_loss if is_first else {}
    parts = [
        lm_loss.reshape(1).to(place),
        *(measurements.kl.get(layer, none.kl.new_zeros(())).reshape(1) for layer in with_kl),
        *(mtp_losses.get(depth, none.kl.new_zeros(())).reshape(1) for depth in range(depths)),
    ]
    if has_quality:
        local = {layer: _among_all_groups(quality, groups) for layer, quality in measurements.quality.items()}
        parts += [local.get(layer, none).to_vector() for layer in layers]
    sums = torch.cat(parts)
    dist.all_reduce(sums, group=data_group())
    dist.all_reduce(sums, group=model_group())
    sums = sums.cpu()
    size = none.to_vector().numel()
    head, ahead, rest = sums.split([1 + len(with_kl), depths, len(sums) - 1 - len(with_kl) - depths])
    qualities = rest.split(size) if has_quality else []
    return StepSums(
        lm_loss=sums[0].item(),
        lm_tokens=lm_tokens,
        valid_rows=valid_rows,
        kl=dict(zip(with_kl, head[1:].tolist(), strict=True)),
        quality={layer: SelectionQuality.from_vector(vector) for layer, vector in zip(layers, qualities, strict=False)},
        mtp_losses=[loss / max(number, 1) for loss, number in zip(ahead.tolist(), num_mtp_targets, strict=True)],
    )


def _among_all_groups(quality: SelectionQuality, num_groups: int) -> SelectionQuality:
    """The sums of this rank's KV groups at their places among all `num_groups`, zeros elsewhere; rows count once."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    values: dict[str, Any] = {}
    for entry in fields(quality):
        value = getattr(quality, entry.name)
        if isinstance(value, Tensor):
            values[entry.name] = value.new_zeros(num_groups)
            values[entry.name][rank * len(value) : (rank + 1) * len(value)] = value
        else:
            values[entry.name] = value if rank == 0 else 0
    return SelectionQuality(**values)
