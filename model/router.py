"""Sigmoid-gated top-k router with a selection bias, in place of Megatron's (whose counts are floats and become bf16).

The bias steers selection only; the routing weights are the chosen experts' own sigmoid scores, renormalised. Counts are
int64, taken once for each training token (not in validation, not again under recompute, not for padding); the trainer
sums them over ranks and calls `update_expert_bias` after a successful optimizer step only.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .config import MoEConfig


class SigmoidRouter(nn.Module):
    """hidden_states [s, b, h] -> (routing_probs fp32 [t, e], routing_map bool [t, e]), t = s * b."""

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        # fp32 in a bf16 model too: rounding flips the choice between close experts
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=torch.float32))
        self.weight.is_fp32_param = True  # type: ignore[attr-defined]
        # by this mark Megatron sums its gradient over the tensor-parallel ranks, each of which routes its own tokens
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]
        self.register_buffer("expert_bias", torch.zeros(moe.num_experts, dtype=torch.float32))
        # zero at every step boundary, so not part of a checkpoint
        self.register_buffer("tokens_per_expert", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`padding_mask` bool [s, b], True for padding: such tokens are routed but never counted."""
        logits = F.linear(hidden_states.flatten(0, 1).float(), self.weight)
        scores = logits.sigmoid()
        chosen = (scores.detach() + self.expert_bias).topk(self.moe.top_k, dim=-1).indices
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        # renormalised for every k, as the released models do; Megatron leaves k = 1 as it is
        weights = scores * routing_map
        total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        routing_probs = weights / total * self.moe.routed_scaling
        if self.training and torch.is_grad_enabled():
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask.flatten()[:, None]
            self.tokens_per_expert += counted.sum(dim=0)
        return routing_probs, routing_map

    @torch.no_grad()
    def take_counts(self) -> Tensor:
        """This rank's tokens of the step for each expert, int64 [e]; the counts start again at zero."""
        counts = self.tokens_per_expert.clone()
        self.tokens_per_expert.zero_()
        return counts

    @torch.no_grad()
    def update_expert_bias(self, counts: Tensor) -> None:
        """bias_e += rate * sign(mean load - load_e), from integer counts (DeepSeek-V3's rule, not recentred)."""
        error = counts.sum() - counts * counts.numel()
        self.expert_bias += self.moe.bias_update_rate * error.sign()
