"""Launch of the Hopper kernel of the full-sequence KL's value and score gradient; Gluon is imported where it runs."""

import heapq
import math

import torch
from torch import Tensor

from ..hopper import describe, takes_hopper
from ..segments import Segments
from ..work_tables import query_tiles
from .dense_launch import HEADS_PER_GROUP, difference_scale, in_two

DIM = 128
"""Head dim and index dim."""
ROWS = 64
"""Query rows of a program."""
KEYS = 256
"""Keys of a tile: D has whole tiles of columns."""
KEY_BOX = 128
"""Keys of a tile that one copy brings."""
LONGEST_SPAN = 8
"""Most tiles of one program: queries come once for all of them."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200; each runs one program."""
START = 4
"""What a program costs before its first tile, in products of 64 x 256 scores (measured: 4 us, a product 1.1)."""


def takes_hopper_dense(query: Tensor, index_query: Tensor) -> bool:
    """Whether the kernel takes these queries on this device; what it does not, the kernels of dense_kernel.py do."""
    heads = query.shape[1] // index_query.shape[1]
    is_known = query.shape[2] == index_query.shape[2] == DIM and heads in HEADS_PER_GROUP
    return is_known and query.dtype == index_query.dtype and takes_hopper(query)


def makespan(sizes: list[int], num_groups: int, products: int) -> int:
    """When the last program ends, one of each group for items of so many tiles taken in this order."""
    ends = [0] * PROCESSORS
    for size in sizes:
        for _ in range(num_groups):
            heapq.heapreplace(ends, ends[0] + START + size * products)
    return max(ends)


def split(sizes: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, first tile and tiles of the items of `span` tiles at most, largest first."""
    parts = (sizes + span - 1) // span
    owner = torch.repeat_interleave(parts)
    first = (torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]) * span
    counts = (sizes[owner] - first).clamp(max=span)
    order = counts.argsort(descending=True, stable=True)
    return owner[order], first[order], counts[order]


def build_items(segments: Segments, num_groups: int, products: int, first_key: int, num_keys: int) -> Tensor:
    """int64 [items, 6]: first query row, rows, position of the first, key row of position 0, first tile of keys, tiles.

    For keys at positions `first_key` (whole tiles) to `first_key + num_keys`, in spans of tiles that let the GPU's
    multiprocessors finish together; products: of a tile, one for each head and the student's.

    Example: one document of 300 tokens in 5 tiles of rows; those of positions 256 and more see two tiles of keys, which
    two items share when there are so few: [[256, 44, 256, 0, 0, 1], [256, 44, 256, 0, 1, 1], [192, 64, 192, 0, 0, 1],
    ...].
    """
    rows = query_tiles(segments, "cpu", rows=ROWS)
    ends = (rows[:, 1] + rows[:, 2]).clamp(max=first_key + num_keys)
    sizes = (ends - first_key + KEYS - 1).div(KEYS, rounding_mode="floor").clamp(min=0)
    best = split(sizes, LONGEST_SPAN)
    if len(best[0]) * num_groups < LONGEST_SPAN * PROCESSORS:
        items = [split(sizes, span) for span in range(1, LONGEST_SPAN + 1)]
        best = min(items, key=lambda item: makespan(item[2].tolist(), num_groups, products))
    owner, first, counts = best
    return torch.cat([rows[owner], torch.stack([first_key // KEYS + first, counts], dim=1)], dim=1)


def dense_items(
    segments: Segments, num_heads: int, num_groups: int, first_key: int, num_keys: int, device: torch.device
) -> Tensor:
    """`build_items` on the device, built once."""
    return segments.cached(
        f"dense_items_{num_heads}_{num_groups}_{first_key}_{num_keys}",
        device,
        lambda: build_items(segments, num_groups, num_heads // num_groups + 1, first_key, num_keys),
    )


class HopperDense:
    """Makes value and score gradient for the fragments of a chunk (`Segments` of the same tensors).

    Inputs as `dense_indexer_kl`; index_lse fp32 [t_q, g] of the student over all visible tokens; weight fp32 [t_q, g].
    """

    def __init__(
        self,
        index_query: Tensor,
        index_key: Tensor,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        index_lse: Tensor,
        weight: Tensor,
        softmax_scale: float,
    ) -> None:
        self.num_heads, self.num_groups = query.shape[1], key.shape[1]
        # rows of all heads or groups, of which a copy takes those of one
        self.tensors = (
            describe(query.flatten(1), [ROWS, DIM]),
            describe(key.flatten(1), [KEY_BOX, DIM]),
            describe(index_query.flatten(1), [ROWS, DIM]),
            describe(index_key, [KEY_BOX, DIM]),
        )
        self.rows = (lse.float().contiguous(), index_lse.contiguous(), weight.contiguous())
        self.scales = (softmax_scale, *in_two(DIM**-0.5 / math.log(2)))
        self.lift = difference_scale(index_query.dtype)

    def __call__(self, chunk: Segments, first_row: int, first_key: int, difference: Tensor) -> Tensor:
        """Write D = P_idx - P, times FP16_SCALE in fp16, to difference [rows from first_row, g, keys from first_key].

        It has whole tiles of columns. Keys that a row does not see get 0 up to the next multiple of 8 positions, and
        beyond anything, NaN included, as have rows in no document. Returns parts of the sum of weight x KL, fp32.
        """
        from .hopper_dense_kernel import PARTS, hopper_dense_kernel

        items = dense_items(chunk, self.num_heads, self.num_groups, first_key, difference.shape[2], difference.device)
        programs = len(items) * self.num_groups
        value = torch.empty((programs, PARTS.value), dtype=torch.float32, device=difference.device)
        hopper_dense_kernel[(programs,)](
            *self.tensors,
            *self.rows,
            items,
            difference,
            value,
            first_row,
            first_key,
            *self.scales,
            self.rows[0].stride(0),
            *difference.stride()[:2],
            NUM_GROUPS=self.num_groups,
            HEADS=self.num_heads // self.num_groups,
            DIFFERENCE_SCALE=self.lift,
            num_warps=4,
        )
        return value
