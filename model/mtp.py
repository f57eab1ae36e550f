"""Multi-token prediction: layers behind the decoder that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437).

Depth d combines the state of token i at depth d - 1 with the embedding of token i + d, runs one MSA layer of its own,
and predicts token i + d + 1 through the shared head. Modules and their checkpoint are Megatron's. Replaced are its
shifts, which walk over documents on the host; its loss, which has no denominator of its own; its log, which averages
micro-batches of unequal size; its recompute, which cannot save the object that packs documents; and its call of the
layer, which drops the padding mask.
"""

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from .attach_loss import AttachLoss
from .backend import layer_modules
from .config import ModelSpec
from .context import AttentionContext
from .layer_spec import layer_spec


def mtp_spec(spec: ModelSpec) -> MultiTokenPredictionBlockSubmodules:
    """The MTP layers, numbered on from the decoder's."""
    return MultiTokenPredictionBlockSubmodules(layer_specs=[_depth(spec, layer) for layer in spec.mtp_layers])


def _depth(spec: ModelSpec, layer: int) -> ModuleSpec:
    inner, modules = layer_spec(spec, layer), layer_modules(spec.model.backend)
    inner.module = DocumentTransformerLayer
    inner.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.causal  # Megatron asks for it
    return ModuleSpec(
        module=MTPLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=modules.norm,
            hnorm=modules.norm,
            eh_proj=modules.column_linear,
            transformer_layer=inner,
            layer_norm=modules.norm,
        ),
    )


class DocumentTransformerLayer(TransformerLayer):
    """Hands its router the documents, which Megatron's MTP does not pass on."""

    def forward(self, *args: Any, packed_seq_params: AttentionContext, **kwargs: Any) -> Any:
        assert packed_seq_params.documents is not None
        kwargs["padding_mask"] = packed_seq_params.documents[None]
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class MTPLayer(MultiTokenPredictionLayer):
    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: AttentionContext,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids [1, t] of this depth (a rank cannot shift them: the next may be another's), positions, their
        embeddings, states."""
        input_ids = packed_seq_params.mtp[self.layer_number - 1].tokens
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return input_ids, position_ids, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states

    def _checkpointed_forward(
        self, forward_func: Any, hidden_states: Tensor, decoder_input: Tensor, **closed_over: Any
    ) -> Tensor:
        def run(states: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=states, decoder_input=embedded, **closed_over)

        return tensor_parallel.checkpoint(run, False, hidden_states, decoder_input)


class MTPModel(GPTModel):
    """GPTModel whose MTP loss is, for each depth, the mean over its own targets in the global batch."""

    def _postprocess(self, **inputs: Any) -> Tensor:
        hidden_states, labels = inputs["hidden_states"], inputs["labels"]
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if not self.post_process:
            return hidden_states
        if self.training and labels is not None:
            hidden_states = self._with_mtp_loss(inputs, weight)
        logits, _ = self.output_layer(
            hidden_states, weight=weight, runtime_gather_output=inputs.get("runtime_gather_output")
        )
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _with_mtp_loss(self, inputs: dict[str, Any], weight: Tensor | None) -> Tensor:
        """The decoder's states [t, 1, h] with every depth's loss attached and noted."""
        context: AttentionContext = inputs["packed_seq_params"]
        passed = ("input_ids", "position_ids", "hidden_states", "attention_mask", "packed_seq_params")
        states = self.mtp(embedding=self.embedding, **{name: inputs[name] for name in passed})
        hidden_states, *by_depth = states.chunk(1 + len(context.mtp))
        for depth, (states, ahead) in enumerate(zip(by_depth, context.mtp, strict=True)):
            logits, _ = self.output_layer(states, weight=weight)
            total = (self.compute_language_model_loss(ahead.labels, logits).float() * ahead.mask).sum()
            if context.measurements is not None:
                context.measurements.add_mtp_loss(depth, total.detach().double())
            hidden_states = AttachLoss.apply(hidden_states, total * context.mtp_weights[depth])
        return hidden_states
