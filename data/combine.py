"""Work on prepared data: check all of it, merge shards, sort documents by length."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from .indexed import IndexedDataset, Manifest, Statistics, manifest_path, open_indexed_dataset
from .tokenizer import TokenizerIdentity
from .writer import IndexedWriter, pieces_of_documents

_PIECE_TOKENS = 1 << 22


def verify(prefix: Path) -> Manifest:
    """Read every token at `prefix`; raises ValueError unless everything is as the manifest says."""
    dataset, manifest = open_indexed_dataset(prefix)
    statistics = Statistics(manifest.vocab_size, manifest.eod_id)
    for number, tokens, lengths in _pieces(dataset):
        outside = (tokens < 0) | (tokens >= manifest.vocab_size)
        if outside.any() or (tokens[np.cumsum(lengths) - 1] != manifest.eod_id).any():
            raise ValueError(
                f"{prefix}: of documents {number} to {number + lengths.size - 1} one holds an unknown id "
                "or does not end with the EOD. Prepare the data again (prepare_data --overwrite)."
            )
        statistics.add(tokens, lengths)
    if wrong := [name for name, value in statistics.fields().items() if value != getattr(manifest, name)]:
        raise ValueError(f"{prefix}: the manifest's {', '.join(wrong)} do not fit the files. Prepare the data again.")
    return manifest


def merge(prefixes: Sequence[Path], output: Path) -> Manifest:
    """The documents of all `prefixes`, in that order, at `output`. Raises ValueError when tokenizers differ."""
    opened = [open_indexed_dataset(prefix) for prefix in prefixes]
    require_one_vocabulary({str(prefix): manifest for prefix, (_, manifest) in zip(prefixes, opened, strict=True)})
    _refuse_existing(output)
    manifests = [manifest for _, manifest in opened]
    writer = IndexedWriter(output, _vocabulary(manifests[0]), "merging")
    try:
        writer.restore(0)
        for dataset, _ in opened:
            for _, tokens, lengths in _pieces(dataset):
                writer.add(tokens, lengths)
        return writer.finish(
            source=f"merged from {len(prefixes)} prepared datasets: {', '.join(m.source for m in manifests)}",
            sources=[source for manifest in manifests for source in manifest.sources],
            num_empty=sum(manifest.num_empty_documents for manifest in manifests),
            num_repaired=sum(manifest.num_repaired_documents for manifest in manifests),
        )
    finally:
        writer.discard()


def split_by_length(prefix: Path, edges: Sequence[int]) -> dict[Path, Manifest]:
    """One dataset for each range of document lengths beside `prefix`, for blends that prefer long documents.

    Example: edges [8192, 32768] give `<prefix>-below-8192`, `<prefix>-8192-to-32767`, `<prefix>-from-32768`; a range
    without documents is left out.
    """
    if not edges or list(edges) != sorted(set(edges)) or edges[0] < 2:
        raise ValueError(f"--by-length {list(edges)}: give growing lengths in tokens, as in 8192 32768.")
    dataset, manifest = open_indexed_dataset(prefix)
    names = [
        f"below-{edges[0]}",
        *(f"{low}-to-{high - 1}" for low, high in pairwise(edges)),
        f"from-{edges[-1]}",
    ]
    outputs = [prefix.with_name(f"{prefix.name}-{name}") for name in names]
    for output in outputs:
        _refuse_existing(output)
    writers = [IndexedWriter(output, _vocabulary(manifest), "sorting") for output in outputs]
    try:
        for writer in writers:
            writer.restore(0)
        for _, tokens, lengths in _pieces(dataset):
            ranges = np.searchsorted(edges, lengths, side="right")
            owner = np.repeat(ranges, lengths)
            for number in np.unique(ranges):
                writers[number].add(tokens[owner == number], lengths[ranges == number])
        return {
            writer.prefix: writer.finish(
                source=f"documents of {prefix} by length, {name}: {manifest.source}", sources=manifest.sources
            )
            for name, writer in zip(names, writers, strict=True)
            if writer.statistics.num_documents
        }
    finally:
        for writer in writers:
            writer.discard()


def require_one_vocabulary(manifests: dict[str, Manifest]) -> None:
    """Raises ValueError, naming two of `manifests` {prefix: manifest}, unless one tokenizer made all."""
    first_prefix, first = next(iter(manifests.items()))
    for prefix, manifest in manifests.items():
        if manifest.vocabulary != first.vocabulary:
            said = [(m.tokenizer, m.tokenizer_sha256[:12], m.vocab_size, m.eod_id) for m in (first, manifest)]
            raise ValueError(
                f"one tokenizer must have made all data, but (tokenizer, hash, vocab_size, eod_id) is {said[0]} in "
                f"{first_prefix} and {said[1]} in {prefix}. Prepare them with the same one."
            )


def _vocabulary(manifest: Manifest) -> TokenizerIdentity:
    return TokenizerIdentity(manifest.tokenizer, manifest.vocab_size, manifest.eod_id, manifest.tokenizer_sha256)


def _pieces(dataset: IndexedDataset) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(number of the first document, tokens, lengths) of consecutive documents, checksums compared."""
    start = 0
    for piece in pieces_of_documents(dataset.lengths, _PIECE_TOKENS):
        lengths = np.asarray(dataset.lengths[piece])
        size = int(lengths.sum(dtype=np.int64))
        yield piece.start, dataset.read_tokens(start, size), lengths
        start += size


def _refuse_existing(output: Path) -> None:
    if manifest_path(output).is_file():
        raise ValueError(f"{output} holds data already. Choose another --output, or remove it.")
