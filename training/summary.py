"""What a run achieved, in numbers, read from its `metrics.jsonl` alone."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sinks import read_metrics

Point = tuple[int, float]  # consumed tokens, value
WINDOW_SHARE = 20  # the first and last training losses are means over 1/20 of the records
MAX_WINDOW = 50


@dataclass(frozen=True)
class PhaseChange:
    """Training went from one phase to another; `tokens` were consumed when the new one was first seen."""

    tokens: int
    step: int
    before: str
    after: str


@dataclass(frozen=True)
class RecallValues:
    """Index quality at one moment: a recall means nothing without the random one beside it."""

    source: str
    block_recall: float | None
    score_recall: float | None
    random_score_recall: float | None
    skill: float | None
    captured_mass: float | None
    long_row_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The end-of-run numbers. None means that the run did not log the value."""

    steps: int | None
    tokens: int | None
    wall_time_s: float | None
    """First to last record, pauses between restarts included."""
    tokens_per_s_per_gpu: float | None
    """Median over the records."""
    phase: str | None
    switch: PhaseChange | None
    """Into the sparse phase."""

    train_window: int
    """Records in a mean of `train_loss_first` and `train_loss_last`."""
    train_loss_first: float | None
    train_loss_last: float | None
    nonfinite_losses: int
    eval_set: str | None
    eval_loss_first: float | None
    eval_loss_last: float | None

    kl_first: float | None
    kl_uniform_first: float | None
    """KL(P || uniform), sampled at the nearest step of the same phase; so are the two below."""
    kl_switch: float | None
    """Last value before the sparse phase."""
    kl_uniform_switch: float | None
    kl_last: float | None
    kl_uniform_last: float | None

    switch_eval_step: int | None
    switch_dense_loss: float | None
    """Validation loss with full attention, same weights as `switch_sparse_loss`."""
    switch_sparse_loss: float | None
    recall: RecallValues
    forced_balance: bool
    """Experts were chosen in turn at some step (moe.force_balance)."""

    @property
    def switch_relative_difference(self) -> float | None:
        """(sparse - dense) / dense of the two validation losses at the switch."""
        if not self.switch_dense_loss or self.switch_sparse_loss is None:
            return None
        return (self.switch_sparse_loss - self.switch_dense_loss) / self.switch_dense_loss


class History:
    """The records of a run, one per step, with the questions that a summary and a plot ask."""

    def __init__(self, records: Iterable[dict[str, Any]]):
        by_step: dict[int, dict[str, Any]] = {}
        for record in records:  # an evaluation may have a line of its own
            by_step.setdefault(record["step"], {}).update(record)
        self.records = [by_step[step] for step in sorted(by_step)]
        self.phase_changes = list(self._find_phase_changes())

    @classmethod
    def load(cls, run_dir: Path) -> "History":
        """Raises ValueError when the folder has no records."""
        path = Path(run_dir) / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{run_dir} holds no metrics.jsonl. Give the folder of a run.")
        history = cls(read_metrics(path))
        if not history.records:
            raise ValueError(f"{path} holds no records yet.")
        return history

    def _find_phase_changes(self) -> Iterable[PhaseChange]:
        before = None
        for record in self.records:
            phase = record.get("train/phase")
            if phase and before and phase != before:
                yield PhaseChange(record["consumed_tokens"], record["step"], before, phase)
            before = phase or before

    @property
    def switch(self) -> PhaseChange | None:
        return next((change for change in self.phase_changes if change.after == "sparse"), None)

    def series(self, name: str) -> list[Point]:
        """(consumed tokens, value) of the records that have a finite value."""
        return [
            (record["consumed_tokens"], record[name])
            for record in self.records
            if record.get(name) is not None and math.isfinite(record[name])
        ]

    def names(self) -> list[str]:
        return sorted({name for record in self.records for name in record if "/" in name})

    def eval_sets(self) -> list[str]:
        """Evaluation sets with a loss, `valid` or `validation` first."""
        names = [n.split("/") for n in self.names() if n.startswith("eval/")]
        sets = {parts[1] for parts in names if len(parts) == 3 and parts[2].startswith("lm_loss")}
        return sorted(sets, key=lambda name: (name not in ("valid", "validation"), name))


def summarize(history: History) -> RunSummary:
    """The summary of a run; whatever was not logged stays None."""
    records, switch = history.records, history.switch
    losses = [value for _, value in history.series("train/lm_loss")]
    window = max(1, min(MAX_WINDOW, len(losses) // WINDOW_SHARE))
    logged = sum("train/lm_loss" in record for record in records)
    eval_set = next(iter(history.eval_sets()), None)
    eval_losses = [value for _, value in history.series(f"eval/{eval_set}/lm_loss")]
    speed = [value for _, value in history.series("perf/tokens_per_s_per_gpu")]
    times = [record["time"] for record in records if "time" in record]
    with_kl = [record for record in records if _finite(record, "indexer/kl") is not None]
    before_switch = [record for record in with_kl if switch and record["step"] < switch.step]
    kl_first, kl_switch, kl_last = _at(with_kl, 0), _at(before_switch, -1), _at(with_kl, -1)
    evaluation = _switch_evaluation(history, eval_set)
    return RunSummary(
        steps=records[-1]["step"] if records else None,
        tokens=records[-1]["consumed_tokens"] if records else None,
        wall_time_s=max(times) - min(times) if times else None,
        tokens_per_s_per_gpu=statistics.median(speed) if speed else None,
        phase=next((r["train/phase"] for r in reversed(records) if r.get("train/phase")), None),
        switch=switch,
        train_window=window,
        train_loss_first=statistics.fmean(losses[:window]) if losses else None,
        train_loss_last=statistics.fmean(losses[-window:]) if losses else None,
        nonfinite_losses=logged - len(losses),
        eval_set=eval_set,
        eval_loss_first=eval_losses[0] if eval_losses else None,
        eval_loss_last=eval_losses[-1] if eval_losses else None,
        kl_first=_finite(kl_first, "indexer/kl"),
        kl_uniform_first=_uniform_beside(records, kl_first),
        kl_switch=_finite(kl_switch, "indexer/kl"),
        kl_uniform_switch=_uniform_beside(records, kl_switch),
        kl_last=_finite(kl_last, "indexer/kl"),
        kl_uniform_last=_uniform_beside(records, kl_last),
        switch_eval_step=evaluation[0],
        switch_dense_loss=evaluation[1],
        switch_sparse_loss=evaluation[2],
        recall=_last_recall(history, eval_set),
        forced_balance=any(r.get("moe/forced_balance") for r in records),
    )


def summarize_run(run_dir: Path) -> RunSummary:
    """`summarize` of a run folder. Raises ValueError when it has no records."""
    return summarize(History.load(run_dir))


def _at(records: list[dict[str, Any]], index: int) -> dict[str, Any]:
    return records[index] if records else {}


def _finite(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    return value if value is not None and math.isfinite(value) else None


def _uniform_beside(records: list[dict[str, Any]], kl_record: dict[str, Any]) -> float | None:
    """KL(P || uniform) of the nearest step in the same phase: it is sampled, so the step itself may have none."""
    if not kl_record:
        return None
    phase = kl_record.get("train/phase")
    same = [r for r in records if r.get("train/phase") == phase and _finite(r, "indexer/kl_uniform") is not None]
    nearest = min(same, key=lambda r: abs(r["step"] - kl_record["step"]), default={})
    return _finite(nearest, "indexer/kl_uniform")


def _switch_evaluation(history: History, eval_set: str | None) -> tuple[int | None, float | None, float | None]:
    """(step, dense loss, sparse loss) of the evaluation in both phases that is nearest to the switch.

    One of the two may be the plain `lm_loss`, evaluated in the phase that training was in.
    """
    found: list[tuple[int, float, float]] = []
    phase = None
    prefix = f"eval/{eval_set}/lm_loss"
    for record in history.records:
        phase = record.get("train/phase", phase)
        losses = {name: _finite(record, f"{prefix}_{name}") for name in ("dense", "warmup", "sparse")}
        if not any(value is not None for value in losses.values()):
            continue
        if phase in losses and losses[phase] is None:
            losses[phase] = _finite(record, prefix)
        dense = losses["dense"] if losses["dense"] is not None else losses["warmup"]
        if dense is not None and losses["sparse"] is not None:
            found.append((record["step"], dense, losses["sparse"]))
    if not found:
        return None, None, None
    switch = history.switch
    return min(found, key=lambda item: abs(item[0] - switch.step)) if switch else found[-1]


def _last_recall(history: History, eval_set: str | None) -> RecallValues:
    """The last record with a recall: of the evaluation set if it has one, else of training."""
    for source, label in ((f"eval/{eval_set}", f"{eval_set} set"), ("indexer", "training")):
        for record in reversed(history.records):
            if _finite(record, f"{source}/score_recall") is None:
                continue
            return RecallValues(
                f"{label}, step {record['step']:,}",
                _finite(record, f"{source}/block_recall"),
                _finite(record, f"{source}/score_recall"),
                _finite(record, f"{source}/random_score_recall"),
                _finite(record, f"{source}/score_recall_skill"),
                _finite(record, f"{source}/captured_mass"),
                _finite(record, f"{source}/long_row_fraction"),
            )
    return RecallValues("none logged", None, None, None, None, None, None)
