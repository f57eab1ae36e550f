"""Bytes that one GPU sends in a step, by kind of parallelism. Formulae; nothing is measured.

w bytes of an element in the training precision, t tokens of a micro-batch on the rank, m micro-batches, L layers of
the stage, f(x) = (x - 1) / x. Recompute runs the forward messages of what it recomputes again.

| kind | bytes |
|---|---|
| tensor, forward and backward each | 2 all-reduces a dense layer, 1 an MoE layer (attention): 2 f(TP) w t h each |
| with sequence parallelism | the same bytes as all-gather and reduce-scatter; backward gathers the input once more |
| expert, all-to-all | dispatch and combine, forward and backward: 4 f(EP) w (t k) h |
| expert, all-gather | tokens in w and sums in fp32, forward and backward: 2 (EP - 1) (w + 4) t h |
| pipeline | activations and their gradients, each chunk of a stage: 2 w t h |
| context | key, value and index key gathered, their gradients scattered: 2 (CP - 1) w t (2 g d + i) |
| data, once a step | gradients scattered in fp32, weights gathered: f(D) (4 + w) parameters, D the ranks with a copy |
"""

from dataclasses import dataclass

from ...model.config import ModelSpec, Recompute
from .activations import Activations
from .hardware import GPUS_PER_NODE
from .stages import Held, Layout
from .states import rank_parameters


@dataclass(frozen=True)
class Message:
    """One kind of message; a group of `ranks` that are `stride` apart in the order of the launcher's ranks."""

    kind: str
    size: float
    """Bytes sent by one GPU: of one micro-batch, or for `data` of a step."""
    ranks: int
    stride: int

    @property
    def crosses_nodes(self) -> bool:
        return self.ranks * self.stride > GPUS_PER_NODE


def micro_batch_messages(a: Activations, held: Held, num_chunks: int = 1) -> list[Message]:
    """Of one micro-batch through all of a stage's layers, forward and backward."""
    spec, parallel, layout = a.spec, a.spec.parallel, a.layout
    recompute = spec.recompute
    again_mlp = 1.5 if recompute is not Recompute.none else 1.0
    again_attention = 1.5 if recompute is Recompute.full else 1.0
    width = a.itemsize * spec.model.hidden_size
    part = 1 - 1 / parallel.tensor
    # forward + backward of an attention or MLP block
    passes = (4 * part + (part if parallel.sequence else 0)) * width * a.tokens
    tensor = expert = context = 0.0
    for layer, count in held.items():
        if not isinstance(layer, int):
            continue
        tensor += count * passes * again_attention * (2 if spec.is_mtp(layer) else 1)  # MTP's projection as well
        if not spec.is_moe(layer) or spec.moe.shared_hidden_size:
            tensor += count * passes * again_mlp
        if spec.is_moe(layer):
            expert += count * again_mlp * _expert(a)
        index = spec.attention.index_dim if spec.is_msa(layer) else 0
        keys = 2 * a.heads[1] * spec.model.head_dim + index
        context += count * 2 * again_attention * (parallel.context - 1) * a.itemsize * a.tokens * keys
    pipeline = 2.0 * a.hidden_states * num_chunks if parallel.pipeline > 1 else 0.0
    messages = [
        Message("tensor", tensor, parallel.tensor, 1),
        Message("context", context, parallel.context, parallel.tensor),
        # experts' ranks are numbered on their own: expert tensor, expert, copies, pipeline
        Message("expert", expert, parallel.expert, parallel.expert_tensor),
        Message("pipeline", pipeline, parallel.pipeline, layout.world_size // parallel.pipeline),
    ]
    return [message for message in messages if message.size]


def _expert(a: Activations) -> float:
    parallel, hidden = a.spec.parallel, a.spec.model.hidden_size
    if parallel.dispatcher.name == "allgather":
        return 2.0 * (parallel.expert * parallel.expert_tensor - 1) * (a.itemsize + 4) * a.rows * hidden
    return 4.0 * (1 - 1 / parallel.expert) * a.itemsize * a.rows * a.spec.moe.top_k * hidden


def step_messages(spec: ModelSpec, layout: Layout, held: Held, itemsize: int) -> list[Message]:
    """Once a step: gradients scattered over the copies in fp32, updated weights gathered."""
    parameters = rank_parameters(spec, held)
    experts, parallel = parameters.pop("experts", 0), spec.parallel

    def size(count: int, copies: int) -> float:
        return (1 - 1 / copies) * (4 + itemsize) * count

    messages = [
        Message("data", size(parameters.total(), layout.dense_copies), layout.dense_copies, parallel.tensor),
        Message(
            "data, experts",
            size(experts, layout.expert_copies),
            layout.expert_copies,
            parallel.expert_tensor * parallel.expert,
        ),
    ]
    return [message for message in messages if message.size]
