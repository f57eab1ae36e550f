"""A source that goes on with another sequence length: first what its epoch has not given yet, then whole epochs.

Samples are shuffled, so what is left of an epoch is scattered over its documents. It is gathered into the longest
stretches that nothing was read of, and cut or packed anew: no token of an epoch is read twice or left out.
"""

from dataclasses import dataclass

import numpy as np

from .order import ConcatOrder, check_entries, epoch_generator

Parts = np.ndarray  # int32 [n, 3]: document, first token of the part in it, length


@dataclass(frozen=True)
class PackedOrder:
    """Samples as lists of document parts. Sample `i` is parts `starts[i]` to `starts[i + 1] - 1`."""

    documents: np.ndarray  # int32 [parts]
    offsets: np.ndarray  # int32 [parts]: first token of the part in its document
    lengths: np.ndarray  # int32 [parts]
    starts: np.ndarray  # int64 [samples + 1]
    left: Parts  # in no sample, though their epoch has begun
    num_epochs: int  # begun, those before this order included
    num_dropped: int  # documents longer than a sample that were left out, over all epochs
    num_dropped_tokens: int


@dataclass(frozen=True)
class Start:
    """Where a source goes on."""

    parts: Parts  # unread ones of the epochs begun
    num_epochs: int  # begun
    stage: int  # how often the source has gone on, this time included

    def shuffled(self, random: np.random.RandomState) -> Parts:
        return self.parts[random.permutation(len(self.parts))]

    def generator(self, seed: int) -> np.random.RandomState:
        """The random numbers of what is left of an epoch."""
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, self.num_epochs, self.stage])))


def unread(order: ConcatOrder | PackedOrder, lengths: np.ndarray, num_samples: int) -> Parts:
    """What the epochs that `order` has begun hold beyond its first `num_samples` samples, sorted by document.

    `order` must have been built for just so many samples. lengths: int32 [n], of the source's documents.
    """
    if isinstance(order, ConcatOrder):
        rows = order.shuffle[num_samples:].astype(np.int64)
        # behind the last sample comes a tail that is shorter than one
        first = np.concatenate((order.starts[rows], order.starts[-1:])).astype(np.int64)
        last = np.concatenate((order.starts[rows + 1], [[order.documents.size, 0]])).astype(np.int64)
        counts = last[:, 0] - first[:, 0] + 1
        owner, number = np.repeat(np.arange(counts.size), counts), _counted(counts)
        position = first[owner, 0] + number
        documents = order.documents[np.minimum(position, order.documents.size - 1)]
        begin = np.where(number == 0, first[owner, 1], 0)
        end = np.where(number == counts[owner] - 1, last[owner, 1], lengths[documents])
        parts = np.stack((documents, begin, end - begin), axis=1).astype(np.int32)
        return merged(parts[parts[:, 2] > 0])
    rest = slice(int(order.starts[num_samples]), None)
    parts = np.stack((order.documents[rest], order.offsets[rest], order.lengths[rest]), axis=1)
    return merged(np.concatenate((parts, order.left)))


def merged(parts: Parts) -> Parts:
    """The parts by document and place, those joined where one goes on in the next."""
    parts = parts[np.lexsort((parts[:, 1], parts[:, 0]))]
    joins = (parts[1:, 0] == parts[:-1, 0]) & (parts[1:, 1] == parts[:-1, 1] + parts[:-1, 2])
    begins = np.flatnonzero(np.concatenate(([True], ~joins))) if len(parts) else np.zeros(0, dtype=np.int64)
    joined = parts[begins].copy()
    joined[:, 2] = np.add.reduceat(parts[:, 2], begins) if len(parts) else 0
    return joined


def concat_onward(lengths: np.ndarray, start: Start, *, num_samples: int, seq_length: int, seed: int) -> PackedOrder:
    """At least `num_samples` samples of `seq_length` tokens: the parts of `start` laid end to end, then whole epochs.

    As in `concat_order`, samples are shuffled among those that the same epoch completes, and sample `i` does not depend
    on `num_samples`.
    """
    random, num_epochs = start.generator(seed), start.num_epochs
    stream = start.shuffled(random)
    groups: list[Parts] = []
    sizes: list[np.ndarray] = []
    done = 0
    while True:
        parts, own = cut(stream, seq_length)
        num_full = int(stream[:, 2].sum(dtype=np.int64)) // seq_length
        shuffled = random.permutation(num_full)
        groups.append(parts[gather(own, shuffled)])
        sizes.append(own[shuffled])
        left = parts[int(own[:num_full].sum()) :]
        done += num_full
        check_entries(sum(map(len, groups)), lengths.size, num_epochs)
        if done >= num_samples:
            return packed(groups, sizes, left, num_epochs)
        random = epoch_generator(seed, num_epochs)
        documents = np.arange(lengths.size, dtype=np.int32)
        random.shuffle(documents)
        stream, num_epochs = np.concatenate((left, whole(documents, lengths))), num_epochs + 1


def cut(stream: Parts, seq_length: int) -> tuple[Parts, np.ndarray]:
    """(parts of a stream cut at every `seq_length` tokens, number of parts of each sample, the last may be short)."""
    ends = np.cumsum(stream[:, 2], dtype=np.int64)
    total = int(ends[-1]) if len(stream) else 0
    begins = np.union1d(ends - stream[:, 2], np.arange(0, total, seq_length))
    owner = np.searchsorted(ends, begins, side="right")
    parts = stream[owner]
    parts[:, 1] += (begins - (ends - stream[:, 2])[owner]).astype(np.int32)
    parts[:, 2] = np.diff(begins, append=total)
    return parts, np.bincount(begins // seq_length)


def whole(documents: np.ndarray, lengths: np.ndarray) -> Parts:
    return np.stack((documents, np.zeros_like(documents), lengths[documents]), axis=1)


def packed(
    groups: list[Parts], sizes: list[np.ndarray], left: Parts, num_epochs: int, num_dropped: int = 0, tokens: int = 0
) -> PackedOrder:
    """Of samples in their order, whose numbers of parts are `sizes`."""
    documents, offsets, lengths = (np.ascontiguousarray(column) for column in np.concatenate(groups).T)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(sizes), dtype=np.int64)))
    return PackedOrder(documents, offsets, lengths, starts, left, num_epochs, num_dropped, tokens)


def gather(sizes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Indices of the parts of samples `chosen`, one sample after another."""
    starts = np.cumsum(sizes) - sizes
    counts = sizes[chosen]
    return np.repeat(starts[chosen], counts) + _counted(counts)


def _counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., count - 1 for each count, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)
