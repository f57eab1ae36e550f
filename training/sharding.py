"""Does a layout add up? Every rank's share of the model, built on the meta device in a world that is only a number."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import nn

from ..model.config import ModelSpec, ParallelConfig
from ..model.gpt import build_on_meta
from ..model.parallel import fake_rank
from ..model.parameters import count_parameters
from .checkpoint import MODEL_METADATA
from .planner.stages import Held, held_by_chunk, together
from .planner.states import rank_parameters


class ShardingError(RuntimeError):
    """The ranks' shares are not the model: a fault of the code, not of a config."""


@dataclass(frozen=True)
class Coordinate:
    """What decides a rank's share: ranks that agree in it hold the same."""

    tensor: int
    expert_tensor: int
    expert: int
    pipeline: int


@dataclass(frozen=True)
class Shard:
    """A box of one tensor of the model, as a checkpoint names it."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_main: bool
    """Whether a checkpoint takes it from this rank; the others are copies."""
    is_parameter: bool


@dataclass(frozen=True)
class RankParameters:
    """Data-parallel ranks hold copies, of experts fewer than of the rest."""

    dense: int
    experts: int


@dataclass(frozen=True)
class Share:
    shards: list[Shard]
    parameters: RankParameters


def check_sharding(spec: ModelSpec, seq_length: int, world_size: int) -> str:
    """Build one rank of each coordinate and check that their shares make the model, each element exactly once.

    Returns one line that says what was found. Raises ShardingError when a tensor has elements that no rank saves or two
    do, when the parameters do not sum up to the model's, or when a rank's count is not that of `rank_parameters`.
    """
    stages, main_shards = [_by_arithmetic(spec, together(chunks)) for chunks in held_by_chunk(spec)], []
    coordinates = representatives(spec.parallel, world_size)
    for coordinate, rank in coordinates.items():
        share = share_of_rank(spec, seq_length, rank, world_size)
        if share.parameters != (expected := stages[coordinate.pipeline]):
            raise ShardingError(f"rank {rank} {coordinate} holds {share.parameters}; by arithmetic {expected}.")
        main_shards += [shard for shard in share.shards if shard.is_main]
    check_cover(main_shards)
    held = sum(torch.Size(shard.shape).numel() for shard in main_shards if shard.is_parameter)
    if held != (total := count_parameters(spec).total):
        raise ShardingError(f"the ranks hold {held:,} different parameters; the model has {total:,}.")
    return f"{len(coordinates):,} different ranks of {world_size:,} hold {held:,} parameters, each exactly once"


def _by_arithmetic(spec: ModelSpec, held: Held) -> RankParameters:
    parts = rank_parameters(spec, held)
    return RankParameters(dense=parts.total() - parts["experts"], experts=parts["experts"])


def representatives(parallel: ParallelConfig, world_size: int) -> dict[Coordinate, int]:
    """The lowest rank of each coordinate; a checkpoint's main copies are all among them.

    A rank saves dense shards if its data-parallel rank is 0, and experts if its expert-data-parallel rank is 0. Either
    makes it the lowest of all that hold the same shards, hence also the lowest of its coordinate.
    """
    found: dict[Coordinate, int] = {}
    for rank in range(world_size):
        found.setdefault(coordinate_of(parallel, rank, world_size), rank)
    return found


def coordinate_of(parallel: ParallelConfig, rank: int, world_size: int) -> Coordinate:
    """By Megatron's order of ranks: tensor, then expert or context and data, and pipeline last."""
    stage, inside = divmod(rank, world_size // parallel.pipeline)
    return Coordinate(
        tensor=inside % parallel.tensor,
        expert_tensor=inside % parallel.expert_tensor,
        expert=inside // parallel.expert_tensor % parallel.expert,
        pipeline=stage,
    )


def share_of_rank(spec: ModelSpec, seq_length: int, rank: int, world_size: int) -> Share:
    """What one rank builds and how a checkpoint would call it."""
    with fake_rank(spec.parallel, rank, world_size):
        groups = Coordinate(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
            pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        )
        assert groups == coordinate_of(spec.parallel, rank, world_size), (rank, groups)
        chunks = build_on_meta(spec, seq_length)
        shards = [
            shard
            for chunk in chunks
            for value in nested_values(chunk.sharded_state_dict(prefix="model.", metadata=dict(MODEL_METADATA)))
            for shard in _shards(value)
        ]
    sizes: Counter[bool] = Counter()
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        assert parameter.is_meta
        sizes[getattr(parameter, "allreduce", True)] += parameter.numel()
    return Share(shards, RankParameters(dense=sizes[True], experts=sizes[False]))


def _shards(value: object) -> Iterator[Shard]:
    if not isinstance(value, ShardedTensor | ShardedTensorFactory):
        return
    # a factory makes several boxes of one parameter
    parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
    for part in parts:
        yield Shard(
            key=part.key,
            offset=tuple(part.global_offset),
            shape=tuple(part.local_shape),
            global_shape=tuple(part.global_shape),
            is_main=is_main_replica(part.replica_id),
            is_parameter=isinstance(value.data, nn.Parameter),
        )


def check_cover(shards: Iterable[Shard]) -> None:
    """Raise ShardingError unless the boxes of each tensor cover it without gap or overlap.

    Boxes of one tensor have one shape and lie on its grid, so it is enough that no two are the same and that their
    volumes add up.
    """
    boxes: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        boxes[shard.key].append(shard)
    for key, parts in boxes.items():
        first = parts[0]
        for part in parts:
            on_grid = all(start % size == 0 for start, size in zip(part.offset, part.shape, strict=True))
            if (part.shape, part.global_shape) != (first.shape, first.global_shape) or not on_grid:
                raise ShardingError(f"{key}: {part} does not lie on the grid of {first}.")
        offset, times = Counter(part.offset for part in parts).most_common(1)[0]
        if times > 1:
            raise ShardingError(f"{key}: {times} ranks save the part at {offset}.")
        held, whole = len(parts) * torch.Size(first.shape).numel(), torch.Size(first.global_shape).numel()
        if held != whole:
            raise ShardingError(f"{key}: the ranks save {held:,} of its {whole:,} elements.")
