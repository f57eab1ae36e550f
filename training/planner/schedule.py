"""Which micro-batches a pipeline stage keeps at one time: Megatron's 1F1B and interleaved schedules."""

from collections import Counter
from functools import cache


@cache
def in_flight(pipeline: int, virtual_pipeline: int, stage: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Different loads of the stage's chunks: (micro-batches of chunk 0, of chunk 1, ...), at the end of a forward pass.

    1F1B keeps P - stage micro-batches, at most all of them. The interleaved schedule does (P - stage - 1) x 2 +
    (V - 1) x P forward passes before the first backward, in groups of P micro-batches a chunk, and runs backward
    passes from the last chunk to the first (`pipeline_parallel/schedules.py`, get_pp_rank_microbatches).
    """
    if pipeline == 1:
        return ((1,),)
    if virtual_pipeline == 1:
        return ((min(num_micro_batches, pipeline - stage),),)
    total = num_micro_batches * virtual_pipeline
    warm = min((pipeline - stage - 1) * 2 + (virtual_pipeline - 1) * pipeline, total)
    live: Counter[int] = Counter()
    loads = set()
    # after two turns through all chunks the pattern repeats
    for step in range(min(total, warm + 2 * pipeline * virtual_pipeline)):
        live[step // pipeline % virtual_pipeline] += 1
        loads.add(tuple(live[chunk] for chunk in range(virtual_pipeline)))
        if step >= warm:
            live[virtual_pipeline - 1 - (step - warm) // pipeline % virtual_pipeline] -= 1
    return tuple(sorted(loads))


def bubble(pipeline: int, virtual_pipeline: int, num_micro_batches: int) -> float:
    """Idle time over busy time of a step: (P - 1) / (V x micro-batches)."""
    return (pipeline - 1) / (virtual_pipeline * num_micro_batches)
