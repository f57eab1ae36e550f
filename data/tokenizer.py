"""Tokenizers. The built-in one maps every byte to its own id, so it needs no files and no network."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

NUM_BYTES = 256
BYTE_EOD_ID = NUM_BYTES
INSTALL = "Install it with: pip install 'msa-pretrain[data]'"


class Vocabulary(Protocol):
    """What indexed files must know of the tokenizer that made them."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def sha256(self) -> str:
        """Of everything that maps text to ids: two tokenizers with equal ones may be mixed."""


class Tokenizer(Vocabulary, Protocol):
    """Text to ids."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts, one after another; number of ids of each [n]), without any EOD."""


@dataclass(frozen=True)
class TokenizerIdentity:
    """A vocabulary that is known by its numbers alone."""

    name: str
    vocab_size: int
    eod: int
    sha256: str = ""
    """Empty: made of the other three."""

    def __post_init__(self) -> None:
        if not self.sha256:
            content = f"{self.name}:{self.vocab_size}:{self.eod}"
            object.__setattr__(self, "sha256", hashlib.sha256(content.encode()).hexdigest())


class ByteTokenizer:
    """The 256 bytes, and one id for the end of a document (EOD)."""

    name = "byte"
    vocab_size = NUM_BYTES + 1
    eod = BYTE_EOD_ID
    sha256 = TokenizerIdentity("byte", NUM_BYTES + 1, BYTE_EOD_ID).sha256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text` [num_bytes], int64; a string is encoded as UTF-8. No EOD is added: the writer does that."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        raw = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raw), dtype=np.uint8), np.array([len(part) for part in raw], dtype=np.int64)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes behind `ids`; EODs are dropped."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise ValueError(
                f"the byte tokenizer cannot decode id {outside[0]}: its ids lie in 0..{self.vocab_size - 1}. "
                "Decode with the tokenizer that the data was prepared with."
            )
        return array[array != self.eod].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 (a character cut at a sample border) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of `tokenizers` or `transformers`, without the special tokens that it would add to a text."""

    def __init__(self, name: str, tokenizer: Any, eod_token: str | None) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`, or a slow (pure Python) tokenizer of `transformers`."""
        self.name = name
        self._fast = tokenizer if hasattr(tokenizer, "encode_batch_fast") else None
        self._encode: Callable[[list[str]], list[list[int]]]
        if self._fast is not None:
            self._fast.no_padding()
            self._fast.no_truncation()
            self._encode = lambda texts: [
                encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ]
            content = tokenizer.to_str()
        else:
            self._encode = lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
        ids = tokenizer.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        if eod_token is None or eod_token not in ids:
            raise ValueError(
                f"the tokenizer {name} has no token {eod_token!r} to end documents with. Name one of its tokens with "
                "--eod-token, for example '<|endoftext|>' or '</s>'."
                if eod_token is not None
                else f"the tokenizer {name} does not say which token ends a document. Name it with --eod-token."
            )
        self.eod: int = ids[eod_token]
        self.sha256 = hashlib.sha256(f"{content}:{self.eod}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self._encode(list(texts))
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths


def load_tokenizer(name: str, eod_token: str | None = None) -> ByteTokenizer | HuggingFaceTokenizer:
    """`byte`; the path of a tokenizer.json; or a folder or hub name that transformers' AutoTokenizer reads.

    eod_token: the token that ends a document; default: the tokenizer's own end of sequence, where it names one.
    """
    if name == ByteTokenizer.name:
        if eod_token is not None:
            raise ValueError(f"--eod-token ({eod_token!r}) has no effect with --tokenizer byte. Leave it out.")
        return ByteTokenizer()
    # Every worker process tokenizes on its own: threads inside them would fight over the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if name.endswith(".json"):
        return HuggingFaceTokenizer(name, _tokenizer_of_file(Path(name)), eod_token)
    try:
        import transformers
    except ImportError as err:
        raise ValueError(f"--tokenizer {name} needs transformers, which is not there ({err}). {INSTALL}") from err
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as err:
        raise ValueError(
            f"--tokenizer {name}: transformers cannot load it ({str(err).splitlines()[0]}). Give `byte`, a "
            "tokenizer.json, a folder with a tokenizer in it, or a hub name; without a network, download it first."
        ) from err
    return HuggingFaceTokenizer(
        name, getattr(tokenizer, "backend_tokenizer", None) or tokenizer, eod_token or tokenizer.eos_token
    )


def _tokenizer_of_file(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as err:
        raise ValueError(f"--tokenizer {path} needs tokenizers, which is not there ({err}). {INSTALL}") from err
    if not path.is_file():
        raise ValueError(f"--tokenizer {path} does not exist.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # tokenizers raises this very class
        raise ValueError(f"--tokenizer {path} is not a tokenizer.json: {err}") from err
