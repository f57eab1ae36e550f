"""All local experts as three-dimensional weights and one grouped GEMM, without a host loop over experts."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from .grouped_product import TorchGroupedProduct

# The f channels' dimension, in both weights.
SHARDED_DIM = 2


class GroupedExperts(MegatronModule):
    """Gated experts y = down(act(gate(x)) * up(x)) on tokens sorted by expert; `model.activation` says which gate.

    Weights: `gate_up_proj` [local experts, 2, f, h], the gate first, `down_proj` [local experts, h, f]. With
    `parallel.expert_tensor` each rank holds its share of the f channels of every local expert, and the dispatcher gives
    it the tokens of all ranks that share them and adds up what they return. `grouped_product` is the library's product.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        grouped_product: Callable[..., Any] = TorchGroupedProduct,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts, self.grouped_product = num_local_experts, grouped_product
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.expert_dp_group = pg_collection.expt_dp
        size, ffn, dtype = config.hidden_size, config.moe_ffn_hidden_size // self.tp_group.size(), config.params_dtype
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2, ffn, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, size, ffn, dtype=dtype))
        for parameter in self.parameters():
            # in every layout, or Megatron sorts the experts of EP=1 into the dense buffers: their checkpoint would not
            # load under EP=2, and under tensor parallelism the copies would drift apart
            parameter.allreduce = False  # type: ignore[attr-defined]
            # whole experts too: without the mark the gradient norm takes the share of TP rank 0 for all there is
            set_tensor_model_parallel_attributes(parameter, True, SHARDED_DIM, 1)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens [t, h] sorted by local expert, tokens_per_expert int [local experts], probs [t] -> [t, h]."""
        if tokens.shape[0] == 0:  # the libraries refuse it; the weights still get their zero gradient
            hidden = (tokens @ self.gate_up_proj[0, 0].t() * probs[:, None]).to(tokens.dtype)
            return hidden @ self.down_proj[0].t(), None
        product = self.grouped_product(tokens_per_expert, tokens.device)
        # [t, 2f]
        gate, up = product(tokens, self.gate_up_proj.flatten(1, 2)).chunk(2, dim=-1)
        # [t, f]
        hidden = (self._gated(gate, up) * probs[:, None]).to(tokens.dtype)
        return product(hidden, self.down_proj), None

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What Megatron's MLP computes between its two products, from the same settings (model/mcore.py)."""
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        offset = self.config.glu_linear_offset
        return self.config.activation_func(gate) * (up + offset if offset else up)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Axis 0 of each weight is the global expert id, sharded over the expert-parallel group; f as it is held."""
        shift = len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                (shift, self.ep_group.rank(), self.ep_group.size()),
                (shift + SHARDED_DIM, self.tp_group.rank(), self.tp_group.size()),
                prepend_axis_num=shift,
                replica_id=(0, 0, self.expert_dp_group.rank()),
            )
            for name, parameter in self.named_parameters()
        }

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients, which neither backend's product splits off."""
