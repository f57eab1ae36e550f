"""Context parallelism: the ranks of a group share the tokens of a micro-batch and gather each other's keys.

Each rank has two of the 2 c equal chunks of the packed tokens, one from either end, so that all see about as many keys
(`own_chunks` in data/packing.py). Queries stay where they are; keys, values and the one index key of a token are
gathered, which GQA keeps small, and their gradients are summed over the ranks on the way back.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GatheredRows:
    """Tensors [t / c, ...] of one dtype, a rank's rows, on their way to all ranks: `wait` gives all rows [t, ...].

    One message carries all of the tensors. It runs beside what is computed before `wait`, and that of the gradients
    beside what the backward pass computes in between: the later `wait` is called, the more of either is hidden. Ranks
    must start their messages in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, *tensors: Tensor) -> None:
        self._tensors, self._size = tensors, group.size()
        if self._size > 1:
            self._message = _Message(group)
            rows = torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)
            self._sent = _Send.apply(rows, self._message)

    def wait(self) -> tuple[Tensor, ...]:
        """All ranks' rows, in the order of the packed tokens."""
        if self._size == 1:
            return self._tensors
        rows = _Arrive.apply(self._sent, self._message)
        # rank by rank: chunks 0, 2c - 1, 1, 2c - 2, ...
        chunks = rows.unflatten(0, (self._size, 2, -1))
        rows = torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)
        parts = rows.split([tensor[0].numel() for tensor in self._tensors], dim=1)
        return tuple(part.unflatten(1, x.shape[1:]) for part, x in zip(parts, self._tensors, strict=True))


@dataclass
class _Message:
    """What the two ends of a message know of each other: where it arrives, and the one that is under way."""

    group: dist.ProcessGroup
    arriving: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


class _Send(torch.autograd.Function):
    """rows [t / c, w], unchanged, with an all-gather of them started; backward awaits the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        message.arriving = rows.new_empty(message.group.size() * len(rows), rows.shape[1])
        message.work = dist.all_gather_into_tensor(message.arriving, rows, group=message.group, async_op=True)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.message.wait()
        return grad, None


class _Arrive(torch.autograd.Function):
    """The rows that `_Send` sent -> all ranks' [t, w]; backward starts the reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        message.wait()
        rows, message.arriving = message.arriving, None
        assert rows is not None
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.message.group
        # not to be read before `_Send`'s backward, the only node that gets it, has waited
        total = grad.new_empty(len(grad) // group.size(), grad.shape[1])
        ctx.message.work = dist.reduce_scatter_tensor(total, grad.contiguous(), group=group, async_op=True)
        return total, None
