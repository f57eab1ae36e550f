"""Context parallelism: the ranks of a group share the tokens of a micro-batch and gather each other's keys.

Each rank has two of the 2 c equal chunks of the packed tokens, one from either end, so that all see about as many keys
(`PackedBatch.share` in data/packing.py). Queries stay where they are; keys, values and the one index key of a token are
gathered, which GQA keeps small, and their gradients are summed over the ranks on the way back.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


def gather_rows(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [t / c, ...] of one dtype, a rank's rows -> [t, ...], all rows in the order of the packed tokens."""
    size = group.size()
    if size == 1:
        return tensors
    widths = [tensor[0].numel() for tensor in tensors]
    # one message for all of them
    rows = gather_from_sequence_parallel_region(torch.cat([x.flatten(1) for x in tensors], dim=1), group=group)
    # rank by rank: chunks 0, 2c - 1, 1, 2c - 2, ...
    chunks = rows.unflatten(0, (size, 2, -1))
    rows = torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)
    parts = rows.split(widths, dim=1)
    return tuple(part.unflatten(1, x.shape[1:]) for part, x in zip(parts, tensors, strict=True))
