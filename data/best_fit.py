"""Best-fit packing: whole documents in packs of at most `s` tokens, so that only documents longer than `s` are cut.

Documents are dealt with in shuffled buffers of an epoch, longest first, each into the fullest pack that has room for it
("best-fit decreasing"); what stays empty is padding. This is the packing of "Fewer Truncations Improve Language
Modeling" (arXiv 2404.10830, section 3) with the buffer in place of the whole corpus.
"""

import bisect

import numpy as np

from .continuation import PackedOrder, Parts, Start, gather, packed, whole
from .order import check_entries, epoch_generator

BUFFER_DOCUMENTS = 1 << 16


def best_fit_order(
    lengths: np.ndarray,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    drop_long: bool,
    buffer_documents: int = BUFFER_DOCUMENTS,
    start: Start | None = None,
) -> PackedOrder:
    """At least `num_samples` packs from documents of `lengths` int32 [n], by whole epochs.

    A document longer than `seq_length` is cut into full packs and a rest that is packed like a document, or left out
    with `drop_long`. Pack `i` does not depend on `num_samples`. With `start` the first packs are made of its parts.
    Raises ValueError when every document is left out.
    """
    groups: list[Parts] = []
    sizes: list[np.ndarray] = []  # parts of each pack
    num_packs = dropped = dropped_tokens = 0
    num_epochs = start.num_epochs if start else 0
    if drop_long and (lengths > seq_length).all():
        raise ValueError(
            f"every document is longer than seq_length ({seq_length}) and data.long_documents=drop leaves it out. "
            "Use data.long_documents=split or a larger seq_length."
        )
    while True:
        if start and not groups:
            random = start.generator(seed)
            pieces = start.shuffled(random)
        else:
            random = epoch_generator(seed, num_epochs)
            documents = np.arange(lengths.size, dtype=np.int32)
            random.shuffle(documents)
            pieces = whole(documents, lengths)
            num_epochs += 1
        long = (pieces[:, 2] > seq_length) if drop_long else np.zeros(len(pieces), dtype=bool)
        left, pieces = pieces[long], pieces[~long]
        dropped += len(left)
        dropped_tokens += int(left[:, 2].sum(dtype=np.int64))
        packs = [
            _pack(_split(pieces[first : first + buffer_documents], seq_length), seq_length)
            for first in range(0, len(pieces), buffer_documents)
        ]
        own_parts = np.concatenate([part for part, _ in packs] or [pieces])
        own_sizes = np.concatenate([size for _, size in packs] or [np.zeros(0, dtype=np.int64)])
        shuffled = random.permutation(own_sizes.size)
        groups.append(own_parts[gather(own_sizes, shuffled)])
        sizes.append(own_sizes[shuffled])
        num_packs += own_sizes.size
        check_entries(sum(map(len, groups)), lengths.size, num_epochs)
        if num_packs >= num_samples:
            return packed(groups, sizes, left, num_epochs, dropped, dropped_tokens)


def _split(pieces: Parts, seq_length: int) -> Parts:
    """Pieces cut at multiples of `seq_length` from their own beginnings."""
    counts = -(-pieces[:, 2].astype(np.int64) // seq_length)
    owner = np.repeat(np.arange(len(pieces)), counts)
    number = np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.minimum(pieces[owner, 2] - number * seq_length, seq_length)
    return np.stack((pieces[owner, 0], pieces[owner, 1] + number * seq_length, size), axis=1).astype(np.int32)


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
