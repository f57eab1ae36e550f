"""Tokenizers. The built-in one maps every byte to its own id, so it needs no files and no network."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

NUM_BYTES = 256
BYTE_EOD_ID = NUM_BYTES


@dataclass(frozen=True)
class TokenizerIdentity:
    """What megatron-core's dataset config reads from a tokenizer: its size, its end of document, its cache key."""

    name: str
    vocab_size: int
    eod: int
    unique_identifiers: OrderedDict = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        identifiers = OrderedDict(name=self.name, vocab_size=self.vocab_size, eod=self.eod)
        object.__setattr__(self, "unique_identifiers", identifiers)


class ByteTokenizer:
    """The 256 bytes, and one id for the end of a document (EOD)."""

    name = "byte"
    vocab_size = NUM_BYTES + 1
    eod = BYTE_EOD_ID

    @property
    def unique_identifiers(self) -> OrderedDict:
        return TokenizerIdentity(self.name, self.vocab_size, self.eod).unique_identifiers

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text` [num_bytes], int64; a string is encoded as UTF-8. No EOD is added: the writer does that."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

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


def load_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer called `name` (config key `data.tokenizer`)."""
    if name != ByteTokenizer.name:
        raise ValueError(f"data.tokenizer is {name!r}, but only 'byte' is supported. Use data.tokenizer=byte.")
    return ByteTokenizer()
