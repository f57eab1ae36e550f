"""Who holds what: sizes of the parallel groups of a layout, and the layers of each pipeline stage."""

from dataclasses import dataclass

from ...model.config import ModelSpec, ParallelConfig
from ..checks import splits_evenly

Slot = int | str
"""A 0-based layer, or 'embedding' or 'head'."""


@dataclass(frozen=True)
class Layout:
    """The group sizes that follow from `parallel` and the number of GPUs, as Megatron's parallel state makes them."""

    parallel: ParallelConfig
    world_size: int

    @property
    def expert_tensor(self) -> int:
        """Ranks that share each expert's channels; 1 where the config has no such key."""
        return getattr(self.parallel, "expert_tensor", 1)

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        parallel = self.parallel
        return self.world_size // (parallel.tensor * parallel.pipeline * parallel.context)

    @property
    def dense_copies(self) -> int:
        """Ranks with the same dense parameters, over which their optimizer states are sharded."""
        return self.data_parallel * self.parallel.context

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts."""
        return self.world_size // (self.parallel.pipeline * self.parallel.expert * self.expert_tensor)


def chunk_slots(spec: ModelSpec) -> list[list[list[Slot]]]:
    """[pipeline stage][virtual stage] -> what it holds, in order.

    Megatron deals chunks out round: chunk c of V x P belongs to stage c mod P. Layers that do not divide by the chunks
    count the embedding and the loss as one layer each (`model/mcore.py`).
    """
    parallel, num_layers = spec.parallel, spec.model.num_layers
    chunks = parallel.pipeline * parallel.virtual_pipeline
    assert splits_evenly(num_layers, parallel.pipeline, parallel.virtual_pipeline)
    slots: list[Slot] = ["embedding", *range(num_layers), "head"]
    if num_layers % chunks == 0:
        size = num_layers // chunks
        split = [slots[1:-1][i * size : (i + 1) * size] for i in range(chunks)]
        split[0] = ["embedding", *split[0]]
        split[-1] = [*split[-1], "head"]
    else:
        size = len(slots) // chunks
        split = [slots[i * size : (i + 1) * size] for i in range(chunks)]
    return [split[stage :: parallel.pipeline] for stage in range(parallel.pipeline)]


def stage_slots(spec: ModelSpec) -> list[list[Slot]]:
    """What each pipeline stage holds, its virtual stages together."""
    return [[slot for chunk in stage for slot in chunk] for stage in chunk_slots(spec)]
