"""Who holds what: sizes of the parallel groups of a layout, and the layers of each pipeline stage."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...model.config import ModelSpec, ParallelConfig
from ..layout_checks import splits_evenly

Slot = int | str
"""A 0-based layer, those of MTP numbered on from the decoder's, or 'embedding' or 'head'."""


@dataclass(frozen=True)
class Layout:
    """The group sizes that follow from `parallel` and the number of GPUs, as Megatron's parallel state makes them."""

    parallel: ParallelConfig
    world_size: int

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.parallel.data_parallel(self.world_size)

    @property
    def dense_copies(self) -> int:
        """Ranks with the same dense parameters, over which their optimizer states are sharded."""
        return self.data_parallel * self.parallel.context

    @property
    def expert_copies(self) -> int:
        """Ranks with the same experts."""
        return self.world_size // self.parallel.expert_ranks


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


Held = Counter[Slot]
"""Slots of a rank; layers of a kind (index branch or not, experts or not, MTP or not) are counted as its first one."""


def held_by_chunk(spec: ModelSpec) -> list[list[Held]]:
    """`chunk_slots`, counted, with the MTP layers beside the head, where Megatron puts them without counting them."""
    seen: dict[tuple[bool, bool, bool], int] = {}
    first: dict[Slot, Slot] = {"embedding": "embedding", "head": "head"}
    for layer in [*range(spec.model.num_layers), *spec.mtp_layers]:
        first[layer] = seen.setdefault((spec.is_msa(layer), spec.is_moe(layer), spec.is_mtp(layer)), layer)
    held = [[Counter(first[slot] for slot in chunk) for chunk in stage] for stage in chunk_slots(spec)]
    held[-1][-1].update(first[layer] for layer in spec.mtp_layers)
    return held


def together(chunks: Iterable[Held]) -> Held:
    """All chunks of a stage."""
    return sum(chunks, Counter())
