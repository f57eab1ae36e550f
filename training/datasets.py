"""The training and validation sets of a run, and what fixes the order of its samples."""

import logging
from pathlib import Path

from torch.utils.data import Dataset

from ..data.dataset import Sample, build_dataset, source_uses
from ..data.prepare import read_manifest
from .config import TrainConfig, blend

logger = logging.getLogger(__name__)


def build_datasets(config: TrainConfig) -> tuple[Dataset[Sample], Dataset[Sample] | None]:
    """(training, validation); the shares and epochs of every source go to the log before the first step.

    Raises ValueError when a source's tokens do not fit the model's vocabulary.
    """
    training, cache = config.training, Path(config.data.cache_dir)
    train, valid = blend(config.data.train), blend(config.data.valid)
    for prefix in (*train, *valid):
        if (size := read_manifest(Path(prefix)).vocab_size) > config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size ({config.model.vocab_size}) is smaller than the vocabulary of {prefix} ({size}). "
                f"Raise model.vocab_size to {size} or more."
            )
    num_samples = data_order(config)[0]
    for use in source_uses(train, num_samples=num_samples, seq_length=training.seq_length):
        logger.info("data %s: %.1f samples, %.3f epochs", use.prefix, use.num_samples, use.num_epochs)
    train_set = build_dataset(
        train,
        num_samples=num_samples,
        seq_length=training.seq_length,
        seed=training.seed,
        cache_dir=cache,
        split_name="train",
    )
    if not training.eval_samples:
        return train_set, None
    valid_set = build_dataset(
        valid,
        num_samples=training.eval_samples,
        seq_length=training.seq_length,
        seed=training.seed,
        cache_dir=cache,
        split_name="valid",
    )
    return train_set, valid_set


def data_order(config: TrainConfig) -> tuple[int, int, int]:
    """(samples of the run, tokens of a sample, seed): with another of these, sample i is another text.

    Kept in checkpoints, so that a run cannot go on with samples it has seen or skip others.
    """
    training = config.training
    return config.total_samples, training.seq_length, training.seed
