"""Weights for a new run out of another run's checkpoint: continued pretraining (`training.init_from`)."""

import logging
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel

from ..model.attention import MSAAttention
from ..model.config import IndexerInit, ModelSpec
from ..model.indexer_init import init_from_attention
from .checkpoint import CheckpointError, compare_weights, find_checkpoint, is_complete, is_extra, model_state, plain

logger = logging.getLogger(__name__)


def init_weights(path: Path, chunks: list[DistributedDataParallel], spec: ModelSpec) -> None:
    """Fill the model with the weights in `path`, whatever layout wrote them; only the index branch may be absent there.

    An absent index branch is made as `attention.indexer_init` says, and one that is there is loaded. Call it before the
    optimizer is built, which copies the weights.

    Args:
        path: a checkpoint, or a folder of them, of which the newest is taken.

    Raises:
        CheckpointError: a weight other than the index branch's is missing, left over or of another shape; the
            checkpoint has a part of an index branch; or `indexer_init` would overwrite one that is there.
    """
    checkpoint = path if is_complete(path) else find_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no complete checkpoint. Correct training.init_from.")
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


def _is_index(key: str) -> bool:
    return ".indexer." in key
