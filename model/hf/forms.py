"""How tensors of a Hugging Face checkpoint make one of ours, and the way back: `split` undoes `join` to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ModelSpec


@dataclass(frozen=True)
class Sizes:
    """What the forms need to know of a model."""

    num_groups: int
    head_dim: int
    vocab_rows: int
    """Rows of our embedding and head."""
    vocab_size: int
    """Rows of theirs: the real vocabulary, without padding."""
    norm_shift: float
    """What our norm weights have more than theirs: 1 where theirs are zero-centred and ours are not."""

    @classmethod
    def of(cls, spec: ModelSpec, vocab_size: int, *, zero_centered_norms: bool) -> "Sizes":
        """`zero_centered_norms` says it of the other side's."""
        model = spec.model
        shift = float(zero_centered_norms) - float(model.zero_centered_norms)
        return cls(model.num_kv_heads, model.head_dim, model.vocab_size, vocab_size, shift)


class Form(Protocol):
    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        """Theirs, in the order of the row's names, to ours."""

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        """Ours to theirs."""


class Copy:
    """The same tensor."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        (tensor,) = parts
        return tensor

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor]


class NormWeight:
    """A norm's weight, zero-centred on one side or on both."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return _shifted(parts[0], sizes.norm_shift)

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [_shifted(tensor, -sizes.norm_shift)]


def _shifted(weight: Tensor, shift: float) -> Tensor:
    return (weight.float() + shift).to(weight.dtype) if shift else weight


class QueryKeyValue:
    """q [n*d, h], k [g*d, h], v [g*d, h] -> [(n+2g)*d, h], group by group: its query heads, its key, its value."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        grouped = [part.unflatten(0, (sizes.num_groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        grouped = tensor.unflatten(0, (sizes.num_groups, -1))
        dim = sizes.head_dim
        parts = grouped.split([grouped.shape[1] - 2 * dim, dim, dim], dim=1)
        return [part.flatten(0, 1) for part in parts]


class GateUp:
    """gate [f, h], up [f, h] -> [2f, h], the gate first, not interleaved."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.cat(list(parts))

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return list(tensor.chunk(2))


class ExpertGateUp:
    """gate [f, h], up [f, h] of one expert -> [1, 2, f, h]."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return torch.stack(list(parts))[None]

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return list(tensor[0])


class ExpertDown:
    """down [h, f] of one expert -> [1, h, f]."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        return parts[0][None]

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor[0]]


class VocabularyRows:
    """[vocabulary, h] -> [rows, h] with zeros below; the way back cuts them off."""

    def join(self, parts: Sequence[Tensor], sizes: Sizes) -> Tensor:
        (rows,) = parts
        if len(rows) != sizes.vocab_size:
            raise ValueError(f"{len(rows)} rows, but the vocabulary has {sizes.vocab_size}")
        extra = sizes.vocab_rows - len(rows)
        return F.pad(rows, (0, 0, 0, extra)) if extra else rows

    def split(self, tensor: Tensor, sizes: Sizes) -> list[Tensor]:
        return [tensor[: sizes.vocab_size]]


COPY, NORM, QKV, GATE_UP = Copy(), NormWeight(), QueryKeyValue(), GateUp()
EXPERT_GATE_UP, EXPERT_DOWN, VOCABULARY = ExpertGateUp(), ExpertDown(), VocabularyRows()
