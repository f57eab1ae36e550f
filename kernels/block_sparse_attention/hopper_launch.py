"""Which calls take the Hopper kernels, and their launches. Gluon is imported only where they run."""

from typing import Any

import torch
from torch import Tensor

from ..hopper import describe, takes_hopper
from ..triton_support import next_power_of_two

SIZE = 128
"""Head dim and block size that the kernels do."""

FEWEST_HEADS = 5
"""Query heads per group below which half of the rows, at least eight a pair, would be empty."""


def takes_hopper_kernels(query: Tensor, num_groups: int, block_size: int) -> bool:
    """Whether the kernels do these shapes on this device; what they do not, the Triton kernels do."""
    heads = query.shape[1] // num_groups
    return takes_hopper(query) and query.shape[2] == block_size == SIZE and heads >= FEWEST_HEADS


def rows_per_pair(heads: int) -> int:
    """Rows of a pair in a tile."""
    return max(8, next_power_of_two(heads))


def describe_heads(tensor: Tensor, heads: int) -> Any:
    """[.., heads, SIZE] in boxes of half the elements of a pair. Past the last head TMA reads 0 and writes nothing."""
    return describe(tensor, [1, rows_per_pair(heads), SIZE // 2])


class HopperForward:
    """Launches hopper_fwd_kernel; query [t_q, n, SIZE], partial [queries, g, k, n/g, SIZE]."""

    def __init__(self, query: Tensor, partial: Tensor) -> None:
        self.heads = partial.shape[3]
        self.query, self.partial = (
            describe_heads(x, self.heads) for x in (query, partial.view(-1, *partial.shape[3:]))
        )

    def launch(
        self, max_items: int, key: Tensor, value: Tensor, tables: list[Tensor], results: tuple[Tensor, ...],
        numbers: tuple[int | float, ...], **sizes: int,
    ) -> None:  # fmt: skip
        """tables, results, numbers: as the kernel takes them."""
        from .hopper_forward_kernel import hopper_fwd_kernel

        hopper_fwd_kernel[(max_items,)](
            self.query, key, value, *tables, self.partial, *results, *numbers, *key.stride()[:2], *value.stride()[:2],
            **sizes, PLACES=rows_per_pair(self.heads), num_warps=4,
        )  # fmt: skip


class HopperBackward:
    """Launches hopper_bwd_kernel; query and grad [t_q, n, SIZE], partial [queries, g, k, n/g, SIZE]."""

    def __init__(self, query: Tensor, grad: Tensor, partial: Tensor) -> None:
        self.heads = partial.shape[3]
        tensors = (query, grad, partial.view(-1, *partial.shape[3:]))
        self.query, self.grad, self.partial = (describe_heads(tensor, self.heads) for tensor in tensors)
        self.infinity = torch.full((1,), float("inf"), device=query.device)

    def launch(
        self, max_items: int, blocks: tuple[Tensor, ...], rows: tuple[Tensor, ...], tables: list[Tensor],
        results: tuple[Tensor, ...], numbers: tuple[int | float, ...], **sizes: int,
    ) -> None:  # fmt: skip
        """blocks: key, centred key, value; rows: lse, delta, unit; the others as the kernel takes them."""
        from .hopper_backward_kernel import hopper_bwd_kernel

        key, _, value = blocks
        hopper_bwd_kernel[(max_items,)](
            self.query, *blocks, self.grad, *rows, self.infinity, *tables, self.partial, *results, *numbers,
            *key.stride()[:2], *value.stride()[:2], **sizes, PLACES=rows_per_pair(self.heads), num_warps=4,
        )  # fmt: skip
