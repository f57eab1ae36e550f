"""What one micro-batch tells every attention layer.

It travels as Megatron's `packed_seq_params`, so a recomputed layer sees the very object of its own forward pass: no
state outlives a micro-batch, and two micro-batches in flight cannot read each other's phase or selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..kernels import Segments, SelectionQuality
from .config import ModelSpec, Phase
from .rope import rotation

if TYPE_CHECKING:
    from .generation import GenerationCache


def shift_left(values: Tensor, documents: Tensor) -> Tensor:
    """values [1, t] one token on in each document; 0 at the end of a document and in padding (documents [t] < 0)."""
    goes_on = (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    shifted = torch.zeros_like(values)
    shifted[:, :-1] = values[:, 1:] * goes_on
    return shifted


@dataclass(frozen=True)
class LookAhead:
    """What an MTP depth d, from 0, reads and predicts in one micro-batch: each token's document, d + 1 tokens on."""

    tokens: Tensor
    """int64 [1, t]; 0 past the document's end, as in the others."""
    labels: Tensor
    """int64 [1, t]."""
    mask: Tensor
    """float32 [1, t]: 1 where the label is a target. Rows of an MTP layer without one have no KL."""

    def map(self, change: Callable[[Tensor], Tensor]) -> LookAhead:
        return LookAhead(change(self.tokens), change(self.labels), change(self.mask))


@dataclass
class Measurements:
    """Sums over the micro-batches of one step on this rank, by 0-based global layer."""

    kl: dict[int, Tensor] = field(default_factory=dict)
    """Sum of the row KL over valid rows and groups, fp64 scalar."""
    quality: dict[int, SelectionQuality] = field(default_factory=dict)
    mtp_loss: dict[int, Tensor] = field(default_factory=dict)
    """By depth from 0: sum of the MTP loss over its targets, fp64 scalar."""

    def add_mtp_loss(self, depth: int, loss_sum: Tensor) -> None:
        self.mtp_loss[depth] = self.mtp_loss.get(depth, torch.zeros_like(loss_sum)) + loss_sum

    def add_kl(self, layer: int, kl_sum: Tensor) -> None:
        self.kl[layer] = self.kl.get(layer, torch.zeros_like(kl_sum)) + kl_sum

    def add_quality(self, layer: int, quality: SelectionQuality) -> None:
        self.quality[layer] = self.quality[layer] + quality if layer in self.quality else quality


@dataclass
class AttentionContext(PackedSeqParams):
    """One packed micro-batch [t, 1, h]: its documents, rotary tables, phase and the weight of its KL rows."""

    segments: Segments = field(kw_only=True)
    cos: Tensor = field(kw_only=True)
    sin: Tensor = field(kw_only=True)
    phase: Phase = field(kw_only=True)
    kl_weight: float = 0.0
    """Factor on each (row, group) KL: lambda x LM tokens / (valid rows x groups), as Megatron divides by LM tokens."""
    measurements: Measurements | None = None
    """Where KL and selection quality are summed; None: nothing is measured."""
    quality_rows: Tensor | None = None
    """int64 [rows]: query rows whose selection is compared with the main branch's mass; None: none."""
    cache: GenerationCache | None = None
    """Earlier tokens, in generation; None in training and validation."""

    documents: Tensor | None = None
    """int32 [t]: a number for each row's document (its first key row), -1 for padding."""
    mtp: list[LookAhead] = field(default_factory=list)
    """By MTP depth."""
    mtp_weights: list[float] = field(default_factory=list)
    """By MTP depth: factor on each target's loss: coefficient x LM tokens / (depths x targets of that depth)."""

    @classmethod
    def build(cls, spec: ModelSpec, segments: Segments, positions: Tensor, phase: Phase, **values) -> AttentionContext:
        """Args: positions, int64 [t], restart at each document. Other values are fields of this class."""
        cos, sin = rotation(positions, spec.model.rotary_dim, spec.model.rope_theta, spec.model.rope_scaling)
        return cls(segments=segments, cos=cos, sin=sin, phase=phase, **values)
