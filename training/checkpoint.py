"""Checkpoints of a run: `checkpoints/step_<n>/`, complete or absent, loadable under another layout.

Written by Megatron's dist_checkpointing under a temporary name and renamed when every rank is done; `latest` (a text
file with the folder's name) is written last. The files are pickle inside: load only what you trust.
"""

import os
import queue
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

# Both are explicit because Megatron's defaults are wrong here: layers would be stacked into one tensor, which layers of
# different kinds cannot be, and the default sharding type of the optimizer is refused by 0.16.
MODEL_METADATA = {"non_homogeneous_layers": True}
OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
FILES_OF_A_COMPLETE_CHECKPOINT = ("common.pt", "metadata.json", ".metadata")
RNG_KEY = "rng_state"


@dataclass
class TrainState:
    """The run's counters; with the weights and the optimizer, all that a step depends on."""

    step: int = 0
    consumed_tokens: int = 0
    """Positions fed, padding included; phase and learning rate follow from it."""
    consumed_samples: int = 0
    tokens_before_step: int = 0
    """Positions fed before the last step: where its phase came from."""
    skipped_steps: int = 0


@dataclass(frozen=True)
class Loaded:
    state: TrainState
    wandb_run_id: str | None


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded into this run; the message names what differs."""


def save_checkpoint(
    folder: Path,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    state: TrainState,
    *,
    phase: str,
    data_record: dict[str, Any],
    config_yaml: str,
    wandb_run_id: str | None,
    keep_last: int,
) -> Path:
    """Write `folder`/step_<n>; returns it. `config_yaml` must be free of secrets."""
    final = folder / f"step_{state.step}"
    unfinished = folder / f"step_{state.step}.tmp"
    if _is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    model = model_state(chunks)
    content = {
        **model,
        "optimizer": optimizer.sharded_state_dict(model, metadata=OPTIMIZER_METADATA),
        RNG_KEY: _rng_state(),
        # plain types only: Megatron saves others and then refuses to load them
        "run": {
            **asdict(state),
            "phase": phase,
            "config": config_yaml,
            "wandb_run_id": wandb_run_id or "",
            "layout": list(_layout()),
            "data": data_record,
        },
    }
    # Megatron starts a helper process for the queue by which a background save reports: it imports the main module
    # again, which takes seconds, and outlives a killed trainer. A save in the foreground needs a queue and no process.
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(content, str(unfinished))
    dist.barrier()
    if _is_first():
        shutil.rmtree(final, ignore_errors=True)
        for path in unfinished.iterdir():
            _sync(path)
        os.replace(unfinished, final)
        _sync(folder)
        _write_latest(folder, final.name)
        for old in _complete(folder)[keep_last:]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def find_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`; one that is torn is passed over with a warning."""
    newest = next(iter(_complete(folder)), None)
    latest = folder / "latest"
    if latest.is_file() and (newest is None or latest.read_text().strip() != newest.name):
        named = latest.read_text().strip()
        instead = f"continuing from {newest.name}" if newest else "starting anew"
        warnings.warn(f"{folder / named} is not a complete checkpoint; {instead}.", stacklevel=2)
    return newest


def load_checkpoint(
    path: Path,
    chunks: list[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    *,
    check_data: Callable[[dict[str, Any], int], None],
) -> Loaded:
    """Fill model and optimizer from `path`, whatever layout wrote it.

    check_data: gets the record of the data that was saved and the consumed samples, and raises ValueError when this run
    would go on with other samples. Raises CheckpointError then, and when the keys differ.
    """
    run = dist_checkpointing.load_common_state_dict(str(path))["run"]
    if "step" not in run:
        raise CheckpointError(
            f"{path} was imported and holds weights alone: there is no run to resume. Use training.init_from."
        )
    try:
        check_data(run["data"], run["consumed_samples"])
    except ValueError as err:
        raise CheckpointError(f"{path}: {err}") from err
    model = model_state(chunks)
    compare_weights(path, model)
    content = {**model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=OPTIMIZER_METADATA)}
    same_layout = tuple(run["layout"]) == _layout()
    if same_layout:
        content[RNG_KEY] = _rng_state()
    loaded, unused, absent = dist_checkpointing.load(content, str(path), strict=StrictHandling.RETURN_ALL)
    assert not absent and all(key.startswith(RNG_KEY) for key in unused), (absent, unused)
    optimizer.load_state_dict(loaded["optimizer"])
    for order, chunk in enumerate(chunks):
        chunk.module.load_state_dict(plain(loaded[f"model{order}"]), strict=True)
    if same_layout:
        _set_rng_state(loaded[RNG_KEY])
    else:
        warnings.warn(
            f"{path} was written under another layout {tuple(run['layout'])}; random states start from the seed.",
            stacklevel=2,
        )
    fields = TrainState.__dataclass_fields__
    return Loaded(state=TrainState(**{key: run[key] for key in fields}), wandb_run_id=run["wandb_run_id"] or None)


def model_state(chunks: list[DistributedDataParallel]) -> dict[str, Any]:
    return {
        f"model{order}": chunk.module.sharded_state_dict(prefix="model.", metadata=dict(MODEL_METADATA))
        for order, chunk in enumerate(chunks)
    }


def is_extra(key: str) -> bool:
    """State of Megatron's layers that is no weight; a checkpoint made of weights alone does not have it."""
    return key.endswith("_extra_state")


def compare_weights(
    path: Path, model: dict[str, Any], may_lack: Callable[[str], bool] = lambda key: False
) -> list[str]:
    """Every rank raises CheckpointError when the weights on disk are not those of the model, by name and shape.

    Keys for which `may_lack` holds may be absent from the checkpoint, all or none of them; returns those that are.
    """
    absent, misfit = _compare(path, model, "model.", may_lack)
    if misfit:
        raise CheckpointError(
            f"{path} does not fit the model. {misfit} Use the model, attention and moe settings of its config."
        )
    return absent


def compare_optimizer(path: Path, state: dict[str, Any]) -> None:
    """The same for the optimizer's fp32 weights and moments in `state`, of which none may be absent."""
    _, misfit = _compare(path, state, "optimizer.", lambda key: False)
    if misfit:
        raise CheckpointError(
            f"The optimizer in {path} does not fit the weights there. {misfit} Use training.init_optimizer=reset, or "
            "another checkpoint."
        )


def _compare(path: Path, state: dict[str, Any], prefix: str, may_lack: Callable[[str], bool]) -> tuple[list[str], str]:
    """Keys that are absent and may be; and in words what differs otherwise, empty if nothing does."""
    wanted: dict[str, tuple[int, ...] | None] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            wanted[value.key] = tuple(value.global_shape)
        elif isinstance(value, ShardedTensorFactory):
            wanted[value.key] = None
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wanted)
    wanted = {key: shape for rank in everywhere for key, shape in rank.items()}
    stored = {key: shape for key, shape in stored_shapes(path).items() if key.startswith(prefix)}
    absent, unused = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    allowed = sorted(filter(may_lack, wanted))
    if not set(allowed) <= set(absent):
        allowed = []
    absent = [key for key in absent if key not in allowed]
    other_shape = [
        f"{key} is {stored[key]} and not {shape}"
        for key, shape in sorted(wanted.items())
        if shape is not None and key in stored and stored[key] != shape
    ]
    if not (absent or unused or other_shape):
        return allowed, ""
    return allowed, f"It lacks {some(absent)}; it has {some(unused)} besides; of other shape: {some(other_shape)}."


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in the checkpoint."""
    metadata = dist_checkpointing.load_tensors_metadata(str(path))
    return {key: tuple(value.global_shape) for key, value in metadata.items()}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("model."): value for key, value in state.items()}


def _layout() -> tuple[int, int, int]:
    """(tensor, pipeline, data-parallel size): what the random states are kept by."""
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _rng_state() -> ShardedObject:
    """This rank's random states. Every rank has its own: none is a replica of another."""
    data = {"cpu": torch.get_rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        data["cuda"] = torch.cuda.get_rng_state()
    where = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    # context-parallel ranks are given the same samples and draw the same numbers
    return ShardedObject(RNG_KEY, data, _layout(), where, replica_id=parallel_state.get_context_parallel_rank())


def _set_rng_state(data: dict[str, Any]) -> None:
    torch.set_rng_state(data["cpu"])
    get_cuda_rng_tracker().set_states(data["tracker"])
    if torch.cuda.is_available() and "cuda" in data:
        torch.cuda.set_rng_state(data["cuda"])


def is_complete(checkpoint: Path) -> bool:
    return all((checkpoint / name).is_file() for name in FILES_OF_A_COMPLETE_CHECKPOINT)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit() and is_complete(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _write_latest(folder: Path, name: str) -> None:
    unfinished = folder / "latest.tmp"
    unfinished.write_text(name + "\n")
    _sync(unfinished)
    os.replace(unfinished, folder / "latest")
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _is_first() -> bool:
    return dist.get_rank() == 0
