"""Which samples a data-parallel rank reads at a step, and the stream of packed micro-batches that follows from it.

The only state is the number of samples consumed by all ranks together. Step by step, the samples of the global batch
are the next `global_batch_size` ones, whatever the data-parallel size and the micro-batch size, so a run may be resumed
under another layout and sees the same data in the same steps.
"""

import signal
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from .dataset import Sample
from .packing import PackedBatch, collate


class DataExhaustedError(ValueError):
    """Fewer samples are left than one global batch needs. Raised on every rank at the same step."""


def batch_indices(
    consumed_samples: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[list[int]]:
    """Sample indices of each micro-batch of rank `dp_rank` for the step after `consumed_samples`.

    Example, global batch 8 in micro-batches of 2 on 2 ranks: rank 0 reads [0, 1], [4, 5], rank 1 [2, 3], [6, 7].
    """
    if consumed_samples < 0:
        raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative.")
    _check_layout("global_batch_size", global_batch_size, micro_batch_size, dp_rank, dp_size)
    return [
        list(range(start + dp_rank * micro_batch_size, start + (dp_rank + 1) * micro_batch_size))
        for start in range(consumed_samples, consumed_samples + global_batch_size, micro_batch_size * dp_size)
    ]


class TrainingStream:
    """The micro-batches of one data-parallel rank, step after step, from `consumed_samples` on.

    With `num_workers` > 0 torch workers read ahead; the order is the same as without. Call `close` (or leave the `with`
    block) to stop them.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        *,
        consumed_samples: int,
        global_batch_size: int | Callable[[int], int],
        micro_batch_size: int | Callable[[int], int],
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
    ) -> None:
        """Batch sizes: of every step, or (ramp-up, longer samples) of the step that starts after so many samples."""
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative.")
        if num_workers < 0:
            raise ValueError(f"data.num_workers ({num_workers}) must not be negative.")
        self.consumed_samples = consumed_samples
        self._num_samples = len(dataset)  # type: ignore[arg-type]
        self._size_at = global_batch_size if callable(global_batch_size) else lambda _: global_batch_size
        self._micro_size_at = micro_batch_size if callable(micro_batch_size) else lambda _: micro_batch_size
        self._dp_size = dp_size
        sizes = self._size_at(consumed_samples), self._micro_size_at(consumed_samples)
        _check_layout("global_batch_size", *sizes, dp_rank, dp_size)

        def indices(consumed: int) -> list[list[int]]:
            return batch_indices(
                consumed,
                global_batch_size=self._size_at(consumed),
                micro_batch_size=self._micro_size_at(consumed),
                dp_rank=dp_rank,
                dp_size=dp_size,
            )

        loader = DataLoader(
            dataset,
            batch_sampler=_MicroBatchSampler(consumed_samples, self._num_samples, self._size_at, indices),
            collate_fn=collate,
            num_workers=num_workers,
            worker_init_fn=_ignore_sigterm if num_workers else None,
            # its own: torch draws the workers' seeds from the global generator otherwise, once more after each restart
            generator=torch.Generator(),
        )
        self._batches: Iterator[PackedBatch] | None = iter(loader)

    def next_step(self) -> list[PackedBatch]:
        """The micro-batches of the next step; `consumed_samples` then counts the whole global batch."""
        if self._batches is None:
            raise ValueError("this TrainingStream is closed. Make a new one from consumed_samples.")
        size = self._size_at(self.consumed_samples)
        if self.consumed_samples + size > self._num_samples:
            raise DataExhaustedError(
                f"the training data are exhausted: {self.consumed_samples} of {self._num_samples} samples are consumed "
                f"and the next step needs {size}. Use a training.total_tokens that the data cover."
            )
        rows = self._micro_size_at(self.consumed_samples) * self._dp_size
        batches = [next(self._batches) for _ in range(size // rows)]
        self.consumed_samples += size
        return batches

    def close(self) -> None:
        """Stop the workers."""
        self._batches = None  # torch stops its workers when their iterator goes

    def __enter__(self) -> "TrainingStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation_batches(
    dataset: Dataset[Sample], num_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[PackedBatch]:
    """This rank's share of samples 0..num_samples - 1, in micro-batches; all ranks get the same number of them.

    The samples of all ranks together are the same in every layout. Each call starts anew.
    """
    available = len(dataset)  # type: ignore[arg-type]
    if num_samples > available:
        raise ValueError(
            f"evaluation wants {num_samples} samples, but the dataset holds {available}. "
            "Build it with more samples or evaluate fewer."
        )
    _check_layout("the number of evaluation samples", num_samples, micro_batch_size, dp_rank, dp_size)
    micro_batches = batch_indices(
        0, global_batch_size=num_samples, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size
    )
    return (collate([dataset[index] for index in indices]) for indices in micro_batches)


class _MicroBatchSampler:
    """Index lists of the micro-batches of all steps from `consumed_samples` to the end of the samples."""

    def __init__(
        self,
        consumed_samples: int,
        num_samples: int,
        size_at: Callable[[int], int],
        indices: Callable[[int], list[list[int]]],
    ) -> None:
        self._consumed_samples, self._num_samples = consumed_samples, num_samples
        self._size_at, self._indices = size_at, indices

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self._consumed_samples
        while consumed + (size := self._size_at(consumed)) <= self._num_samples:
            yield from self._indices(consumed)
            consumed += size


def _check_layout(what: str, num_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
    if micro_batch_size < 1 or dp_size < 1:
        raise ValueError(f"micro_batch_size ({micro_batch_size}) and dp_size ({dp_size}) must be at least 1.")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank ({dp_rank}) must lie in 0..{dp_size - 1} (dp_size {dp_size}).")
    if num_samples < 1 or num_samples % (micro_batch_size * dp_size):
        raise ValueError(
            f"{what} ({num_samples}) must be a positive multiple of micro_batch_size ({micro_batch_size}) x "
            f"data-parallel size ({dp_size}). Use a multiple of {micro_batch_size * dp_size}."
        )


def _ignore_sigterm(_worker_id: int) -> None:
    """A scheduler's SIGTERM goes to every process of the job; the trainer answers it, and needs its workers until then.

    Workers still end with their parent: torch's worker loop watches for its death.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
