"""Samples of `s` tokens, packed from indexed documents and blended from several sources, document borders kept.

`concat`: `s` consecutive tokens of the shuffled documents; a document that is cut at a sample border goes on in another
sample, where it starts a new segment at position 0. `best_fit`: whole documents, and padding where none fits any more
(`best_fit.py`). In both, the label of a document's last token (its EOD) is masked.

The sequence length may grow during a run; a source then goes on with what its epoch has left (`continuation.py`).

Sample `i` depends on the blends and the sequence lengths up to it, `seed`, the packing and the data, and on nothing
else: not on the length of the run, the number of ranks, the micro-batch or the batch size.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .best_fit import best_fit_order
from .cache import Arrays, cached
from .combine import require_one_vocabulary
from .continuation import PackedOrder, Start, concat_onward, unread
from .indexed import IndexedDataset, Manifest, open_indexed_dataset
from .order import (
    MAX_SOURCES,
    ConcatOrder,
    LongDocuments,
    Packing,
    Stage,
    blend_order,
    concat_order,
    epochs_for,
    source_names,
)

ORDER_VERSION = 2  # raised when the same arguments give another order, so that no old cache entry is taken for it


@dataclass(frozen=True)
class Sample:
    """One row of `s` tokens and the documents it is made of; a segment is one document's part of the row."""

    tokens: Tensor  # int64 [s]
    labels: Tensor  # int64 [s], the next token
    loss_mask: Tensor  # bool [s], False where the next token is not the same document's
    segment_lengths: tuple[int, ...]  # what is missing to s is padding behind the last segment
    document_ids: tuple[int, ...]  # of each segment, unique over all sources of the run


@dataclass(frozen=True)
class SourceUse:
    """What a run draws from one source."""

    prefix: str
    num_samples: int
    num_tokens: int  # without padding
    share: float  # of the run's tokens
    num_epochs: float
    padding: float  # share of the positions of its samples
    num_dropped: int  # documents that were left out because they are longer than a sample, each epoch counted


class ConcatSource:
    """Consecutive tokens of one source's shuffled documents."""

    def __init__(self, dataset: IndexedDataset, order: ConcatOrder, seq_length: int, first_document: int) -> None:
        self.dataset, self.order = dataset, order
        self._seq_length, self._first_document = seq_length, first_document

    def __getitem__(self, index: int) -> Sample:
        row = int(self.order.shuffle[index])
        (first, first_offset), (last, last_offset) = self.order.starts[row : row + 2].tolist()
        parts, documents = [], self.order.documents[first : last + 1].tolist()
        for position, document in zip(range(first, last + 1), documents, strict=True):
            start = first_offset if position == first else 0
            # The sample ends with the token at `last_offset`, which is also the first token of the next sample.
            length = last_offset + 1 - start if position == last else None
            parts.append(self.dataset.get(document, start, length))
        lengths = [part.size for part in parts]
        masked = [border - 1 for border in itertools.accumulate(lengths[:-1])]
        lengths[-1] -= 1  # the last token is a label only
        if not lengths[-1]:
            lengths.pop()
        text = np.concatenate(parts).astype(np.int64)
        return _sample(text[:-1], text[1:], masked, lengths, documents, self._first_document)

    def use(self, num_samples: int) -> dict[str, float]:
        tokens = num_samples * self._seq_length
        return {"num_tokens": tokens, "num_epochs": tokens / self.dataset.manifest.num_tokens, "num_dropped": 0}


class PackedSource:
    """Samples that are lists of parts of one source's documents, filled up with its EOD."""

    def __init__(self, dataset: IndexedDataset, order: PackedOrder, seq_length: int, first_document: int) -> None:
        self.dataset, self.order = dataset, order
        self._seq_length, self._first_document = seq_length, first_document

    def __getitem__(self, index: int) -> Sample:
        order, eod = self.order, self.dataset.manifest.eod_id
        parts = slice(*order.starts[index : index + 2].tolist())
        documents, lengths = order.documents[parts].tolist(), order.lengths[parts].tolist()
        tokens = np.full(self._seq_length, eod, dtype=np.int64)
        labels = tokens.copy()
        masked, start = [], 0
        for document, offset, length in zip(documents, order.offsets[parts].tolist(), lengths, strict=True):
            follows = offset + length < self.dataset.lengths[document]  # a cut document: the label is its next token
            text = self.dataset.get(document, offset, length + int(follows))
            tokens[start : start + length] = text[:length]
            labels[start : start + text.size - 1] = text[1:]
            start += length
            if not follows:
                masked.append(start - 1)
        masked += range(start, self._seq_length)
        return _sample(tokens, labels, masked, lengths, documents, self._first_document)

    def use(self, num_samples: int) -> dict[str, float]:
        order = self.order
        tokens = int(order.lengths[: order.starts[num_samples]].sum(dtype=np.int64))
        used = num_samples / max(1, order.starts.size - 1)
        per_epoch = self.dataset.manifest.num_tokens
        return {
            "num_tokens": tokens,
            "num_epochs": (tokens + used * order.num_dropped_tokens) / per_epoch,
            "num_dropped": order.num_dropped,
        }


def _sample(
    tokens: np.ndarray, labels: np.ndarray, masked: list[int], lengths: list[int], documents: list[int], first: int
) -> Sample:
    loss_mask = torch.ones(tokens.size, dtype=torch.bool)
    loss_mask[masked] = False
    return Sample(
        tokens=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels=torch.from_numpy(np.ascontiguousarray(labels)),
        loss_mask=loss_mask,
        segment_lengths=tuple(lengths),
        document_ids=tuple(first + document for document in documents[: len(lengths)]),
    )


Source = ConcatSource | PackedSource


class BlendedDataset(Dataset[Sample]):
    """The samples of a run, in their order over all sources and sequence lengths."""

    def __init__(
        self,
        manifests: dict[str, Manifest],
        lengths: Sequence[tuple[int, int]],
        sources: Sequence[dict[str, Source]],
        source_of: np.ndarray,
        sample_of: np.ndarray,
        stages: Sequence[Stage],
    ) -> None:
        """lengths: (first sample, sequence length). sources: for each length, those that give samples of it."""
        self.manifests, self.lengths, self.stages = manifests, tuple(lengths), tuple(stages)
        self._sources, self._names = tuple(sources), list(manifests)
        self._source_of, self._sample_of = source_of, sample_of
        self._starts = [start for start, _ in lengths]

    def __len__(self) -> int:
        return len(self._source_of)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sources = self._sources[bisect.bisect_right(self._starts, index) - 1]
        return sources[self._names[self._source_of[index]]][int(self._sample_of[index])]

    def positions(self, num_samples: int) -> int:
        """Tokens of the first `num_samples` samples, padding included."""
        ends = [*self._starts[1:], max(len(self), num_samples)]
        return sum(
            max(0, min(end, num_samples) - start) * size for (start, size), end in zip(self.lengths, ends, strict=True)
        )

    def consumed(self, num_samples: int, first: int = 0) -> dict[str, int]:
        """Samples of each source from sample `first` of the run to before `num_samples`."""
        counts = np.zeros(len(self._names), dtype=np.int64)
        for start in range(first, num_samples, 1 << 24):
            counts += np.bincount(self._source_of[start : min(num_samples, start + (1 << 24))], minlength=counts.size)
        return dict(zip(self._names, counts.tolist(), strict=True))

    def uses(self, stage: int | None = None) -> list[SourceUse]:
        """What the whole run, or its part of one sequence length, draws from each source; to be shown before step 1."""
        ends = [*self._starts[1:], len(self)]
        chosen = range(len(ends)) if stage is None else [stage]
        drawn, found = dict.fromkeys(self._names, 0), {name: [0.0, 0.0, 0.0, 0.0] for name in self._names}
        for number in chosen:
            start, size = self.lengths[number]
            for name, count in self.consumed(ends[number], start).items():
                if count:
                    use = self._sources[number][name].use(count)
                    more = (use["num_tokens"], use["num_epochs"], use["num_dropped"], count * size)
                    found[name] = [total + part for total, part in zip(found[name], more, strict=True)]
                    drawn[name] += count
        total = sum(numbers[0] for numbers in found.values())
        return [
            SourceUse(
                prefix=name,
                num_samples=drawn[name],
                num_tokens=int(tokens),
                share=tokens / total,
                num_epochs=epochs,
                padding=1 - tokens / max(1, positions),
                num_dropped=int(dropped),
            )
            for name, (tokens, epochs, dropped, positions) in found.items()
        ]


def build_dataset(
    stages: Sequence[tuple[int, dict[str, float]]],
    *,
    num_samples: int,
    seq_length: int | Sequence[tuple[int, int]],
    seed: int,
    cache_dir: Path,
    packing: Packing = Packing.concat,
    long_documents: LongDocuments = LongDocuments.split,
) -> BlendedDataset:
    """Exactly `num_samples` samples of `seq_length` tokens, drawn from indexed datasets.

    stages: (first sample, {path prefix: weight}), from sample 0 on. Weights are shares of samples whatever the sizes of
    the sources, and need not sum to 1; a source that is too small for its share is read again in a new order
    (`BlendedDataset.uses` says how often).
    seq_length: one for all samples, or (first sample, sequence length), from sample 0 on.
    cache_dir: where the orders are kept (`cache.py`); with torch.distributed initialised, all ranks must call this
    together.

    Every check reads the same files on every rank, so that all ranks raise or none does.
    """
    lengths = [(0, seq_length)] if isinstance(seq_length, int) else [(start, size) for start, size in seq_length]
    if num_samples < 1 or min(size for _, size in lengths) < 1:
        raise ValueError(f"num_samples ({num_samples}) and seq_length ({seq_length}) must be at least 1.")
    lengths = [(start, size) for start, size in lengths if start < num_samples]
    plan = _stages(stages)
    opened = {prefix: open_indexed_dataset(Path(prefix)) for prefix in source_names(plan)}
    manifests = {prefix: manifest for prefix, (_, manifest) in opened.items()}
    require_one_vocabulary(manifests)
    names, borders = list(manifests), [start for start, _ in lengths] + [num_samples]
    numbered = [[stage.start, [[names.index(name), share] for name, share in stage.shares.items()]] for stage in plan]
    blend = _cached(
        cache_dir,
        {"blend": numbered, "borders": borders},
        lambda: _blend_arrays(plan, borders, names),
    )
    first_documents = dict(
        zip(names, itertools.accumulate((m.num_documents for m in manifests.values()), initial=0), strict=False)
    )
    past: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    sources: list[dict[str, Source]] = []
    for (start, size), end in zip(lengths, borders[1:], strict=True):
        counts = np.bincount(blend["source"][start:end], minlength=len(names)).tolist()
        own: dict[str, Source] = {}
        for name, count in zip(names, counts, strict=True):
            if count:
                past[name].append((size, count))
                order = _order(*opened[name], past[name], seed, cache_dir, packing, long_documents)
                kind = ConcatSource if isinstance(order, ConcatOrder) else PackedSource
                own[name] = kind(opened[name][0], order, size, first_documents[name])  # type: ignore[arg-type]
        sources.append(own)
    return BlendedDataset(manifests, lengths, sources, blend["source"], blend["sample"], plan)


def _blend_arrays(plan: Sequence[Stage], borders: Sequence[int], names: Sequence[str]) -> Arrays:
    """The blend, in which the samples of a source are counted anew behind each border."""
    parts = []
    for start, end in itertools.pairwise(borders):
        last = max(number for number, stage in enumerate(plan) if stage.start <= start)
        own = [Stage(max(0, stage.start - start), stage.shares) for stage in plan[last:]]
        parts.append(blend_order(own, end - start, names))
    source, sample = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"source": source, "sample": sample}


def _order(
    dataset: IndexedDataset,
    manifest: Manifest,
    past: Sequence[tuple[int, int]],
    seed: int,
    cache_dir: Path,
    packing: Packing,
    long_documents: LongDocuments,
) -> ConcatOrder | PackedOrder:
    """Of the last of `past`, the (sequence length, samples) that the run draws from a source one after another."""
    *before, (seq_length, num_samples) = past
    if manifest.num_tokens < seq_length + 1:
        raise ValueError(
            f"{dataset.prefix} holds {manifest.num_tokens} tokens, fewer than the {seq_length + 1} of one sample "
            f"(seq_length {seq_length}, and one for the last label). Use more data or a smaller seq_length."
        )
    arguments: dict[str, Any] = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
    key = {**arguments, "fingerprint": manifest.fingerprint, "packing": packing.name}
    if packing is Packing.best_fit:
        arguments["drop_long"] = key["drop_long"] = long_documents is LongDocuments.drop
    if before:
        key["past"] = before
        earlier = _order(dataset, manifest, before, seed, cache_dir, packing, long_documents)

        def onward() -> Arrays:
            if isinstance(earlier, ConcatOrder):
                num_epochs = earlier.documents.size // manifest.num_documents
            else:
                num_epochs = earlier.num_epochs
            start = Start(unread(earlier, dataset.lengths, before[-1][1]), num_epochs, len(before))
            build = concat_onward if packing is Packing.concat else best_fit_order
            return _packed_arrays(build(dataset.lengths, start=start, **arguments))

        return _packed_order(_cached(cache_dir, key, onward))
    if packing is Packing.concat:
        # one entry for all lengths of a run that need as many epochs
        del key["num_samples"]
        key["num_epochs"] = epochs_for(manifest.num_tokens, num_samples, seq_length)
        return ConcatOrder(**_cached(cache_dir, key, lambda: dict(vars(concat_order(dataset.lengths, **arguments)))))
    return _packed_order(_cached(cache_dir, key, lambda: _packed_arrays(best_fit_order(dataset.lengths, **arguments))))


def _stages(stages: Sequence[tuple[int, dict[str, float]]]) -> list[Stage]:
    starts = [start for start, _ in stages]
    if not stages or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(
            f"the stages of a blend must begin at growing samples, the first at 0; they begin at {starts}."
        )
    for _, blend in stages:
        if not blend:
            raise ValueError("the blend is empty. Name at least one data prefix with its weight.")
        for prefix, weight in blend.items():
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"the weight of {prefix} is {weight}. Weights must be positive; leave out unused sources."
                )
    plan = [
        Stage(start, {str(prefix): weight / sum(blend.values()) for prefix, weight in blend.items()})
        for start, blend in stages
    ]
    if (number := len(source_names(plan))) > MAX_SOURCES:
        raise ValueError(f"{number} sources are more than the {MAX_SOURCES} that a run can have. Merge some of them.")
    return plan


def _cached(cache_dir: Path, key: dict[str, object], build: Callable[[], Arrays]) -> Arrays:
    content = json.dumps({**key, "version": ORDER_VERSION}, sort_keys=True)
    return cached(cache_dir, hashlib.sha256(content.encode()).hexdigest()[:32], build)


_COUNTS = ("num_epochs", "num_dropped", "num_dropped_tokens")


def _packed_arrays(order: PackedOrder) -> Arrays:
    arrays = dict(vars(order))
    arrays["counts"] = np.array([arrays.pop(name) for name in _COUNTS])
    return arrays


def _packed_order(arrays: Arrays) -> PackedOrder:
    counts = dict(zip(_COUNTS, arrays["counts"].tolist(), strict=True))
    parts: dict[str, Any] = {name: array for name, array in arrays.items() if name != "counts"}
    return PackedOrder(**parts, **counts)
