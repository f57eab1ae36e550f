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

    def share(self, rank: int, size: int) -> "PackedBatch":
        """What rank `rank` of `size` context-parallel ones computes: chunks `rank` and `2 size - 1 - rank` of 2 size.

        Its queries are fragments of documents; key rows stay those of the whole batch, which is gathered.
        Example: one document of 8 tokens, rank 0 of 2 has tokens 0, 1 (keys 0..1) and 6, 7 (keys 0..7).
        """
        if size == 1:
            return self
        num_tokens = self.tokens.numel()
        if num_tokens % (2 * size):
            raise ValueError(
                f"PackedBatch: {num_tokens} tokens do not split into 2 x {size} chunks. Make "
                "training.micro_batch_size x training.seq_length a multiple of 2 x parallel.context."
            )
        chunk = num_tokens // (2 * size)
        fragments = []
        for number, first in enumerate((rank * chunk, (2 * size - 1 - rank) * chunk)):
            for q_start, q_len, k_start, k_len in self.segments.rows:
                start, end = max(first, q_start), min(first + chunk, q_start + q_len)
                if start < end:
                    num_keys = k_len - (q_start + q_len - end)
                    fragments.append((number * chunk + start - first, end - start, k_start, num_keys))
        segments = Segments(tuple(fragments), 2 * chunk, self.segments.num_keys)
        names = ("tokens", "labels", "loss_mask", "positions", "document_ids")
        by_chunk = {name: own_chunks(getattr(self, name), rank, size) for name in names}
        return replace(
            self,
            segments=segments,
            num_target_tokens=int(by_chunk["loss_mask"].sum()),
            num_valid_rows=segments.num_valid_rows,
            **by_chunk,
        )


def own_chunks(values: Tensor, rank: int, size: int) -> Tensor:
    """values [..., t] -> [..., t / size]: chunks `rank` and `2 size - 1 - rank` of 2 size equal ones."""
    if size == 1:
        return values
    return values.unflatten(-1, (2 * size, -1))[..., [rank, 2 * size - 1 - rank], :].flatten(-2)


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
