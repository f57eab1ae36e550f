"""An indexed dataset: Megatron's `<prefix>.bin` (tokens) and `<prefix>.idx` (lengths), with what vouches for them.

`<prefix>.crc` holds a checksum of every block of the .bin file, compared whenever the block is read, so that no damage
can reach the model as a wrong token. `<prefix>.json`, the manifest, binds the three files to one another; it is written
last, so its presence means that the others are complete. Every document ends with one EOD; its length in the index, and
never a token's value, says where it ends.

Tokens are read without a memory map: a page that the file system cannot deliver kills the process without a word, and
every page touched counts as this process's memory.
"""

import dataclasses
import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REMEDY = "Prepare the data again (prepare_data --overwrite)."
CHECKSUM_BLOCK_BYTES = 16_384

# Megatron's .idx format: magic, version, code of the token dtype, number of sequences, number of document borders; then
# lengths (int32), byte offsets (int64) and borders (int64: 0, 1, ..., n, since a document is one sequence here).
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {"uint16": 8, "int32": 4}
MAX_DOCUMENT_LENGTH = 2**31 - 1
_CHUNK = 1 << 20  # documents handled at once


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file (or hub shard) that documents came from, in the order of reading."""

    name: str
    num_bytes: int | None  # on disk, compressed as it is; None where that is unknown
    num_documents: int  # empty ones included
    sha256: str  # of the documents' text, in order


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an indexed dataset holds. Tokens and lengths include each document's EOD."""

    num_documents: int
    num_tokens: int
    num_empty_documents: int  # skipped while writing
    num_repaired_documents: int  # lone surrogates, which no UTF-8 has, became U+FFFD
    num_inner_eods: int  # EOD ids inside documents; harmless, since borders come from lengths
    longest_document: int
    document_lengths: list[int]  # entry i counts the documents of 2^i to 2^(i+1) - 1 tokens
    num_unused_ids: int  # of the vocabulary
    num_rare_ids: int  # used, but fewer than 10 times
    most_frequent_ids: list[list[int]]  # the 16 most frequent: [id, count]
    dtype: str  # of one token in the .bin file
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eod_id: int
    lengths_sha256: str
    tokens_sha256: str
    checksums_sha256: str
    source: str  # what it was made from, in words; a preparation is reused when this is equal
    sources: list[Source]

    @property
    def num_bytes(self) -> int:
        """The size that the .bin file must have."""
        return self.num_tokens * np.dtype(self.dtype).itemsize

    @property
    def fingerprint(self) -> str:
        """SHA-256 of lengths and tokens: cached sample orders are valid for these data alone."""
        return hashlib.sha256(f"{self.lengths_sha256}{self.tokens_sha256}".encode()).hexdigest()

    @property
    def vocabulary(self) -> tuple[str, int, int]:
        """What must be equal in datasets that are merged or blended."""
        return self.tokenizer_sha256, self.vocab_size, self.eod_id


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def crc_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".crc")


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


FILES = (bin_path, idx_path, crc_path, manifest_path)


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice for a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


class Statistics:
    """What the manifest says of lengths and tokens, from a stream of documents."""

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self.num_documents = self.num_tokens = self.longest = 0
        self._eod_id = eod_id
        self._token_counts = np.zeros(vocab_size, dtype=np.int64)
        self._length_counts = np.zeros(32, dtype=np.int64)
        self._lengths, self._tokens = hashlib.sha256(), hashlib.sha256()
        self._checksums = bytearray()
        self._open_block, self._open_size = 0, 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Documents of `lengths` [n] tokens, together `tokens` [sum of lengths] in the dtype of the file."""
        self.num_documents += lengths.size
        self.num_tokens += tokens.size
        if lengths.size:
            self.longest = max(self.longest, int(lengths.max()))
        powers = np.frexp(lengths.astype(np.float64))[1] - 1
        self._length_counts += np.bincount(powers, minlength=32)
        self._token_counts += np.bincount(tokens, minlength=self._token_counts.size)
        self._lengths.update(lengths.astype("<i4").tobytes())
        data = np.ascontiguousarray(tokens).view(np.uint8).data
        self._tokens.update(data)
        while len(data):
            part = data[: CHECKSUM_BLOCK_BYTES - self._open_size]
            self._open_block, self._open_size = zlib.crc32(part, self._open_block), self._open_size + len(part)
            if self._open_size == CHECKSUM_BLOCK_BYTES:
                self._checksums += self._open_block.to_bytes(4, "little")
                self._open_block, self._open_size = 0, 0
            data = data[len(part) :]

    @property
    def checksums(self) -> bytes:
        """CRC-32 of each block of the .bin file, little-endian; the last block may be short."""
        tail = self._open_block.to_bytes(4, "little") if self._open_size else b""
        return bytes(self._checksums) + tail

    def fields(self) -> dict[str, Any]:
        """The manifest's entries that follow from the documents."""
        counts = self._token_counts
        top = np.argsort(-counts, kind="stable")[:16]
        num_lengths = int(self.longest).bit_length()
        return {
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "num_inner_eods": int(counts[self._eod_id]) - self.num_documents,
            "longest_document": self.longest,
            "document_lengths": self._length_counts[:num_lengths].tolist(),
            "num_unused_ids": int((counts == 0).sum()),
            "num_rare_ids": int(((counts > 0) & (counts < 10)).sum()),
            "most_frequent_ids": [[int(token), int(counts[token])] for token in top if counts[token]],
            "lengths_sha256": self._lengths.hexdigest(),
            "tokens_sha256": self._tokens.hexdigest(),
            "checksums_sha256": hashlib.sha256(self.checksums).hexdigest(),
        }


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Megatron's .idx file for documents of `lengths` int32 [n], in pieces: a list of Python integers would not fit."""
    pieces = [slice(start, start + _CHUNK) for start in range(0, lengths.size, _CHUNK)]
    with open(path, "wb") as file:
        code = DTYPE_CODES[dtype.name]
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, lengths.size, lengths.size + 1))
        for piece in pieces:
            file.write(lengths[piece].astype("<i4").tobytes())
        end = 0
        for piece in pieces:
            ends = end + np.cumsum(lengths[piece], dtype=np.int64) * dtype.itemsize
            file.write(np.concatenate(([end], ends[:-1])).astype("<i8").tobytes())
            end = int(ends[-1])
        for start in range(0, lengths.size + 1, _CHUNK):
            file.write(np.arange(start, min(start + _CHUNK, lengths.size + 1), dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


class IndexedDataset:
    """The documents at a prefix, by number. Opened by `open_indexed_dataset`, which has checked index and sizes."""

    def __init__(self, prefix: Path, manifest: Manifest) -> None:
        self.prefix, self.manifest = Path(prefix), manifest
        self._dtype = np.dtype(manifest.dtype)
        self.lengths, self._offsets = _read_index(self.prefix, manifest)
        self._checksums = np.fromfile(crc_path(self.prefix), dtype="<u4")
        self._file: int | None = None

    def __len__(self) -> int:
        return self.manifest.num_documents

    def __getitem__(self, document: int) -> np.ndarray:
        return self.get(document)

    def get(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset` to `offset + length` of a document (default: all of it), in the dtype of the file."""
        size = int(self.lengths[document])
        length = size - offset if length is None else length
        if not (0 <= offset <= size and 0 <= length <= size - offset):
            raise IndexError(f"{self.prefix}: document {document} has {size} tokens, not {offset} + {length}.")
        return self.read_tokens(int(self._offsets[document]) // self._dtype.itemsize + offset, length)

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens `start` to `start + length` of the .bin file. Raises ValueError when a block's checksum differs."""
        first, last = start * self._dtype.itemsize, (start + length) * self._dtype.itemsize
        if not length:
            return np.empty(0, dtype=self._dtype)
        block = first // CHECKSUM_BLOCK_BYTES
        begin = block * CHECKSUM_BLOCK_BYTES
        end = min(-(-last // CHECKSUM_BLOCK_BYTES) * CHECKSUM_BLOCK_BYTES, self.manifest.num_bytes)
        data = self._read(begin, end - begin)
        view = memoryview(data)
        for number in range(block, -(-end // CHECKSUM_BLOCK_BYTES)):
            at = (number - block) * CHECKSUM_BLOCK_BYTES
            if zlib.crc32(view[at : at + CHECKSUM_BLOCK_BYTES]) != self._checksums[number]:
                raise ValueError(
                    f"{bin_path(self.prefix)} is damaged: bytes {number * CHECKSUM_BLOCK_BYTES} to "
                    f"{min((number + 1) * CHECKSUM_BLOCK_BYTES, self.manifest.num_bytes)} do not match their checksum. "
                    f"Copy the file again, or prepare it again; prepare_data --verify checks all of it."
                )
        return np.frombuffer(data, dtype=self._dtype, count=length, offset=first - begin)

    def _read(self, begin: int, size: int) -> bytes:
        if self._file is None:
            self._file = os.open(bin_path(self.prefix), os.O_RDONLY)
        data = os.pread(self._file, size, begin)
        while len(data) < size:  # the system gives at most 2 GiB at once
            more = os.pread(self._file, size - len(data), begin + len(data))
            if not more:
                raise ValueError(f"{bin_path(self.prefix)} was truncated while it was in use. {REMEDY}")
            data += more
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]  # not None here


def read_manifest(prefix: Path) -> Manifest:
    """The manifest at `prefix`, after checking that the files are there and that the .bin file is whole."""
    prefix = Path(prefix)
    for path in FILES:
        if not path(prefix).is_file():
            raise ValueError(
                f"data file {path(prefix)} is missing. Prepare it with python -m msa_pretrain.scripts.prepare_data "
                "(--corpus builtin, or --input FILES), or correct the prefix."
            )
    try:
        fields = json.loads(manifest_path(prefix).read_text())
    except ValueError as err:
        raise ValueError(f"{manifest_path(prefix)} is not a manifest: {err}. {REMEDY}") from err
    if not isinstance(fields, dict):
        raise ValueError(f"{manifest_path(prefix)} is not a manifest: it holds {fields!r:.80}. {REMEDY}")
    missing, unknown = _field_names() - set(fields), set(fields) - _field_names()
    if missing or unknown:
        raise ValueError(
            f"{manifest_path(prefix)} is not a manifest of this version: missing {sorted(missing)}, unknown "
            f"{sorted(unknown)}. {REMEDY}"
        )
    manifest = Manifest(**{**fields, "sources": [Source(**source) for source in fields["sources"]]})
    if manifest.dtype not in DTYPE_CODES:
        raise ValueError(f"{manifest_path(prefix)}: dtype is {manifest.dtype!r}, not uint16 or int32. {REMEDY}")
    actual = bin_path(prefix).stat().st_size
    if actual != manifest.num_bytes:
        raise ValueError(
            f"{bin_path(prefix)} has {actual} bytes, but {manifest.num_tokens} tokens of {manifest.dtype} need "
            f"{manifest.num_bytes}: the file is truncated or from another run. {REMEDY}"
        )
    return manifest


def _field_names() -> set[str]:
    return {field.name for field in dataclasses.fields(Manifest)}


def open_indexed_dataset(prefix: Path) -> tuple[IndexedDataset, Manifest]:
    """Open the files at `prefix`; raises ValueError unless index, checksums, sizes and manifest agree."""
    manifest = read_manifest(prefix)
    found = hashlib.sha256(crc_path(Path(prefix)).read_bytes()).hexdigest()
    if found != manifest.checksums_sha256:
        raise ValueError(f"{crc_path(Path(prefix))} is damaged or from another run than its manifest. {REMEDY}")
    return IndexedDataset(Path(prefix), manifest), manifest


def _read_index(prefix: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    """(lengths int32 [n], byte offsets int64 [n]) of the .idx file, mapped, after a check of every entry."""
    path, size = idx_path(prefix), idx_path(prefix).stat().st_size
    n, itemsize = manifest.num_documents, np.dtype(manifest.dtype).itemsize
    with open(path, "rb") as file:
        header = file.read(INDEX_HEADER.size)
    expected = INDEX_HEADER.pack(INDEX_MAGIC, 1, DTYPE_CODES[manifest.dtype], n, n + 1)
    if header != expected or size != INDEX_HEADER.size + 4 * n + 8 * n + 8 * (n + 1):
        raise ValueError(f"{path} {_why_not(header, size)}, but its manifest says {_words(manifest)}. {REMEDY}")
    lengths = np.memmap(path, "<i4", "r", INDEX_HEADER.size, (n,))
    offsets = np.memmap(path, "<i8", "r", INDEX_HEADER.size + 4 * n, (n,))
    borders = np.memmap(path, "<i8", "r", INDEX_HEADER.size + 12 * n, (n + 1,))
    digest, end, consistent = hashlib.sha256(), 0, int(borders[n]) == n
    for start in range(0, n, _CHUNK):
        piece = slice(start, start + _CHUNK)
        ends = end + np.cumsum(lengths[piece], dtype=np.int64) * itemsize
        consistent &= offsets[start] == end and np.array_equal(offsets[piece][1:], ends[:-1])
        consistent &= np.array_equal(borders[piece][: ends.size], np.arange(start, start + ends.size))
        digest.update(lengths[piece].tobytes())
        end = int(ends[-1])
    if digest.hexdigest() != manifest.lengths_sha256 or not consistent:
        raise ValueError(
            f"{path} is damaged or from another run: its lengths, offsets or borders are not those of the manifest "
            f"({_words(manifest)}). {REMEDY}"
        )
    return lengths, offsets


def _words(manifest: Manifest) -> str:
    return f"{manifest.num_documents} documents, {manifest.num_tokens} tokens of {manifest.dtype}"


def _why_not(header: bytes, size: int) -> str:
    if len(header) < INDEX_HEADER.size:
        return f"has {size} bytes, less than a header"
    magic, version, code, sequences, borders = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1:
        return "is not an index of Megatron's indexed datasets"
    dtype = next((name for name, known in DTYPE_CODES.items() if known == code), f"dtype code {code}")
    return f"({size} bytes) says {sequences} documents of {dtype} with {borders} borders"
