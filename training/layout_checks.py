"""Checks of the parallel sizes: against the model, the number of processes and the batch (see checks.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .check_tools import choices, divisors, near, value_of

if TYPE_CHECKING:
    from .config import TrainConfig


def layout_problems(config: TrainConfig, world_size: int | None) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    yield from _context(config)
    yield from _tensor(config)
    if config.moe.num_experts % parallel.expert:
        yield (
            f"parallel.expert ({parallel.expert}) must divide moe.num_experts ({config.moe.num_experts}). "
            f"Use {choices(divisors(config.moe.num_experts))}."
        )
    for key in ("expert", "expert_tensor"):
        if (size := getattr(parallel, key)) > 1 and not config.spec.moe_layers:
            yield f"parallel.{key} ({size}) has no effect without MoE layers. Set parallel.{key}=1."
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline ({parallel.virtual_pipeline}) needs parallel.pipeline above 1. "
            "Set parallel.virtual_pipeline=1."
        )
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if not splits_evenly(layers, parallel.pipeline, parallel.virtual_pipeline):
        yield (
            f"parallel.pipeline x parallel.virtual_pipeline ({chunks}) must divide model.num_layers ({layers}), or "
            f"{layers + 2} when the embedding and the loss count as layers. Use {choices(_pipelines(layers))}."
        )
    if world_size is None:
        return
    for name, size in (
        ("parallel.tensor x parallel.context x parallel.pipeline", parallel.model_ranks),
        ("parallel.pipeline x parallel.expert x parallel.expert_tensor", parallel.expert_ranks),
    ):
        if world_size % size:
            yield (
                f"{name} ({size}) must divide the number of processes ({world_size}). Use a product out of "
                f"{choices(divisors(world_size))}, or start {choices(near(world_size, parallel.smallest_world))} "
                "processes."
            )


def _tensor(config: TrainConfig) -> Iterator[str]:
    """What tensor parallelism splits: KV groups, vocabulary rows, channels of the MLPs; and tokens, with `sequence`."""
    parallel, model, moe = config.parallel, config.model, config.moe
    tensor = parallel.tensor
    if parallel.expert_tensor not in (1, tensor):
        yield (
            f"parallel.expert_tensor ({parallel.expert_tensor}) must be 1 or parallel.tensor ({tensor}). "
            f"Use {choices(sorted({1, tensor}))}."
        )
    elif moe.expert_hidden_size % parallel.expert_tensor:
        yield (
            f"parallel.expert_tensor ({parallel.expert_tensor}) must divide moe.expert_hidden_size "
            f"({moe.expert_hidden_size}). Use 1."
        )
    if tensor == 1:
        if parallel.sequence:
            yield "parallel.sequence has no effect without tensor parallelism. Set it to false."
        return
    if model.num_kv_heads % tensor:
        yield (
            f"parallel.tensor ({tensor}) must divide model.num_kv_heads ({model.num_kv_heads}): a rank has whole KV "
            f"groups. Use {choices(divisors(model.num_kv_heads))}."
        )
    for key in ("model.vocab_size", "moe.dense_hidden_size", "moe.shared_hidden_size"):
        if (size := int(value_of(config, key))) % tensor:
            # a vocabulary must not shrink below the tokenizer's
            sizes = near(size, tensor)[-1:] if key == "model.vocab_size" else near(size, tensor)
            yield f"{key} ({size}) must be a multiple of parallel.tensor ({tensor}). Use {choices(sizes)}."
    if model.mtp_layers and model.hidden_size % tensor:
        yield (
            f"model.hidden_size ({model.hidden_size}) must be a multiple of parallel.tensor ({tensor}) with "
            f"model.mtp_layers. Use {choices(near(model.hidden_size, tensor))}."
        )
    if config.spec.moe_layers and not parallel.sequence:
        yield (
            f"parallel.tensor ({tensor}) with MoE layers needs parallel.sequence: every rank would route every token. "
            "Set parallel.sequence=true."
        )


def _context(config: TrainConfig) -> Iterator[str]:
    """What splits the tokens of a micro-batch: two chunks for each context rank, then equal parts with `sequence`."""
    parallel, training = config.parallel, config.training
    parts = 2 * parallel.context if parallel.context > 1 else 1
    name = "2 x parallel.context" if parallel.context > 1 else "parallel.tensor"
    if parallel.sequence:
        parts = math.lcm(parts, parallel.context * parallel.tensor)
        name = "2 x parallel.context and parallel.context x parallel.tensor" if parallel.context > 1 else name
    if (tokens := training.micro_batch_size * training.seq_length) % parts:
        yield (
            f"training.micro_batch_size x training.seq_length ({tokens}) must be a multiple of {name}, which takes "
            f"{parts}. Use training.seq_length={-(-training.seq_length // parts) * parts}."
        )


def splits_evenly(num_layers: int, pipeline: int, virtual_pipeline: int) -> bool:
    """Whether Megatron can split the layers, alone or with the embedding and the loss counted as one layer each."""
    chunks = pipeline * virtual_pipeline
    return num_layers % chunks == 0 or (chunks > 1 and (num_layers + 2) % chunks == 0 and num_layers + 2 > 2 * chunks)


def _pipelines(num_layers: int) -> list[int]:
    return [size for size in range(1, num_layers + 1) if splits_evenly(num_layers, size, 1)]


def batch_problems(config: TrainConfig, world_size: int) -> Iterator[str]:
    training, parallel = config.training, config.parallel
    data_parallel = parallel.data_parallel(world_size)
    rows = training.micro_batch_size * data_parallel
    unit, product = "micro_batch_size x data-parallel size", f"{training.micro_batch_size} x {data_parallel}"
    if parallel.virtual_pipeline > 1:
        # Megatron's interleaved schedule takes micro-batches in rounds of as many as there are stages
        rows *= parallel.pipeline
        unit, product = f"{unit} x parallel.pipeline, with virtual stages,", f"{product} x {parallel.pipeline}"
    for key in ("global_batch_size", "eval_samples"):
        if (size := getattr(training, key)) % rows:
            yield f"training.{key} ({size}) must be a multiple of {unit} ({product}). Use {choices(near(size, rows))}."
    if bad := [size for size in training.batch_ramp[:2] if size % rows]:
        yield f"training.batch_ramp: start and increment {bad} must be multiples of {unit} ({product})."
