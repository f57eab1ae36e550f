"""Selection quality on sampled rows, in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import tiling
from ..segments import Segments
from ..tiling import grouped_scores, kept_tokens, mask_floor, masked_softmax
from .quality import SelectionQuality


def block_mass(probs: Tensor, block_size: int) -> Tensor:
    """Token probabilities [..., keys] summed by block [..., m]."""
    return F.pad(probs, (0, -probs.shape[-1] % block_size)).unflatten(-1, (-1, block_size)).sum(dim=-1)


def recall_sums(mass: Tensor, kept: Tensor, local: Tensor, num_selected: int) -> dict[str, Tensor]:
    """Row values [g, rows] of the recall measures, for rows with more than `num_selected` visible blocks.

    mass [g, rows, m] full-softmax mass of each block, kept bool [g, rows, m], local [rows] id of the local block.
    """
    block = torch.arange(mass.shape[2], device=mass.device)
    # Invisible blocks rank last; equal masses go to the lower id. [g, rows, k]
    ranked = mass.masked_fill(block > local[:, None], -1.0).sort(dim=2, descending=True, stable=True)
    best = ranked.indices[:, :, :num_selected]
    best_mass = ranked.values[:, :, :num_selected]
    hit = kept.gather(2, best)
    # The local block is always drawn; each of the other `local` blocks with the same chance.
    chance = torch.where(best == local[:, None], 1.0, ((num_selected - 1) / local.to(mass.dtype))[:, None])
    return {
        "block_recall": hit.to(mass.dtype).mean(dim=2),
        "score_recall": (best_mass * hit).sum(dim=2) / best_mass.sum(dim=2),
        "captured_mass": (mass * kept).sum(dim=2),
        "random_block_recall": chance.mean(dim=2),
        "random_score_recall": (best_mass * chance).sum(dim=2) / best_mass.sum(dim=2),
    }


def support_sums(teacher: Tensor, student: Tensor, log_student: Tensor, support: Tensor, local: Tensor) -> dict:
    """Row values [g, rows] on the support: teacher, student and its log [g, rows, keys]; local bool [rows, keys]."""
    entropy_of_teacher = -torch.special.xlogy(teacher, teacher).sum(dim=2)
    return {
        "kl": -entropy_of_teacher - (teacher * log_student).sum(dim=2),
        "kl_uniform": support.sum(dim=2).clamp(min=1).to(teacher.dtype).log() - entropy_of_teacher,
        "entropy": -(student * log_student).sum(dim=2),
        "local_fraction": (student * local).sum(dim=2),
    }


@torch.no_grad()
def selection_quality_reference(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    block_indices: Tensor,
    segments: Segments,
    rows: Tensor,
    *,
    block_size: int,
    softmax_scale: float,
    support: str,
) -> SelectionQuality:
    """See `selection_quality`. Computed in fp64: the rows are few, and measures should not carry rounding."""
    device = query.device
    num_groups, num_selected = block_indices.shape[1:]
    total = SelectionQuality.zeros(num_groups, device)
    sampled = rows.to(device).sort().values
    for q_start, q_len, k_start, k_len in segments.rows:
        inside = sampled[(sampled >= q_start) & (sampled < q_start + q_len)]
        for chosen in inside.split(tiling.QUERY_TILE):
            if chosen.numel() == 0:
                continue
            keys = slice(k_start, k_start + k_len)
            position = chosen - q_start + k_len - q_len
            token = torch.arange(k_len, device=device)
            local = position // block_size
            visible = token <= position[:, None]
            # [g, rows, keys]
            kept = kept_tokens(block_indices[chosen], visible, block_size)
            mask = kept if support == "kept" else visible.expand_as(kept)
            # [g, n/g, rows, keys]
            scores = grouped_scores(query[chosen].double(), key[keys].double(), softmax_scale)
            teacher = masked_softmax(scores, mask[:, None])[0].mean(dim=1) * mask
            index_scores = index_query[chosen].double().transpose(0, 1) @ index_key[keys].double().T
            index_scores = index_scores / math.sqrt(index_query.shape[2])
            log_student = (index_scores + mask_floor(mask, torch.float64)).log_softmax(dim=2) * mask
            student = log_student.exp() * mask
            values = support_sums(teacher, student, log_student, mask, token // block_size == local[:, None])
            values["sink_fraction"] = student[:, :, :block_size].sum(dim=2)

            long_rows = local >= num_selected
            mass = block_mass(masked_softmax(scores, visible)[0].mean(dim=1), block_size)
            kept_blocks = block_mass(kept.double(), block_size) > 0
            values |= recall_sums(mass[:, long_rows], kept_blocks[:, long_rows], local[long_rows], num_selected)
            total = total + SelectionQuality(
                num_rows=chosen.numel(),
                num_long_rows=int(long_rows.sum()),
                **{name: value.sum(dim=1) for name, value in values.items()},
            )
    return total
