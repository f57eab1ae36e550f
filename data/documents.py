"""Documents of anything that Hugging Face `datasets` reads, streamed in an order that depends on the inputs alone.

Every input becomes units (a file, or a shard of a dataset on the hub), each read from its first row to its last. JSON
lines are read as lines and parsed by the worker that tokenizes them: no schema is guessed, so documents with unlike
metadata may follow one another, and a text that looks like a date stays a text.
"""

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokenizer import INSTALL

KINDS = {
    "json": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt", ".text"),
}
COMPRESSIONS = (".gz", ".zst")  # of JSON lines and text
TEXT_UNITS = ("document", "paragraph", "line")
HUB = "hub:"
BATCH_CHARACTERS = 1 << 18
_ROWS = 64  # rows that `datasets` hands over at once, so that long documents do not pile up


@dataclass(frozen=True)
class Unit:
    """What is read in one go."""

    name: str
    kind: str  # of KINDS, or "hub"
    num_bytes: int | None  # on disk; None on the hub
    dataset: Any = None  # of a hub shard


@dataclass(frozen=True)
class Batch:
    """Rows that one worker tokenizes in one call; as strings, or None where a column holds a null."""

    unit: int
    name: str
    kind: str
    first_row: int
    rows: list[str | None]

    def where(self, row: int) -> str:
        return f"{self.name}, {'line' if self.kind == 'json' else 'row'} {self.first_row + row + 1}"


def find_units(inputs: Sequence[str], *, split: str = "train") -> list[Unit]:
    """The units of files, folders (searched all the way down), glob patterns and hub datasets, in a fixed order.

    Inputs keep their order; within a folder or pattern it is that of the sorted names. `split`: of hub datasets.
    """
    units: list[Unit] = []
    for text in inputs:
        if text.startswith(HUB):
            units += _hub_units(text.removeprefix(HUB), split)
            continue
        path = Path(text)
        if (path / "dataset_dict.json").is_file():
            raise ValueError(f"--input {text} holds several splits ({_some(path)}). Name the folder of one of them.")
        if path.is_dir():
            found = sorted(str(file) for file in path.rglob("*") if file.is_file() and kind_of(str(file)))
        elif path.is_file():
            if kind_of(text) is None:
                raise ValueError(
                    f"--input {text} is of no known kind. Known are {', '.join(sum(KINDS.values(), ()))}; JSON lines "
                    f"and text also with {' or '.join(COMPRESSIONS)} behind."
                )
            found = [text]
        else:
            found = sorted(file for file in glob.glob(text, recursive=True) if os.path.isfile(file) and kind_of(file))
        if not found:
            hint = f" A dataset on the hub is written {HUB}{text}." if text.count("/") <= 1 and "*" not in text else ""
            raise ValueError(f"--input {text}: there is no such file, and no data file below or matching it.{hint}")
        units += [Unit(file, kind_of(file) or "", os.path.getsize(file)) for file in found]
    names = Counter(os.path.realpath(unit.name) if unit.dataset is None else unit.name for unit in units)
    if doubled := [name for name, number in names.items() if number > 1]:
        raise ValueError(f"--input names {doubled[0]} twice. Its documents would be there twice.")
    return units


def kind_of(name: str) -> str | None:
    """The kind of a data file by its name; None for other files."""
    plain = name.removesuffix(next((end for end in COMPRESSIONS if name.endswith(end)), ""))
    kind = next((kind for kind, ends in KINDS.items() if plain.endswith(ends)), None)
    return kind if plain == name or kind in ("json", "text") else None


def read_batches(
    units: Sequence[Unit], *, text_column: str, text_unit: str | None, start: tuple[int, int] = (0, 0)
) -> Iterator[Batch]:
    """The rows of all units from `start` (number of the unit, rows of it already read) on, in order.

    A batch holds about BATCH_CHARACTERS characters of one unit, so that the workers' memory is bounded by the longest
    document. Raises ValueError, naming the unit, for whatever cannot be read.
    """
    for number in range(start[0], len(units)):
        unit, skip = units[number], start[1] if number == start[0] else 0
        first, rows, size = skip, list[str | None](), 0
        for row in _rows(unit, text_column, text_unit, skip):
            rows.append(row)
            size += len(row or "")
            if size >= BATCH_CHARACTERS or len(rows) == BATCH_CHARACTERS // 64:
                yield Batch(number, unit.name, unit.kind, first, rows)
                first, rows, size = first + len(rows), [], 0
        # also when it is empty: this batch tells that the unit is at its end
        yield Batch(number, unit.name, unit.kind, first, rows)


def texts_of(batch: Batch, text_column: str) -> list[str]:
    """The document of every row; a null is an empty one. Blank lines of JSON files are no documents."""
    if batch.kind != "json":
        return [row or "" for row in batch.rows]
    texts = []
    for number, line in enumerate(batch.rows):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except ValueError as err:
            raise ValueError(
                f"{batch.where(number)} is not a JSON object ({err}). One object a line is expected; mend or remove it."
            ) from None
        if not isinstance(record, dict) or text_column not in record:
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{batch.where(number)} has no {text_column!r}, only {keys}. Name the key: --text-column.")
        text = record[text_column]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"{batch.where(number)}: {text_column!r} is of type {type(text).__name__}, not text. Name another key "
                "with --text-column."
            )
        texts.append(text or "")
    return texts


def _rows(unit: Unit, text_column: str, text_unit: str | None, skip: int) -> Iterator[str | None]:
    column = "text" if unit.kind in ("json", "text") else text_column
    try:
        for table in _open(unit, text_column, text_unit).with_format("arrow").iter(batch_size=_ROWS):
            if column not in table.column_names:
                raise ValueError(
                    f"there is no column {column!r}, only {sorted(table.column_names)}. Name it with --text-column."
                )
            if (kind := str(table.schema.field(column).type)) not in ("string", "large_string", "string_view", "null"):
                raise ValueError(f"column {column!r} is of type {kind}, not text. Name another with --text-column.")
            if skip >= table.num_rows:
                skip -= table.num_rows
                continue
            yield from table.column(column).slice(skip).to_pylist()
            skip = 0
    except GeneratorExit:
        raise
    except Exception as err:  # `datasets` and its decoders raise errors of many libraries
        cause = err.__cause__ if type(err).__name__ == "DatasetGenerationError" and err.__cause__ else err
        raise ValueError(f"{unit.name} cannot be read: {cause or type(cause).__name__}") from err


def _open(unit: Unit, text_column: str, text_unit: str | None) -> Any:
    if unit.dataset is not None:
        return unit.dataset
    datasets = import_datasets()
    options: dict[str, Any] = {}
    if unit.kind in ("json", "text"):
        options["sample_by"] = "line" if unit.kind == "json" else text_unit
    elif unit.kind == "parquet":
        # its default is a whole row group at once
        options["batch_size"] = _ROWS
    loader = "text" if unit.kind == "json" else unit.kind
    path = os.path.abspath(unit.name)
    dataset = datasets.load_dataset(loader, data_files={"train": [path]}, split="train", streaming=True, **options)
    if unit.kind in ("parquet", "arrow") and text_column in (dataset.column_names or [text_column]):
        dataset = dataset.select_columns([text_column])
    return dataset


def _hub_units(text: str, split: str) -> list[Unit]:
    """`name` or `name:config`; a shard of the dataset is a unit."""
    datasets = import_datasets()
    name, _, config = text.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as err:  # of the network, the hub and the dataset's own files
        raise ValueError(
            f"--input {HUB}{text}: split {split!r} cannot be loaded "
            f"({type(err).__name__}: {str(err).splitlines()[0]}). "
            f"Check the name ({HUB}owner/name or {HUB}owner/name:config), --split, and the network."
        ) from err
    num_shards = dataset.num_shards
    return [
        Unit(f"{HUB}{text} {split} {number}/{num_shards}", "hub", None, dataset.shard(num_shards, number))
        for number in range(num_shards)
    ]


def import_datasets() -> Any:
    """The library; ValueError with the remedy where it is not installed."""
    try:
        import datasets
    except ImportError as err:
        raise ValueError(f"reading --input needs datasets, which is not there ({err}). {INSTALL}") from err
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    return datasets


def _some(folder: Path) -> str:
    return ", ".join(sorted(child.name for child in folder.iterdir() if child.is_dir()))
