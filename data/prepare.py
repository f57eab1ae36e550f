"""Writing and opening Megatron's indexed files: `<prefix>.bin` (tokens), `<prefix>.idx` (lengths), `<prefix>.json`.

The JSON manifest is written last, so its presence means that the other two are complete. Every document ends with one
EOD; its length in the index, and never a token's value, says where it ends. megatron-core is imported only where files
are really read or written: its import takes seconds, and recognising a finished preparation needs none of it.
"""

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .corpus import DEFAULT_MAX_BYTES, SPLITS, read_corpus
from .tokenizer import BYTE_EOD_ID, ByteTokenizer

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset


_REMEDY = "Prepare the data again (prepare_data --overwrite)."


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an indexed dataset holds. Tokens and lengths include each document's EOD."""

    num_documents: int
    num_tokens: int
    num_empty_documents: int  # skipped while writing
    longest_document: int
    dtype: str  # of one token in the .bin file
    tokenizer: str
    vocab_size: int
    eod_id: int
    fingerprint: str  # SHA-256 of lengths and tokens: cached sample orders are valid for these data alone
    source: str  # what it was made from, in words; a preparation is reused when this is equal

    @property
    def num_bytes(self) -> int:
        """The size that the .bin file must have."""
        return self.num_tokens * np.dtype(self.dtype).itemsize


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


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
    0..vocab_size - 1 (megatron-core would wrap it in silence) and for a corpus without any token. Nothing appears
    under the final names until everything is written.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    if not 0 <= eod_id < vocab_size:
        raise ValueError(f"eod_id ({eod_id}) must lie in 0..{vocab_size - 1} (vocab_size {vocab_size}).")
    dtype = DType.optimal_dtype(vocab_size)
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f".{prefix.name}.unfinished-{os.getpid()}")
    lengths: list[int] = []
    num_empty = 0
    digest = hashlib.sha256()
    try:
        builder = IndexedDatasetBuilder(str(bin_path(unfinished)), dtype=dtype)
        try:
            for number, (name, ids) in enumerate(documents):
                array = _checked_ids(ids, f"document {name!r} (number {number})", vocab_size)
                if not array.size:
                    num_empty += 1
                    continue
                tokens = np.append(array, eod_id).astype(dtype)
                builder.add_document(tokens, [tokens.size])
                lengths.append(tokens.size)
                digest.update(tokens.size.to_bytes(8, "little"))
                digest.update(tokens.tobytes())
            if not lengths:
                raise ValueError(
                    f"nothing to write at {prefix}: of {num_empty} documents, {num_empty} are empty. "
                    "Check the corpus and the tokenizer."
                )
        except BaseException:
            builder.data_file.close()
            raise
        builder.finalize(str(idx_path(unfinished)))
        manifest = Manifest(
            num_documents=len(lengths),
            num_tokens=sum(lengths),
            num_empty_documents=num_empty,
            longest_document=max(lengths),
            dtype=np.dtype(dtype).name,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eod_id=eod_id,
            fingerprint=digest.hexdigest(),
            source=source,
        )
        manifest_path(unfinished).write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n")
        # An old manifest must not vouch for new files, should this process die between the renames.
        manifest_path(prefix).unlink(missing_ok=True)
        for path in (bin_path, idx_path, manifest_path):
            os.replace(path(unfinished), path(prefix))
    finally:
        for path in (bin_path, idx_path, manifest_path):
            path(unfinished).unlink(missing_ok=True)
    return manifest


def _checked_ids(ids: np.ndarray | list[int], document: str, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids)
    if not array.size:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{document} must be a flat list of integer token ids; got shape {array.shape}, dtype {array.dtype}."
        )
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"{document} holds token id {outside[0]}, outside 0..{vocab_size - 1} (vocab_size {vocab_size}). "
            "Tokenize with the tokenizer that vocab_size belongs to."
        )
    return array


def read_manifest(prefix: Path) -> Manifest:
    """The manifest at `prefix`, after checking that the files are there and that the .bin file is whole."""
    prefix = Path(prefix)
    for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)):
        if not path.is_file():
            raise ValueError(
                f"data file {path} is missing. Make it with: "
                f"python -m msa_pretrain.scripts.prepare_data --corpus builtin --output {prefix.parent}"
            )
    fields = json.loads(manifest_path(prefix).read_text())
    expected = {field.name for field in dataclasses.fields(Manifest)}
    if set(fields) != expected:
        raise ValueError(
            f"{manifest_path(prefix)} is not a manifest of this version: "
            f"missing {sorted(expected - set(fields))}, unknown {sorted(set(fields) - expected)}. {_REMEDY}"
        )
    manifest = Manifest(**fields)
    actual = bin_path(prefix).stat().st_size
    if actual != manifest.num_bytes:
        raise ValueError(
            f"{bin_path(prefix)} has {actual} bytes, but {manifest.num_tokens} tokens of {manifest.dtype} need "
            f"{manifest.num_bytes}: the file is truncated or from another run. {_REMEDY}"
        )
    return manifest


def open_indexed_dataset(prefix: Path) -> tuple["IndexedDataset", Manifest]:
    """Open the files at `prefix`; raises ValueError unless .bin, .idx and manifest agree with one another."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    manifest = read_manifest(prefix)
    dataset = IndexedDataset(str(prefix))
    lengths = dataset.sequence_lengths
    found = (len(lengths), int(lengths.sum(dtype=np.int64)), np.dtype(dataset.index.dtype).name)
    recorded = (manifest.num_documents, manifest.num_tokens, manifest.dtype)
    if found != recorded:
        raise ValueError(
            f"{idx_path(Path(prefix))} says {found[0]} documents, {found[1]} tokens of {found[2]}, but its manifest "
            f"says {recorded[0]}, {recorded[1]} of {recorded[2]}: the files are from different runs. {_REMEDY}"
        )
    return dataset, manifest


def prepare_builtin_corpus(
    output: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, overwrite: bool = False
) -> dict[str, tuple[Manifest, bool]]:
    """Write the built-in corpus in bytes to `output`/train and `output`/valid; {split: (manifest, reused)}.

    A finished preparation of the same source is reused. One of another source is refused unless `overwrite`, because a
    run that is resumed on other data goes on without a sign of it.
    """
    tokenizer = ByteTokenizer()
    prepared = {}
    for split in SPLITS:
        prefix = Path(output) / split
        source = f"Python {platform.python_version()} standard library, split {split}, max_bytes {max_bytes}"
        if not overwrite and all(path(prefix).is_file() for path in (bin_path, idx_path, manifest_path)):
            manifest = read_manifest(prefix)
            if manifest.source != source:
                raise ValueError(
                    f"{prefix} already holds data of another source ({manifest.source!r}, wanted {source!r}). "
                    "Choose another --output, or pass --overwrite."
                )
            prepared[split] = (manifest, True)
            continue
        documents = ((name, tokenizer.encode(content)) for name, content in read_corpus(split, max_bytes=max_bytes))
        manifest = write_indexed_dataset(
            documents,
            prefix,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod,
            tokenizer=tokenizer.name,
            source=source,
        )
        prepared[split] = (manifest, False)
    return prepared
