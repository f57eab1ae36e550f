"""The data of a run: training, validation and test sets, and the record by which a resumed run knows its place."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.dataset import BlendedDataset, SourceUse, build_dataset
from ..data.indexed import read_manifest
from .config import TrainConfig, blend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationSet:
    """One source of a validation or test set, evaluated on its own."""

    label: str
    share: float
    datasets: list[BlendedDataset | None]
    """For each stage of the run, samples of its length; None where it has no `eval_samples`."""


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    train: BlendedDataset
    valid: list[EvaluationSet]
    test: list[EvaluationSet]

    def record(self, config: TrainConfig, consumed_samples: int) -> dict[str, Any]:
        """What the samples up to `consumed_samples` depended on, in plain types: a checkpoint holds it."""
        prints = {prefix: manifest.fingerprint for prefix, manifest in self.train.manifests.items()}
        begun = [stage for stage in self.train.stages if stage.start < max(consumed_samples, 1)]
        return {
            "training.seq_length": config.training.seq_length,
            "training.seed": config.training.seed,
            "data.packing": config.data.packing.name,
            "data.long_documents": config.data.long_documents.name,
            "total_samples": config.total_samples,
            "total_tokens": config.training.total_tokens,
            "lengths": [[start, size] for start, size in self.train.lengths if start < max(consumed_samples, 1)],
            "stages": [[stage.start, [[prints[p], share] for p, share in stage.shares.items()]] for stage in begun],
            "prefixes": {print_: prefix for prefix, print_ in prints.items()},
            "consumed": {prints[prefix]: n for prefix, n in self.train.consumed(consumed_samples).items() if n},
        }

    def check(self, stored: Mapping[str, Any], config: TrainConfig, consumed_samples: int) -> None:
        """Raise ValueError when a run that consumed samples under `stored` would repeat or skip some under `config`.

        What is still to come may change: the run's length, later blends, the paths of the data.
        """
        if "lengths" not in stored:
            raise ValueError(
                "the checkpoint is of an earlier version, which did not record the lengths of its samples. Start a new "
                "run from its weights with training.init_from."
            )
        if consumed_samples > config.total_samples:
            raise ValueError(
                f"{consumed_samples} samples are consumed, more than the {config.total_samples} of this run. Use "
                f"training.total_tokens={stored['total_tokens']} or more."
            )
        now = self.record(config, consumed_samples)
        keys = ("training.seq_length", "training.seed", "data.packing", "data.long_documents")
        if changed := [f"{key}={stored[key]} (it is {now[key]})" for key in keys if stored[key] != now[key]]:
            raise ValueError(
                f"this run would order the samples anew, repeating some and skipping others. Use {', '.join(changed)}."
            )
        if stored["lengths"] != now["lengths"]:
            before, after = (
                ", ".join(f"{size} from sample {start}" for start, size in r["lengths"]) for r in (stored, now)
            )
            raise ValueError(
                f"the {consumed_samples} samples so far had sequence length {before}; now it would be {after}. Restore "
                "the stages of training.length_schedule that have begun; later ones may change."
            )
        if stored["stages"] != now["stages"] or stored["consumed"] != now["consumed"]:
            tokens = self.train.positions(consumed_samples)
            raise ValueError(
                f"the blend of the {consumed_samples} samples so far was {_words(stored)}; now it is {_words(now)}. "
                "That would repeat some samples and skip others. Restore data.train and data.train_schedule as they "
                "were; to go on with another blend, add it from here on: "
                f"data.train_schedule=[{{from_tokens: {tokens}, blend: [PREFIX:SHARE, ...]}}]."
            )
        if stored["total_samples"] != now["total_samples"]:
            logger.warning(
                "the run was planned for %d samples and now is for %d: the order of the samples is the same, and the "
                "learning rate follows the new length from here on",
                stored["total_samples"],
                now["total_samples"],
            )
        logger.info("samples consumed so far: %s", self.train.consumed(consumed_samples))


def build_datasets(config: TrainConfig) -> RunData:
    """All sets; the shares, tokens and epochs of every training source go to the log before the first step.

    Raises ValueError when a source's tokens do not fit the model's vocabulary.
    """
    training, data = config.training, config.data
    arguments: dict[str, Any] = {
        "seed": training.seed,
        "cache_dir": Path(data.cache_dir),
        "packing": data.packing,
        "long_documents": data.long_documents,
    }
    stages = [(0, blend(data.train))]
    stages += [(config.samples_at(stage.from_tokens), blend(stage.blend)) for stage in data.train_schedule]
    used = [prefix for _, shares in stages for prefix in shares]
    for prefix in dict.fromkeys([*used, *blend(data.valid), *blend(data.test)]):
        if (size := read_manifest(Path(prefix)).vocab_size) > config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size ({config.model.vocab_size}) is smaller than the vocabulary of {prefix} ({size}). "
                f"Raise model.vocab_size to {size} or more."
            )
    lengths = [(stage.first_sample, stage.seq_length) for stage in config.stages]
    train = build_dataset(stages, num_samples=config.total_samples, seq_length=lengths, **arguments)
    for line in describe_uses(train):
        logger.info(line)

    def evaluation_sets(sources: list[str]) -> list[EvaluationSet]:
        shares = blend(sources) if training.eval_samples else {}
        labels = unique_labels(list(shares))
        return [
            EvaluationSet(
                labels[prefix],
                share / sum(shares.values()),
                [
                    build_dataset(
                        [(0, {prefix: 1.0})],
                        num_samples=stage.eval_samples,
                        seq_length=stage.seq_length,
                        **arguments,
                    )
                    if stage.eval_samples
                    else None
                    for stage in config.stages
                ],
            )
            for prefix, share in shares.items()
        ]

    return RunData(train, evaluation_sets(data.valid), evaluation_sets(data.test))


def describe_uses(dataset: BlendedDataset) -> list[str]:
    """A line for each source: what the run takes of it; with several sequence lengths, also what each takes."""
    lines = [_words_of_use(use) for use in dataset.uses()]
    for number, (start, size) in enumerate(dataset.lengths if len(dataset.lengths) > 1 else ()):
        uses = [_words_of_use(use) for use in dataset.uses(number) if use.num_samples]
        lines += [f"from sample {start}, sequence length {size}: {use}" for use in uses]
    return lines


def _words_of_use(use: SourceUse) -> str:
    return (
        f"data {use.prefix}: {use.share:.2%} of the tokens, {use.num_samples} samples, {use.num_tokens} tokens, "
        f"{use.num_epochs:.3f} epochs, {use.padding:.2%} padding"
        + (f", {use.num_dropped} documents too long and left out" if use.num_dropped else "")
    )


def unique_labels(prefixes: list[str]) -> dict[str, str]:
    """Short names for metrics: the last parts of each path that tell it from the others.

    Example: /data/web/valid and /data/code/valid are web_valid and code_valid.
    """
    parts = {prefix: [re.sub(r"[^A-Za-z0-9.-]", "_", part) for part in Path(prefix).parts] for prefix in prefixes}
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        labels = {prefix: "_".join(path[-depth:]) for prefix, path in parts.items()}
        if len(set(labels.values())) == len(labels):
            return labels
    return {prefix: f"source_{number}" for number, prefix in enumerate(prefixes)}


def _words(record: Mapping[str, Any]) -> str:
    stages = [
        f"from sample {start} " + " ".join(f"{record['prefixes'].get(p, p[:12])}:{share:.4g}" for p, share in shares)
        for start, shares in record["stages"]
    ]
    return f"{', '.join(stages)} (data {', '.join(p[:8] for p in record['prefixes'])})"
