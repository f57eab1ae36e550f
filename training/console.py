"""What a person at the terminal sees: one live line while training, one table at the end."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from .summary import RunSummary

NOT_AVAILABLE = "n/a"


def format_count(value: float) -> str:
    """12.3M, 4.56B; three significant digits, plain below a thousand."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """45s, 1m 20s, 3h 05m, 2d 04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"


class ProgressLine:
    """The state of training in one line: step, phase, tokens, LM loss, KL, speed, time left.

    On a terminal the line lives at the bottom and is redrawn in place. Anywhere else (a file, a batch job) each
    update that brings a new loss prints one line, and other updates print nothing.
    """

    def __init__(self, total_steps: int, *, num_gpus: int = 1, stream: TextIO | None = None):
        """num_gpus: multiplies `perf/tokens_per_s_per_gpu`. stream: standard output when None."""
        self._total_steps = total_steps
        self._num_gpus = num_gpus
        self._stream = sys.stdout if stream is None else stream
        self._last: dict[str, Any] = {}
        self._progress: Any = None
        if self._stream.isatty():
            self._start_live()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

        console = Console(file=self._stream)
        columns: list[ProgressColumn] = [TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}")]
        if console.width >= 130:  # else the text needs the room
            columns.insert(0, BarColumn(bar_width=20))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=self._total_steps)
        self._progress.start()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Show a step. `values` are metrics by name; those that are missing keep what they last were."""
        self._last |= values
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=self.line(step))
        elif "train/lm_loss" in values:
            self._stream.write(self.line(step) + "\n")
            self._stream.flush()

    def line(self, step: int) -> str:
        """The text of the line, from the values seen so far."""
        last, width = self._last, len(f"{self._total_steps:,}")
        parts = [f"step {step:>{width},}/{self._total_steps:,}"]
        if "moe/forced_balance" in last:
            parts.append("FORCED BALANCE")
        if "train/phase" in last:
            parts.append(f"{last['train/phase']:<6}")
        if "train/tokens" in last:
            parts.append(f"{format_count(last['train/tokens']):>5} tokens")
        if "train/lm_loss" in last:
            parts.append(f"lm loss {last['train/lm_loss']:.4f}")
        if "indexer/kl" in last:
            parts.append(f"KL {last['indexer/kl']:.4f}")
        if "perf/tokens_per_s_per_gpu" in last:
            parts.append(f"{format_count(last['perf/tokens_per_s_per_gpu'] * self._num_gpus):>5} tokens/s")
        if "perf/time_left_s" in last:
            parts.append(f"{format_duration(last['perf/time_left_s'])} left")
        return "  ".join(parts)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """(label, value) of each line of the summary table; what was not logged reads n/a."""
    s, recall, switch = summary, summary.recall, summary.switch
    records = "record" if s.train_window == 1 else f"{s.train_window} records"
    rows = [
        ("steps", _number(s.steps, ",")),
        ("tokens", NOT_AVAILABLE if s.tokens is None else f"{format_count(s.tokens)} ({s.tokens:,})"),
        ("wall time", NOT_AVAILABLE if s.wall_time_s is None else format_duration(s.wall_time_s)),
        ("tokens/s per GPU, median", _count(s.tokens_per_s_per_gpu)),
        ("last phase", s.phase or NOT_AVAILABLE),
        (
            "switch to sparse",
            f"step {switch.step:,}, {format_count(switch.tokens)} tokens" if switch else NOT_AVAILABLE,
        ),
        (f"train LM loss, first -> last {records}", _arrow(s.train_loss_first, s.train_loss_last)),
        (f"{s.eval_set or 'validation'} LM loss, first -> last", _arrow(s.eval_loss_first, s.eval_loss_last)),
        (
            "KL, first -> at the switch -> last",
            " -> ".join(_number(value) for value in (s.kl_first, s.kl_switch, s.kl_last)),
        ),
        (
            "  of a uniform index",
            " -> ".join(_number(value) for value in (s.kl_uniform_first, s.kl_uniform_switch, s.kl_uniform_last)),
        ),
        ("dense -> sparse loss at the switch", _switch_text(s)),
        ("block recall", _number(recall.block_recall)),
        (
            "score recall (random selection, skill)",
            f"{_number(recall.score_recall)} ({_number(recall.random_score_recall)}, {_number(recall.skill)})",
        ),
        ("captured attention mass", _number(recall.captured_mass)),
        ("long rows, which the recalls count", _number(recall.long_row_fraction)),
        ("recalls measured on", recall.source),
    ]
    if s.forced_balance:
        rows.append(("FORCED BALANCE", "experts chosen in turn: this run measures speed, its losses mean nothing"))
    if s.nonfinite_losses:
        rows.append(("records with a non-finite loss", f"{s.nonfinite_losses:,}"))
    return rows


def format_summary(summary: RunSummary) -> str:
    """The summary as an aligned two-column table."""
    rows = summary_rows(summary)
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _number(value: float | None, spec: str = ".4f") -> str:
    return NOT_AVAILABLE if value is None else format(value, spec)


def _count(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else format_count(value)


def _arrow(first: float | None, last: float | None) -> str:
    return f"{_number(first)} -> {_number(last)}"


def _switch_text(summary: RunSummary) -> str:
    difference = summary.switch_relative_difference
    if difference is None:
        return NOT_AVAILABLE
    losses = _arrow(summary.switch_dense_loss, summary.switch_sparse_loss)
    return f"{losses} ({difference:+.2%}, step {summary.switch_eval_step:,})"
