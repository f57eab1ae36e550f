"""Launch of the Hopper kernel that leaves the teacher P in memory; Gluon is imported only where it runs."""

import torch
from torch import Tensor

from ..hopper import describe, takes_hopper
from ..segments import Segments
from ..work_tables import query_tiles
from .dense_launch import HEADS_PER_GROUP

HEAD_DIM = 128
ROWS = 64
"""Query rows of a program."""
KEYS = 256
"""Keys of a tile: P has whole tiles of columns."""
KEY_BOX = 128
"""Keys of a tile that one copy brings."""
SPANS = (8, 4, 2, 1)
"""Tiles of one program: the first span that gives PROGRAMS, so that the GPU's multiprocessors finish together."""
PROGRAMS = 640


def takes_hopper_teacher(query: Tensor, index_query: Tensor) -> bool:
    """Whether the kernel makes P of these queries on this device; where not, dense_kernel.py's make it themselves."""
    heads = query.shape[1] // index_query.shape[1]
    return takes_hopper(query, index_query) and query.shape[2] == HEAD_DIM and heads in HEADS_PER_GROUP


def build_items(segments: Segments, num_groups: int) -> Tensor:
    """int64 [items, 5]: first query row, rows, key row of position 0, first tile of keys, tiles; longest rows first.

    Example: one document of 300 tokens in 5 tiles of rows; those of positions 256 and more see two tiles of keys, which
    two items share when there are so few: [[256, 44, 0, 0, 1], [256, 44, 0, 1, 1], [192, 64, 0, 0, 1], ...].
    """
    tiles = query_tiles(segments, "cpu", rows=ROWS)
    sizes = (tiles[:, 1] + tiles[:, 2] + KEYS - 1) // KEYS
    for span in SPANS:
        parts = (sizes + span - 1) // span
        if int(parts.sum()) * num_groups >= PROGRAMS:
            break
    owner = torch.repeat_interleave(parts)
    first = (torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]) * span
    rows = tiles[owner]
    return torch.stack([rows[:, 0], rows[:, 1], rows[:, 3], first, (sizes[owner] - first).clamp(max=span)], dim=1)


class HopperTeacher:
    """Makes P of query, key and lse for the fragments of a chunk (`Segments` of the same tensors)."""

    def __init__(self, query: Tensor, key: Tensor, lse: Tensor, softmax_scale: float) -> None:
        self.num_heads, self.num_groups = query.shape[1], key.shape[1]
        # rows of all heads, of which a copy takes those of one
        self.query = describe(query.flatten(1), [ROWS, HEAD_DIM])
        self.key = describe(key.flatten(1), [KEY_BOX, HEAD_DIM])
        self.lse, self.scale = lse.float().contiguous(), softmax_scale

    def __call__(self, chunk: Segments, first_row: int, probs: Tensor) -> None:
        """Write probs fp32 [rows from first_row on, g, columns of whole tiles]: P at the key's position.

        Keys that a row does not see have anything, NaN included, as have rows in no document.
        """
        from .hopper_teacher_kernel import hopper_teacher_kernel

        items = chunk.cached(
            f"teacher_items_{self.num_groups}", self.lse.device, lambda: build_items(chunk, self.num_groups)
        )
        hopper_teacher_kernel[(len(items) * self.num_groups,)](
            self.query,
            self.key,
            self.lse,
            items,
            probs,
            first_row,
            self.scale,
            self.lse.stride(0),
            *probs.stride()[:2],
            NUM_GROUPS=self.num_groups,
            HEADS=self.num_heads // self.num_groups,
            num_warps=4,
        )
