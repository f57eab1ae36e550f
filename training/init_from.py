"""Weights for a new run out of another run's checkpoint, and its optimizer on request: continued pretraining."""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer

from ..model.attention import MSAAttention
from ..model.config import IndexerInit, ModelSpec
from ..model.indexer_init import init_from_attention
from .checkpoint import (
    OPTIMIZER_METADATA,
    CheckpointError,
    compare_optimizer,
    compare_weights,
    find_checkpoint,
    is_complete,
    is_extra,
    model_state,
    plain,
    stored_shapes,
)
from .config import InitOptimizer
from .optim import clip_group

logger = logging.getLogger(__name__)
FP32_WEIGHT = "optimizer.state.param."


def find_source(path: Path, init_optimizer: InitOptimizer) -> Path:
    """The checkpoint that `training.init_from` names: itself, or the newest one in the folder.

    Raises CheckpointError when there is none, or none with an optimizer where that is to be kept.
    """
    checkpoint = path if is_complete(path) else find_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no complete checkpoint. Correct training.init_from.")
    keep = init_optimizer is InitOptimizer.keep
    if keep and "optimizer" not in dist_checkpointing.load_common_state_dict(str(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} has no optimizer for training.init_optimizer=keep: an imported one, say, is weights "
            "alone. Use training.init_optimizer=reset, or another checkpoint."
        )
    return checkpoint


def init_weights(checkpoint: Path, chunks: list[DistributedDataParallel], spec: ModelSpec) -> None:
    """Fill the model with a checkpoint's weights, whatever layout wrote them; only the index branch may be absent.

    An absent index branch is made as `attention.indexer_init` says, and one that is there is loaded. Call it before the
    optimizer is built, which copies the weights.

    Raises:
        CheckpointError: a weight other than the index branch's is missing, left over or of another shape; the
            checkpoint has a part of an index branch; or `indexer_init` would overwrite one that is there.
    """
    state = model_state(chunks)
    absent = compare_weights(checkpoint, state, may_lack=_is_index)
    if not absent and spec.msa_layers and spec.attention.indexer_init is IndexerInit.from_attention:
        raise CheckpointError(
            f"{checkpoint} has an index branch, which attention.indexer_init=from_attention would overwrite. "
            "Use attention.indexer_init=random: it makes only what a checkpoint lacks."
        )
    wanted = {
        name: {key: value for key, value in chunk.items() if not (absent and _is_index(key)) and not is_extra(key)}
        for name, chunk in state.items()
    }
    # what is left unused is the optimizer's
    loaded, _, missing = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    assert not missing, missing
    for order, chunk in enumerate(chunks):
        lacks, unknown = chunk.module.load_state_dict(plain(loaded[f"model{order}"]), strict=False)
        assert not unknown and all(is_extra(key) or (absent and _is_index(key)) for key in lacks), (lacks, unknown)
    if absent and spec.attention.indexer_init is IndexerInit.from_attention:
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, MSAAttention) and module.indexer is not None:
                    init_from_attention(module)
    index = f"an index branch made by {spec.attention.indexer_init.name}" if absent else "all weights"
    logger.info("starting from the weights of %s, with %s", checkpoint, index)


def keep_optimizer(checkpoint: Path, chunks: list[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Bring the optimizer's fp32 weights, moments and Adam steps out of the checkpoint, whatever layout wrote it.

    Call it behind `init_weights`, with an optimizer that has taken no step. Index parameters that the checkpoint lacks
    stay as they are: fp32 weights from the model's, moments of zero, step 0. Rates, decay, betas and eps stay too.

    Raises:
        CheckpointError: the fp32 weight or a moment of a weight is missing, left over or of another shape.
    """
    model = model_state(chunks)
    stored = stored_shapes(checkpoint)
    weights = {value.key: value.data for value in nested_values(model) if isinstance(value, ShardedTensor)}
    state = optimizer.sharded_state_dict(model, is_loading=True, metadata=OPTIMIZER_METADATA)
    is_new = {key for key in weights if _is_index(key) and key not in stored}
    for part in _parts(state):
        for number, tensors in part["param_state"].items():
            key = tensors["param"].key.removeprefix(FP32_WEIGHT)
            if key in is_new:
                fresh = {name: torch.zeros_like(value.data) for name, value in tensors.items()}
                fresh["param"].copy_(weights[key].detach())
                part["param_state"][number] = {name: LocalNonpersistentObject(v) for name, v in fresh.items()}
    compare_optimizer(checkpoint, state)
    content = {"optimizer": state}
    loaded, _, missing = dist_checkpointing.load(content, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    assert not missing, missing
    saved = [group for part in _parts(loaded["optimizer"]) for group in part["optimizer"]["param_groups"]]
    steps = {clip_group(group): int(group["step"]) for group in saved}
    for part, ours in zip(_parts(loaded["optimizer"]), _parts(optimizer.state_dict()), strict=True):
        groups = ours["optimizer"]["param_groups"]
        part["optimizer"]["param_groups"] = [{**group, "step": steps.get(clip_group(group), 0)} for group in groups]
    optimizer.load_state_dict(loaded["optimizer"])
    for chunk in chunks:  # fp32 weights are the optimizer's own, of which each rank has loaded its share
        chunk.start_param_sync()
    kept = sum(math.prod(shape) for key, shape in stored.items() if key.startswith(FP32_WEIGHT))
    is_index_new = {clip_group(group) for group in optimizer.param_groups} > set(steps)
    logger.info(
        "optimizer kept: %s parameters from %s at Adam step %d%s",
        f"{kept:,}",
        checkpoint,
        steps["backbone"],
        ", index parameters new" if is_index_new else "",
    )


def _parts(state: Any) -> list[dict[str, Any]]:
    """Megatron's state by optimizer: that of dense parameters, and of experts where the model has some."""
    if isinstance(state, list):
        return state
    return [state] if "optimizer" in state else [state[number] for number in sorted(state)]


def _is_index(key: str) -> bool:
    return ".indexer." in key
