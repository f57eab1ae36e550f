"""Batches of raw documents through tokenizing processes, in order."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .documents import Batch, texts_of
from .tokenizer import Tokenizer, load_tokenizer
from .writer import IdOutsideError, with_eod

if TYPE_CHECKING:
    from .prepare import Recipe

TRAIN = "train"
_QUEUED = 3  # batches waiting for each worker


@dataclass(frozen=True)
class Tokenized:
    """What a worker makes of a batch."""

    unit: int
    end_row: int
    parts: dict[str, tuple[np.ndarray, np.ndarray]]  # split -> (tokens, lengths)
    empty: dict[str, int]
    repaired: dict[str, int]
    num_texts: int
    num_raw_bytes: int  # of the rows, near enough for the time left
    sha256: bytes  # of the texts' hashes


def tokenize(batches: Iterable[Batch], recipe: Recipe, tokenizer: Tokenizer, num_workers: int) -> Iterator[Tokenized]:
    """The batches through the workers, in order, a few of them at a time; one worker is this process."""
    if num_workers == 1:
        worker = _Worker(tokenizer, recipe.text_column, recipe.held_out)
        yield from map(worker.tokenize, batches)
        return
    arguments = (recipe.tokenizer, recipe.eod_token, recipe.text_column, recipe.held_out)
    # forkserver: a fork of a process with threads (pyarrow's) may hang
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_workers, context, _start_worker, arguments) as pool:
        waiting: deque[Future[Tokenized]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_tokenize_batch, batch))
                if len(waiting) > _QUEUED * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as err:
            raise ValueError(
                "a worker process died, most likely for want of memory. Run the same command again to go on from the "
                "last commit, with fewer --num-workers."
            ) from err
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Worker:
    """Parses, hashes and tokenizes batches."""

    tokenizer: Tokenizer
    text_column: str
    held_out: dict[str, float]

    def tokenize(self, batch: Batch) -> Tokenized:
        texts = texts_of(batch, self.text_column)
        by_split: dict[str, list[str]] = {}
        repaired: dict[str, int] = {}
        digest, num_bytes = hashlib.sha256(), 0
        for text in texts:
            try:
                raw, damaged = text.encode("utf-8"), False
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                raw, damaged = text.encode("utf-8"), True
            own = hashlib.sha256(raw).digest()
            split = _split_of(own, self.held_out)
            by_split.setdefault(split, []).append(text)
            if damaged:
                repaired[split] = repaired.get(split, 0) + 1
            digest.update(own)
            num_bytes += len(raw)
        parts, empty = {}, {}
        for split, chosen in by_split.items():
            ids, lengths = self.tokenizer.encode_batch(chosen)
            try:
                tokens, lengths, kept = with_eod(ids, lengths, self.tokenizer)
            except IdOutsideError as err:
                raise ValueError(
                    f"{batch.name}: the document that begins {chosen[err.document][:60]!r} {err}"
                ) from None
            parts[split], empty[split] = (tokens, lengths), int((~kept).sum())
        return Tokenized(
            unit=batch.unit,
            end_row=batch.first_row + len(batch.rows),
            parts=parts,
            empty=empty,
            repaired=repaired,
            num_texts=len(texts),
            num_raw_bytes=int(sum(len(row or "") for row in batch.rows) * num_bytes / max(1, sum(map(len, texts)))),
            sha256=digest.digest(),
        )


_worker: _Worker | None = None  # of a worker process


def _start_worker(tokenizer: str, eod_token: str | None, text_column: str, held_out: dict[str, float]) -> None:
    global _worker
    _worker = _Worker(load_tokenizer(tokenizer, eod_token), text_column, held_out)


def _tokenize_batch(batch: Batch) -> Tokenized:
    assert _worker is not None
    return _worker.tokenize(batch)


def _split_of(sha256: bytes, held_out: dict[str, float]) -> str:
    """The split of a document by the hash of its text."""
    at = int.from_bytes(sha256[:8], "big") / 2**64
    for split, share in held_out.items():
        if at < share:
            return split
        at -= share
    return TRAIN
