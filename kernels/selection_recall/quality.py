"""What the measures of selection quality add up to."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


def skill(recall: Tensor, random: Tensor) -> Tensor:
    """(recall - random) / (1 - random): 0 for a random selection, 1 for a perfect one."""
    return (recall - random) / (1.0 - random)


@dataclass(frozen=True)
class SelectionQuality:
    """Sums over sampled query rows, fp64 [g] each. They add up over layers, micro-batches and ranks.

    Over the long rows (more than k visible blocks): block_recall, score_recall, captured_mass, random_block_recall,
    random_score_recall. Over all sampled rows: the rest.
    """

    num_rows: int
    """Sampled rows that lie in a document."""
    num_long_rows: int
    """Those of them with more than k visible blocks."""
    block_recall: Tensor
    """|I* n I| / |I*|, I* = the k best blocks by the main branch's own mass, I = the kept blocks."""
    score_recall: Tensor
    """Main-branch mass of I* n I over that of I*."""
    captured_mass: Tensor
    """Main-branch mass of I, of the full softmax."""
    random_block_recall: Tensor
    """Expected block_recall of the local block and k-1 others drawn uniformly."""
    random_score_recall: Tensor
    """Expected score_recall of the same."""
    kl: Tensor
    """KL(P || P_idx) on the support, nats."""
    kl_uniform: Tensor
    """KL(P || uniform) on the support, nats."""
    entropy: Tensor
    """Entropy of P_idx on the support, nats."""
    local_fraction: Tensor
    """P_idx mass in the local block."""
    sink_fraction: Tensor
    """P_idx mass in block 0."""

    @classmethod
    def zeros(cls, num_groups: int, device: torch.device | str = "cpu") -> "SelectionQuality":
        """The neutral element of the sum, for a stage or a rank that sampled nothing."""
        size = 2 + num_groups * (len(fields(cls)) - 2)
        return cls.from_vector(torch.zeros(size, dtype=torch.float64, device=device))

    def __add__(self, other: "SelectionQuality") -> "SelectionQuality":
        return self.from_vector(self.to_vector() + other.to_vector())

    def to_vector(self) -> Tensor:
        """All numbers as fp64 [2 + 10 g], to be summed over ranks."""
        sums = [getattr(self, name) for name in _sum_names()]
        counts = sums[0].new_tensor([self.num_rows, self.num_long_rows], dtype=torch.float64)
        return torch.cat([counts, *sums])

    @classmethod
    def from_vector(cls, vector: Tensor) -> "SelectionQuality":
        """Inverse of `to_vector`."""
        names = _sum_names()
        if vector.ndim != 1 or vector.numel() <= 2 or (vector.numel() - 2) % len(names):
            raise ValueError(
                f"SelectionQuality: the vector must be [2 + {len(names)} g]; got {tuple(vector.shape)}. "
                "Pass what to_vector returned, summed over ranks or not."
            )
        num_rows, num_long_rows = (round(count) for count in vector[:2].tolist())
        sums = dict(zip(names, vector[2:].chunk(len(names)), strict=True))
        return cls(num_rows=num_rows, num_long_rows=num_long_rows, **sums)

    @property
    def block_skill(self) -> Tensor:
        """Skill of the mean block recall, [g]; NaN without long rows."""
        return skill(self.block_recall / self.num_long_rows, self.random_block_recall / self.num_long_rows)

    @property
    def score_skill(self) -> Tensor:
        """Skill of the mean score recall, [g]; NaN without long rows."""
        return skill(self.score_recall / self.num_long_rows, self.random_score_recall / self.num_long_rows)


def _sum_names() -> list[str]:
    return [entry.name for entry in fields(SelectionQuality)][2:]
