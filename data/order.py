"""Which document part is in which sample, and which source gives which sample: arrays of plain integers.

Nothing here depends on how long the run is: sample `i` of a longer run is sample `i` of a shorter one. Megatron's own
index shuffles all epochs together and so orders a longer run anew; its compiled helpers, which are used here, do not.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import numpy as np

Packing = Enum("Packing", ["concat", "best_fit"])
LongDocuments = Enum("LongDocuments", ["split", "drop"])

# megatron-core's helper numbers the documents of all epochs of a source with int32.
MAX_DOCUMENT_INDEX = 2**31 - 1
MAX_SOURCES = 2**15 - 1


@dataclass(frozen=True)
class Stage:
    """The blend from sample `start` of the run on, until the next stage begins."""

    start: int
    shares: dict[str, float]  # prefix -> share of the samples, adding up to 1


def blend_order(
    stages: Sequence[Stage], num_samples: int, sources: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(number of the source int16 [num_samples], number of the sample within it int64 [num_samples]).

    Sources are numbered as in `sources`, by default in the order in which the stages name them. At any time each has
    given its share of the samples of the current stage to within one; a source goes on in the next stage where it was.
    """
    helpers = compiled_helpers()
    sources = source_names(stages) if sources is None else list(sources)
    source, sample = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    used = np.zeros(len(sources), dtype=np.int64)
    for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), num_samples], strict=True):
        size = min(end, num_samples) - stage.start
        if size <= 0:
            break
        own_source, own_sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
        weights = np.array(list(stage.shares.values()), dtype=np.float64)
        helpers.build_blending_indices(own_source, own_sample, weights, weights.size, size, False)
        numbers = np.array([sources.index(name) for name in stage.shares], dtype=np.int16)[own_source]
        part = slice(stage.start, stage.start + size)
        source[part], sample[part] = numbers, own_sample + used[numbers]
        used += np.bincount(numbers, minlength=len(sources))
    return source, sample


def source_names(stages: Sequence[Stage]) -> list[str]:
    """Every source once, in the order in which the stages name them."""
    return list(dict.fromkeys(name for stage in stages for name in stage.shares))


@dataclass(frozen=True)
class ConcatOrder:
    """Samples cut from the shuffled documents of as many epochs as it takes, one after another."""

    documents: np.ndarray  # int32 [epochs * documents]: their order
    starts: np.ndarray  # int [samples + 1, 2]: (index into `documents`, offset) where the samples of the text start
    shuffle: np.ndarray  # uint32 or int64 [samples]: which of those is sample i


def concat_order(lengths: np.ndarray, *, num_samples: int, seq_length: int, seed: int) -> ConcatOrder:
    """At least `num_samples` samples of `seq_length` tokens and one label from documents of `lengths` int32 [n].

    Documents are shuffled epoch by epoch, and laid end to end over epochs. Samples are shuffled among those that the
    same epoch completes, so that a sample's content is known once its epoch is.
    """
    num_tokens = int(lengths.sum(dtype=np.int64))
    num_epochs = epochs_for(num_tokens, num_samples, seq_length)
    check_entries(lengths.size * num_epochs, lengths.size, num_epochs)
    documents = np.empty(lengths.size * num_epochs, dtype=np.int32)
    shuffles: list[np.ndarray] = []
    done = 0
    for epoch in range(num_epochs):
        random = epoch_generator(seed, epoch)
        own = documents[epoch * lengths.size : (epoch + 1) * lengths.size]
        own[:] = np.arange(lengths.size, dtype=np.int32)
        random.shuffle(own)
        end = samples_of(num_tokens * (epoch + 1), seq_length)
        own_samples = np.arange(done, end, dtype=np.int64 if end > np.iinfo(np.uint32).max else np.uint32)
        random.shuffle(own_samples)
        shuffles.append(own_samples)
        done = end
    starts = compiled_helpers().build_sample_idx(
        np.ascontiguousarray(lengths, dtype=np.int32), documents, seq_length, num_epochs, num_tokens, True, True
    )
    assert len(starts) == done + 1, (len(starts), done)
    return ConcatOrder(documents, starts, np.concatenate(shuffles))


def check_entries(number: int, num_documents: int, num_epochs: int) -> None:
    """Raise ValueError where a source has more document entries than can be numbered."""
    if number > MAX_DOCUMENT_INDEX:
        raise ValueError(
            f"{num_documents} documents in {num_epochs} epochs exceed the limit of {MAX_DOCUMENT_INDEX} document "
            "entries of a source. Split the source or draw fewer samples."
        )


def samples_of(num_tokens: int, seq_length: int) -> int:
    """Samples in `num_tokens` consecutive tokens; the last label needs one token more."""
    return (num_tokens - 1) // seq_length


def epochs_for(num_tokens: int, num_samples: int, seq_length: int) -> int:
    """Passes over `num_tokens` tokens that give `num_samples` samples."""
    return -(-(num_samples * seq_length + 1) // num_tokens)


def epoch_generator(seed: int, epoch: int) -> np.random.RandomState:
    """The random numbers of an epoch. The first is what megatron-core would use for the run's only epoch."""
    return np.random.RandomState(seed if not epoch else np.random.MT19937(np.random.SeedSequence([seed, epoch])))


def compiled_helpers() -> ModuleType:
    """megatron-core's dataset helpers; ImportError unless their compiled part loads. It is never compiled here."""
    try:
        return importlib.import_module("megatron.core.datasets.helpers")
    except ImportError as err:
        raise ImportError(
            f"megatron-core's compiled dataset helper (megatron/core/datasets/helpers_cpp) does not load: {err}. "
            "Install a megatron-core wheel that was built for this version of Python."
        ) from err
