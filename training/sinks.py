"""Where metrics go: `metrics.jsonl`, always, and Weights & Biases, as far as it works.

Only rank 0 builds sinks; every other rank has none, so nothing here may be a collective.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .metrics import MetricValue, check_values
from .redaction import redact
from .wandb_sink import WandbSink

__all__ = ["JsonlSink", "MetricsWriter", "Sink", "WandbSink", "read_metrics", "redact"]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A place that takes checked metric values."""

    def log(self, step: int, consumed_tokens: int, values: Mapping[str, MetricValue]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Checks names and values against the registry, then hands them to every sink."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)

    def log(self, step: int, consumed_tokens: int, values: Mapping[str, object]) -> None:
        """Log values of one step. Raises ValueError for an unregistered name or a value of the wrong kind."""
        checked = check_values(values)
        for sink in self._sinks:
            sink.log(step, consumed_tokens, checked)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonlSink:
    """Append-only `metrics.jsonl`: one JSON object a line, on disk before `log` returns.

        {"step": 20, "consumed_tokens": 40960, "time": 1767225600.0, "train/lm_loss": 5.1}

    `time` is in seconds since the epoch. JSON has no NaN or infinity: such a value is written as null and named
    under "nonfinite", as in `{..., "train/lm_loss": null, "nonfinite": {"train/lm_loss": "nan"}}`; the other two
    markers are "inf" and "-inf". `read_metrics` turns them back into floats.

    `resume_step` is the step of the checkpoint that training continues from: records of later steps are dropped, as
    those steps will be run again, and so is a last line torn by a crash. With None the run starts from nothing, and
    records that an earlier start left at `path` are set aside under another name.
    """

    def __init__(self, path: Path, resume_step: int | None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            self._drop_after(resume_step)
        elif self.path.exists() and self.path.stat().st_size > 0:
            aside = self.path.with_name(f"{self.path.stem}.until_{time.time_ns()}{self.path.suffix}")
            os.replace(self.path, aside)
            logger.warning("%s held records of an earlier start, which are now in %s.", self.path, aside.name)
        self._file = self.path.open("a", encoding="utf-8")

    def _drop_after(self, resume_step: int) -> None:
        if not self.path.exists():
            return
        kept = self.path.with_name(f"{self.path.name}.tmp")
        with kept.open("w", encoding="utf-8") as file:
            for record in _parsed_lines(self.path):
                if record["step"] <= resume_step:
                    file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(kept, self.path)

    def log(self, step: int, consumed_tokens: int, values: Mapping[str, MetricValue]) -> None:
        record: dict[str, Any] = {"step": step, "consumed_tokens": consumed_tokens, "time": time.time(), **values}
        nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        if nonfinite:
            record |= dict.fromkeys(nonfinite)
            record["nonfinite"] = nonfinite
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl` in file order, NaN and infinities restored; a torn last line is left out.

    Raises ValueError when a line other than the last is damaged, FileNotFoundError when there is no file.
    """
    records = []
    for record in _parsed_lines(path):
        for name, marker in record.pop("nonfinite", {}).items():
            record[name] = float(marker)
        records.append(record)
    return records


def _parsed_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each line as written, still with its "nonfinite" part."""
    torn: tuple[int, str] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn:
                raise ValueError(f"{path} line {torn[0]} is damaged: {torn[1]}. Remove that line to go on.")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as err:  # JSON, or a character cut in two
                torn = number, str(err)
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                torn = number, 'it is no object with an integer "step"'
                continue
            yield record
