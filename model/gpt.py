"""The model of this rank: Megatron's GPTModel around our layers, one per virtual pipeline stage."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from .config import LayerBackend, ModelSpec
from .init import initialize, mark_shards
from .layer_spec import block_spec
from .mcore import transformer_config
from .mtp import MTPModel, mtp_spec
from .router import SigmoidRouter


def build_model(spec: ModelSpec, seq_length: int, *, initialized: bool = True) -> list[GPTModel]:
    """This rank's model chunks with their initial weights, on its device; without, their weights mean nothing."""
    chunks = _chunks(spec, transformer_config(spec), seq_length)
    for model in chunks:
        if initialized:
            initialize(model, spec)
        if torch.cuda.is_available():
            model.cuda()
    return chunks


def build_on_meta(spec: ModelSpec, seq_length: int) -> list[GPTModel]:
    """The same chunks without memory behind their weights, of torch's modules: they need no GPU, and the parameters are
    the same under both backends.
    """
    spec = replace(spec, model=replace(spec.model, backend=LayerBackend.torch))
    config = transformer_config(spec)
    config.use_cpu_initialization = True  # the one of Megatron's two branches that leaves the device to the context
    with torch.device("meta"):
        return _chunks(spec, config, seq_length)


def _chunks(spec: ModelSpec, config: TransformerConfig, seq_length: int) -> list[GPTModel]:
    chunks = []
    for stage in range(spec.parallel.virtual_pipeline):
        vp_stage = stage if spec.parallel.virtual_stages else None
        where = dict(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(**where)
        model = (MTPModel if spec.mtp_layers else GPTModel)(
            config,
            block_spec(spec, config, vp_stage),
            vocab_size=spec.model.vocab_size,
            max_sequence_length=seq_length,
            # rotary tables are made from positions, in the attention module
            position_embedding_type="none",
            share_embeddings_and_output_weights=spec.model.tie_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=last,
            mtp_block_spec=mtp_spec(spec) if spec.mtp_layers and last else None,
            vp_stage=vp_stage,
        )
        mark_shards(model)
        chunks.append(model)
    return chunks


def routers(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, SigmoidRouter]]:
    """(0-based global layer, router) of every MoE layer on this rank."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, SigmoidRouter):
                yield module.layer_number - 1, module
