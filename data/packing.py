"""Packed micro-batches: the samples of a micro-batch, one after another, as one row of tokens and its segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import Segments
from .dataset import Sample

PADDING = -1  # the document of positions in no segment


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of `t` = micro-batch size x sequence length tokens.

    A segment is one document's part of one sample; nothing may be computed across segments.
    """

    tokens: Tensor  # int64 [1, t]
    labels: Tensor  # int64 [1, t]
    loss_mask: Tensor  # float32 [1, t], 0 where the label is not the same document's next token
    segments: Segments
    positions: Tensor  # int64 [1, t], from 0 in each segment
    document_ids: (
        Tensor  # int64 [t], -1 for padding; with the position, a name for a row that does not depend on the packing
    )
    num_target_tokens: int  # the sum of loss_mask: the LM loss's denominator
    num_valid_rows: int  # tokens in a segment: the KL's denominator, without the factor of the KV groups

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """This batch with its tensors on `device`; segments are host integers and stay as they are."""
        names = ("tokens", "labels", "loss_mask", "positions", "document_ids")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names})


def collate(samples: Sequence[Sample]) -> PackedBatch:
    """Pack `samples` into one row. Example: segment lengths (2, 3) and (5,) of 5 tokens each give cu_seqlens 0 2 5 10.

    A sample's padding stays behind it, in no segment.
    """
    if not samples:
        raise ValueError("collate: there are no samples to pack. A micro-batch holds at least one.")
    rows, documents, lengths = [], [], []
    start = 0
    for sample in samples:
        end = start + sample.tokens.numel()
        for length in sample.segment_lengths:
            rows.append((start, length, start, length))
            start += length
        documents += [*sample.document_ids, PADDING]
        lengths += [*sample.segment_lengths, end - start]
        start = end
    loss_mask = torch.cat([sample.loss_mask for sample in samples])
    segments = Segments(rows=tuple(rows), num_queries=start, num_keys=start)
    return PackedBatch(
        tokens=torch.cat([sample.tokens for sample in samples])[None],
        labels=torch.cat([sample.labels for sample in samples])[None],
        loss_mask=loss_mask.float()[None],
        segments=segments,
        positions=segments.positions("cpu")[None],
        document_ids=torch.repeat_interleave(torch.tensor(documents), torch.tensor(lengths)),
        num_target_tokens=int(loss_mask.sum()),
        num_valid_rows=segments.num_valid_rows,
    )
