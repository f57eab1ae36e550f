"""From documents to indexed datasets: read, tokenize in several processes, write, and go on after a kill.

The main process reads and writes; workers parse, hash and tokenize. What is written depends on the inputs and the
recipe alone, never on the number of workers or on interruptions.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .corpus import DEFAULT_MAX_BYTES, SPLITS, read_corpus
from .documents import COMPRESSIONS, Unit, find_units, read_batches
from .indexed import FILES, Manifest, Source, open_indexed_dataset, read_manifest
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from .workers import TRAIN, Tokenized, tokenize
from .writer import IndexedWriter, write_indexed_dataset

__all__ = [
    "Recipe",
    "open_indexed_dataset",
    "prepare",
    "prepare_builtin_corpus",
    "read_manifest",
    "write_indexed_dataset",
]

_COMMIT_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that the prepared data depend on, besides the contents of the inputs."""

    inputs: list[str]
    tokenizer: str
    eod_token: str | None = None
    text_column: str = "text"
    text_unit: str | None = None
    """What a document of a text file is: the file, a paragraph or a line."""
    split: str = "train"
    """Of hub datasets."""
    held_out: dict[str, float] = field(default_factory=dict)
    """Share of the documents of each further split, for example {"valid": 0.01}; a document's text decides, so equal
    documents are in the same split."""
    shard: tuple[int, int] = (0, 1)
    """(number, count): this preparation takes every count-th unit, from the number-th on."""


@dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    num_documents: int
    num_tokens: int
    documents_per_s: float
    tokens_per_s: float
    seconds_left: float | None  # None where the size of the inputs is not known (hub, a first compressed file)


@dataclass
class _State:
    """What `prepare` goes on from, next to the committed documents of every split."""

    recipe: str
    unit: int = 0
    row: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    units: list[list] = field(default_factory=list)  # of each unit begun: documents, sha256 of their text, bytes


def prepare(
    recipe: Recipe,
    output: Path,
    *,
    num_workers: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, tuple[Manifest, bool]]:
    """Write `output`/train and every held-out split; {split: (manifest, reused)}. With shards the names end in
    `-00000-of-00004`.

    A finished preparation of the same recipe and inputs is reused, an unfinished one continued; one of another recipe
    is refused unless `overwrite`. Raises ValueError for whatever a user can mend.
    """
    number, count = recipe.shard
    if not 0 <= number < count:
        raise ValueError(f"--shard {number}/{count}: the number must lie in 0..{count - 1}.")
    if num_workers < 1:
        raise ValueError(f"--num-workers ({num_workers}) must be at least 1.")
    if bad := {name: share for name, share in recipe.held_out.items() if not (0 < share < 1 and name.isidentifier())}:
        raise ValueError(f"--held-out {bad}: a name and a share between 0 and 1 are expected, as in valid=0.01.")
    if TRAIN in recipe.held_out or sum(recipe.held_out.values()) >= 1:
        raise ValueError(f"--held-out {recipe.held_out} must leave something to the split called train.")
    units = find_units(recipe.inputs, split=recipe.split)
    if any(unit.kind == "text" for unit in units) != (recipe.text_unit is not None):
        raise ValueError(
            "--text-unit says what a document of a text file is (document, paragraph or line): it must be given when "
            f"there are text files, and only then. It is {recipe.text_unit}."
        )
    if count > len(units):
        raise ValueError(f"--shard {number}/{count}: there are only {len(units)} files to share. Use fewer shards.")
    units = units[number::count]
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.eod_token)
    suffix = f"-{number:05}-of-{count:05}" if count > 1 else ""
    prefixes = {split: Path(output) / f"{split}{suffix}" for split in (TRAIN, *recipe.held_out)}
    source = _describe(recipe, units, tokenizer)
    if not overwrite and (finished := _finished(prefixes, source)):
        return finished
    Path(output).mkdir(parents=True, exist_ok=True)
    with _only_one(Path(output) / f".prepare{suffix}.lock"):
        job = _Job(recipe, units, tokenizer, prefixes, Path(output) / f".prepare{suffix}.json", source, overwrite)
        manifests = job.run(num_workers, on_progress)
    return {split: (manifest, False) for split, manifest in manifests.items()}


class _Job:
    """One preparation: its writers, its state on disk, its clock."""

    def __init__(
        self,
        recipe: Recipe,
        units: list[Unit],
        tokenizer: Tokenizer,
        prefixes: dict[str, Path],
        state_path: Path,
        source: str,
        overwrite: bool,
    ) -> None:
        self.recipe, self.units, self.tokenizer, self.source = recipe, units, tokenizer, source
        self._state_path = state_path
        self.state = _State(source)
        if overwrite:
            state_path.unlink(missing_ok=True)
            for prefix in prefixes.values():
                IndexedWriter(prefix, tokenizer).discard()
        elif state_path.is_file():
            self.state = _State(**json.loads(state_path.read_text()))
            if self.state.recipe != source:
                raise ValueError(
                    f"{state_path.parent} holds an unfinished preparation of something else ({self.state.recipe}; now "
                    f"{source}). Finish it with its own arguments, choose another --output, or pass --overwrite."
                )
        # killed while it gave the files their names, one split after another
        self.finished = {} if overwrite else _manifests(prefixes, source)
        self.writers = {
            split: IndexedWriter(prefix, tokenizer) for split, prefix in prefixes.items() if split not in self.finished
        }
        for split, writer in self.writers.items():
            writer.restore(self.state.documents.get(split, 0))

    def run(self, num_workers: int, on_progress: Callable[[Progress], None]) -> dict[str, Manifest]:
        recipe, state = self.recipe, self.state
        batches = read_batches(
            self.units,
            text_column=recipe.text_column,
            text_unit=recipe.text_unit,
            start=(state.unit, state.row),
        )
        before = self._totals()
        start = last_commit = time.perf_counter()
        for result in tokenize(batches, recipe, self.tokenizer, num_workers):
            self._write(result)
            now = time.perf_counter()
            if now - last_commit > _COMMIT_EVERY_S:
                self._commit()
                last_commit = now
                on_progress(self._progress(before, now - start))
        self._commit()
        on_progress(self._progress(before, time.perf_counter() - start))
        manifests = self._finish()
        self._state_path.unlink()
        return manifests

    def _write(self, result: Tokenized) -> None:
        state = self.state
        for split, (tokens, lengths) in result.parts.items():
            self.writers[split].add(tokens, lengths)
        for counts, more in ((state.empty, result.empty), (state.repaired, result.repaired)):
            for split, number in more.items():
                counts[split] = counts.get(split, 0) + number
        if len(state.units) <= result.unit:
            state.units.append([0, "", 0])
        unit = state.units[result.unit]
        if result.num_texts:  # a unit that is taken up again at its end gives one more batch, without texts
            unit[0] += result.num_texts
            unit[1] = hashlib.sha256(unit[1].encode() + result.sha256).hexdigest()
            unit[2] += result.num_raw_bytes
        state.unit, state.row = result.unit, result.end_row

    def _commit(self) -> None:
        self.state.documents |= {split: writer.commit() for split, writer in self.writers.items()}
        unfinished = self._state_path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self.state)))
        os.replace(unfinished, self._state_path)

    def _finish(self) -> dict[str, Manifest]:
        state = self.state
        if empty := [split for split, number in state.documents.items() if not number and split != TRAIN]:
            raise ValueError(
                f"no document fell into split {empty[0]}: its share of {self.recipe.held_out[empty[0]]} is too small "
                f"for {sum(state.documents.values())} documents. Raise it in --held-out, or leave it out."
            )
        sources = [
            Source(name=unit.name, num_bytes=unit.num_bytes, num_documents=number, sha256=digest)
            for unit, (number, digest, _) in zip(self.units, state.units, strict=True)
        ]
        return self.finished | {
            split: writer.finish(
                source=self.source,
                sources=sources,
                num_empty=state.empty.get(split, 0),
                num_repaired=state.repaired.get(split, 0),
            )
            for split, writer in self.writers.items()
        }

    def _totals(self) -> tuple[int, int, float | None]:
        """Documents, tokens, and the share of the inputs that is done, where their sizes tell."""
        statistics = [writer.statistics for writer in self.writers.values()]
        sizes = [unit.num_bytes for unit in self.units]
        share = None
        if None not in sizes:
            done = sum(size or 0 for size in sizes[: self.state.unit])
            current = self.units[self.state.unit]
            if self.state.units and current.kind in ("json", "text") and not current.name.endswith(COMPRESSIONS):
                done += min(self.state.units[-1][2], current.num_bytes or 0)
            share = done / max(1, sum(size or 0 for size in sizes))
        return sum(s.num_documents for s in statistics), sum(s.num_tokens for s in statistics), share

    def _progress(self, before: tuple[int, int, float | None], seconds: float) -> Progress:
        documents, tokens, share = self._totals()
        done_here = share - before[2] if share is not None and before[2] is not None else 0.0
        return Progress(
            num_documents=documents,
            num_tokens=tokens,
            documents_per_s=(documents - before[0]) / seconds,
            tokens_per_s=(tokens - before[1]) / seconds,
            seconds_left=seconds * (1 - (share or 0.0)) / done_here if done_here else None,
        )


def _describe(recipe: Recipe, units: list[Unit], tokenizer: Tokenizer) -> str:
    """The recipe in words, with a hash of everything that the data depend on."""
    content = [
        [[unit.name, unit.num_bytes] for unit in units],
        [tokenizer.sha256, recipe.text_column, recipe.text_unit, recipe.held_out, recipe.shard],
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return f"{len(units)} inputs with tokenizer {tokenizer.name}, recipe {digest}"


def _finished(prefixes: dict[str, Path], source: str) -> dict[str, tuple[Manifest, bool]] | None:
    """The manifests of a finished preparation; None when there is none. ValueError when it is of another source."""
    manifests = _manifests(prefixes, source)
    return (
        {split: (manifest, True) for split, manifest in manifests.items()}
        if manifests.keys() == prefixes.keys()
        else None
    )


def _manifests(prefixes: dict[str, Path], source: str) -> dict[str, Manifest]:
    """Those of the splits that are complete."""
    there = {split: prefix for split, prefix in prefixes.items() if all(path(prefix).is_file() for path in FILES)}
    manifests = {split: read_manifest(prefix) for split, prefix in there.items()}
    for split, manifest in manifests.items():
        if manifest.source != source:
            raise ValueError(
                f"{prefixes[split]} already holds data of another source ({manifest.source!r}, wanted {source!r}). "
                "Choose another --output, or pass --overwrite."
            )
    return manifests


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Refuse to go on while another process on this file system is inside."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise ValueError(f"another preparation is writing to {path.parent}. Wait for it, or stop it.") from err
        yield
        path.unlink(missing_ok=True)


def prepare_builtin_corpus(
    output: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, overwrite: bool = False
) -> dict[str, tuple[Manifest, bool]]:
    """Write the built-in corpus in bytes to `output`/train and `output`/valid; {split: (manifest, reused)}.

    A finished preparation of the same source is reused. One of another source is refused unless `overwrite`, because a
    run that is resumed on other data goes on without a sign of it.
    """
    tokenizer = ByteTokenizer()
    prepared: dict[str, tuple[Manifest, bool]] = {}
    for split in SPLITS:
        prefix = Path(output) / split
        source = f"Python {platform.python_version()} standard library, split {split}, max_bytes {max_bytes}"
        if not overwrite and (finished := _finished({split: prefix}, source)):
            prepared |= finished
            continue
        documents = ((name, tokenizer.encode(content)) for name, content in read_corpus(split, max_bytes=max_bytes))
        manifest = write_indexed_dataset(documents, prefix, vocab_size=tokenizer.vocab_size, source=source)
        prepared[split] = (manifest, False)
    return prepared
