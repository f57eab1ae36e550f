"""Writing indexed datasets: documents in, four files out, nothing under the final names until everything is there."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .indexed import (
    FILES,
    MAX_DOCUMENT_LENGTH,
    Manifest,
    Source,
    Statistics,
    bin_path,
    crc_path,
    idx_path,
    manifest_path,
    token_dtype,
    write_index,
)
from .tokenizer import BYTE_EOD_ID, ByteTokenizer, TokenizerIdentity, Vocabulary

_CHUNK_BYTES = 1 << 24
_CHUNK_DOCUMENTS = 1 << 20


class IdOutsideError(ValueError):
    """A document holds an id that the vocabulary does not have; `document` is its number among those given."""

    def __init__(self, message: str, document: int) -> None:
        super().__init__(message)
        self.document = document


class IndexedWriter:
    """Appends documents to unfinished files beside `prefix`; `finish` gives them their names.

    The unfinished files carry a fixed name, and `restore` goes on with what a killed process left: the caller keeps
    count of the documents (`commit` makes them safe). Only one process may write to a prefix; the caller sees to it.
    """

    def __init__(self, prefix: Path, tokenizer: Vocabulary, label: str = "unfinished") -> None:
        self.prefix, self.tokenizer = Path(prefix), tokenizer
        if not 0 <= tokenizer.eod < tokenizer.vocab_size:
            raise ValueError(
                f"eod_id ({tokenizer.eod}) must lie in 0..{tokenizer.vocab_size - 1} (vocab_size "
                f"{tokenizer.vocab_size})."
            )
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.statistics = Statistics(tokenizer.vocab_size, tokenizer.eod)
        self._unfinished = self.prefix.with_name(f".{self.prefix.name}.{label}")
        self._lengths_path = self._unfinished.with_name(self._unfinished.name + ".lengths")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._tokens = open(bin_path(self._unfinished), "ab")  # noqa: SIM115  closed by finish or discard
        self._lengths = open(self._lengths_path, "ab")  # noqa: SIM115

    def restore(self, num_documents: int) -> None:
        """Keep the first `num_documents` documents of what is there, and cut off the rest."""
        if num_documents and not bin_path(self._unfinished).stat().st_size and bin_path(self.prefix).is_file():
            # `finish` was interrupted after the tokens had got their name
            manifest_path(self.prefix).unlink(missing_ok=True)
            self._tokens.close()
            os.replace(bin_path(self.prefix), bin_path(self._unfinished))
            self._tokens = open(bin_path(self._unfinished), "ab")  # noqa: SIM115
        lengths = np.fromfile(self._lengths_path, dtype="<i4", count=num_documents)
        num_bytes = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        found = bin_path(self._unfinished).stat().st_size
        if lengths.size < num_documents or found < num_bytes:
            raise ValueError(
                f"the unfinished files at {self.prefix} hold {lengths.size} documents and {found} bytes, fewer than "
                f"the {num_documents} documents and {num_bytes} bytes committed. Pass --overwrite to start anew."
            )
        self._lengths.truncate(4 * num_documents)
        self._tokens.truncate(num_bytes)
        with open(bin_path(self._unfinished), "rb") as file:
            for piece in pieces_of_documents(lengths, _CHUNK_BYTES // self.dtype.itemsize):
                tokens = np.fromfile(file, dtype=self.dtype, count=int(lengths[piece].sum(dtype=np.int64)))
                self.statistics.add(tokens, lengths[piece])

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of `lengths` [n] tokens, EOD included; `tokens` are theirs, in `self.dtype`, in range."""
        assert tokens.dtype == self.dtype and tokens.size == lengths.sum(), (tokens.dtype, tokens.size, lengths.sum())
        self.statistics.add(tokens, lengths)
        self._tokens.write(np.ascontiguousarray(tokens).view(np.uint8).data)
        self._lengths.write(lengths.astype("<i4").tobytes())

    def commit(self) -> int:
        """Make everything added so far survive a crash; returns the number of documents."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        return self.statistics.num_documents

    def finish(
        self, *, source: str, num_empty: int = 0, num_repaired: int = 0, sources: Iterable[Source] = ()
    ) -> Manifest:
        """Write index, checksums and manifest, and rename all four. Raises ValueError when there is no document."""
        if not self.statistics.num_documents:
            raise ValueError(
                f"nothing to write at {self.prefix}: of {num_empty} documents, {num_empty} are empty. "
                "Check the corpus and the tokenizer."
            )
        self.commit()
        write_index(idx_path(self._unfinished), np.fromfile(self._lengths_path, dtype="<i4"), self.dtype)
        crc_path(self._unfinished).write_bytes(self.statistics.checksums)
        manifest = Manifest(
            **self.statistics.fields(),
            num_empty_documents=num_empty,
            num_repaired_documents=num_repaired,
            dtype=self.dtype.name,
            tokenizer=self.tokenizer.name,
            tokenizer_sha256=self.tokenizer.sha256,
            vocab_size=self.tokenizer.vocab_size,
            eod_id=self.tokenizer.eod,
            source=source,
            sources=list(sources),
        )
        manifest_path(self._unfinished).write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")
        # An old manifest must not vouch for new files, should this process die between the renames.
        manifest_path(self.prefix).unlink(missing_ok=True)
        for path in FILES:
            os.replace(path(self._unfinished), path(self.prefix))
        self.discard()
        return manifest

    def discard(self) -> None:
        """Close and remove the unfinished files; what is finished stays."""
        for file in (self._tokens, self._lengths):
            file.close()
        for path in (*(path(self._unfinished) for path in FILES), self._lengths_path):
            path.unlink(missing_ok=True)


def pieces_of_documents(lengths: np.ndarray, max_tokens: int) -> Iterator[slice]:
    """Consecutive runs of documents of at most `max_tokens` tokens, or of one document that is longer."""
    for first in range(0, lengths.size, _CHUNK_DOCUMENTS):
        ends = np.cumsum(lengths[first : first + _CHUNK_DOCUMENTS], dtype=np.int64)
        start = 0
        while start < ends.size:
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + max_tokens, side="right")), start + 1)
            yield slice(first + start, first + stop)
            start = stop


def with_eod(ids: np.ndarray, lengths: np.ndarray, tokenizer: Vocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents ready for a writer: (tokens in the file's dtype, lengths with EOD, which documents were kept).

    ids: of all documents, one after another. lengths [n]: tokens of each, 0 for an empty one, which is left out.
    Raises IdOutsideError for an id outside 0..vocab_size - 1, which the file's dtype would wrap in silence.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
        at = int(np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))[0])
        raise IdOutsideError(
            f"holds token id {ids[at]}, outside 0..{tokenizer.vocab_size - 1} (vocab_size {tokenizer.vocab_size}). "
            "Tokenize with the tokenizer that vocab_size belongs to.",
            int(np.searchsorted(np.cumsum(lengths), at, side="right")),
        )
    kept = lengths > 0
    lengths = lengths[kept].astype(np.int64) + 1
    tokens = np.full(ids.size + lengths.size, tokenizer.eod, dtype=token_dtype(tokenizer.vocab_size))
    inside = np.ones(tokens.size, dtype=bool)
    inside[np.cumsum(lengths) - 1] = False
    tokens[inside] = ids
    if lengths.size and lengths.max() > MAX_DOCUMENT_LENGTH:
        raise ValueError(f"a document of {lengths.max()} tokens is too long for the index. Split it.")
    return tokens, lengths, kept


def write_indexed_dataset(
    documents: Iterable[tuple[str, np.ndarray | list[int]]],
    prefix: Path,
    *,
    vocab_size: int,
    eod_id: int = BYTE_EOD_ID,
    tokenizer: str = ByteTokenizer.name,
    source: str = "",
) -> Manifest:
    """Write `documents` (name, ids without EOD) as an indexed dataset at `prefix` and return its manifest.

    Appends `eod_id` to every document; skips and counts empty ones. Raises ValueError for an id outside
    0..vocab_size - 1 and for a corpus without any token. Nothing appears under the final names until everything is
    written.
    """
    vocabulary = TokenizerIdentity(tokenizer, vocab_size, eod_id)
    writer = IndexedWriter(prefix, vocabulary, f"unfinished-{os.getpid()}")
    num_empty = 0
    try:
        for number, (name, ids) in enumerate(documents):
            array = np.asarray(ids)
            if not array.size:
                num_empty += 1
                continue
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"document {name!r} (number {number}) must be a flat list of integer token ids; got shape "
                    f"{array.shape}, dtype {array.dtype}."
                )
            try:
                tokens, lengths, _ = with_eod(array, np.array([array.size]), vocabulary)
            except IdOutsideError as err:
                raise ValueError(f"document {name!r} (number {number}) {err}") from None
            writer.add(tokens, lengths)
        return writer.finish(source=source, num_empty=num_empty)
    finally:
        writer.discard()
