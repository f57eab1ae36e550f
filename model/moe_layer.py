"""Megatron's MoE layer, whose router is told which document each token belongs to."""

from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


class DocumentMoELayer(MoELayer):
    """Routing, dispatch, experts and combination are Megatron's; the argument of its padding mask carries documents.

    Megatron casts that argument to bool, and the balance loss needs to know where documents end. It is also the one
    argument that selective recompute keeps with each micro-batch: a document table on the module would belong to
    another micro-batch by the time a pipeline stage recomputes.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, h], `padding_mask` int [b, s]: documents, -1 for padding -> (output [s, b, h], None).

        Under sequence parallelism s counts this rank's tokens, and `padding_mask` may be that of all of them: Megatron
        hands out shares of it on the first pipeline stage alone.
        """
        documents = padding_mask if padding_mask is None else padding_mask.transpose(0, 1)
        if documents is not None and len(documents) != len(hidden_states):
            documents = documents.chunk(self.attn_tp_group.size())[self.attn_tp_group.rank()]
        if self.moe_layer_recompute:
            output = tensor_parallel.checkpoint(self._route_and_compute, False, hidden_states, documents)
        else:
            output = self._route_and_compute(hidden_states, documents)
        return output, None

    def _route_and_compute(self, hidden_states: Tensor, documents: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, documents)
        tokens, probs = self.preprocess(hidden_states, probs, routing_map)
        tokens, probs = self.dispatch(tokens, probs)
        output, _ = self.routed_experts_compute(tokens, probs)
        return self.postprocess(self.combine(output), shared)
