"""Best-fit packing: whole documents in packs of at most `s` tokens, so that only documents longer than `s` are cut.

Documents are dealt with in shuffled buffers of an epoch, longest first, each into the fullest pack that has room for it
("best-fit decreasing"); what stays empty is padding. This is the packing of "Fewer Truncations Improve Language
Modeling" (arXiv 2404.10830, section 3) with the buffer in place of the whole corpus.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from .order import MAX_DOCUMENT_INDEX, epoch_generator

BUFFER_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class PackedOrder:
    """Packs as lists of document parts. Pack `i` is parts `starts[i]` to `starts[i + 1] - 1`."""

    documents: np.ndarray  # int32 [parts]
    offsets: np.ndarray  # int32 [parts]: first token of the part in its document
    lengths: np.ndarray  # int32 [parts]
    starts: np.ndarray  # int64 [packs + 1]
    num_dropped: int  # documents longer than a pack that were left out, over all epochs
    num_dropped_tokens: int


def best_fit_order(
    lengths: np.ndarray,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    drop_long: bool,
    buffer_documents: int = BUFFER_DOCUMENTS,
) -> PackedOrder:
    """At least `num_samples` packs from documents of `lengths` int32 [n], by whole epochs.

    A document longer than `seq_length` is cut into full packs and a rest that is packed like a document, or left out
    with `drop_long`. Pack `i` does not depend on `num_samples`. Raises ValueError when every document is left out.
    """
    parts: list[np.ndarray] = []  # [n, 3]: document, offset, length
    sizes: list[np.ndarray] = []  # parts of each pack
    num_packs = dropped = dropped_tokens = epoch = 0
    long = lengths > seq_length
    if drop_long and long.all():
        raise ValueError(
            f"every document is longer than seq_length ({seq_length}) and data.long_documents=drop leaves it out. "
            "Use data.long_documents=split or a larger seq_length."
        )
    while num_packs < num_samples:
        random = epoch_generator(seed, epoch)
        order = np.arange(lengths.size, dtype=np.int32)
        random.shuffle(order)
        if drop_long:
            order = order[~long[order]]
            dropped += int(long.sum())
            dropped_tokens += int(lengths[long].sum(dtype=np.int64))
        packs: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, order.size, buffer_documents):
            packs.append(_pack(_split(order[start : start + buffer_documents], lengths, seq_length), seq_length))
        own_parts = np.concatenate([part for part, _ in packs])
        own_sizes = np.concatenate([size for _, size in packs])
        shuffled = random.permutation(own_sizes.size)
        parts.append(own_parts[_gather(own_sizes, shuffled)])
        sizes.append(own_sizes[shuffled])
        num_packs += own_sizes.size
        epoch += 1
        if sum(len(part) for part in parts) > MAX_DOCUMENT_INDEX:
            raise ValueError(
                f"{lengths.size} documents in {epoch} epochs exceed the limit of {MAX_DOCUMENT_INDEX} parts of a "
                "source. Split the source or draw fewer samples."
            )
    everything = np.concatenate(parts)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(sizes), dtype=np.int64)))
    documents, offsets, part_lengths = (np.ascontiguousarray(column) for column in everything.T)
    return PackedOrder(documents, offsets, part_lengths, starts, dropped, dropped_tokens)


def _split(documents: np.ndarray, lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """int32 [parts, 3]: (document, offset, length), documents cut at multiples of `seq_length`."""
    counts = -(-lengths[documents].astype(np.int64) // seq_length)
    owner = np.repeat(np.arange(documents.size), counts)
    number = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * seq_length
    size = np.minimum(lengths[documents][owner] - offsets, seq_length)
    return np.stack((documents[owner], offsets, size), axis=1).astype(np.int32)


def _pack(parts: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(the parts in the order of their packs, number of parts of each pack)."""
    order = np.argsort(-parts[:, 2], kind="stable")
    pack_of = np.empty(order.size, dtype=np.int64)
    open_packs: dict[int, list[int]] = {}  # room -> packs with exactly that much
    rooms: list[int] = []  # the keys of `open_packs`, sorted
    num_packs = 0
    for place, length in enumerate(parts[order, 2].tolist()):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            pack, room = num_packs, capacity
            num_packs += 1
        else:
            room = rooms[at]
            same = open_packs[room]
            pack = same.pop()
            if not same:
                del open_packs[room], rooms[at]
        pack_of[place] = pack
        room -= length
        if room:
            if room not in open_packs:
                open_packs[room] = []
                bisect.insort(rooms, room)
            open_packs[room].append(pack)
    by_pack = np.argsort(pack_of, kind="stable")
    return parts[order[by_pack]], np.bincount(pack_of, minlength=num_packs)


def _gather(sizes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Indices of the parts of packs `chosen`, one pack after another."""
    starts = np.cumsum(sizes) - sizes
    counts = sizes[chosen]
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts[chosen], counts)
