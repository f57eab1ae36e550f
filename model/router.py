"""Top-k router with a selection bias, in place of Megatron's (whose counts are floats and become bf16).

The bias steers selection only; the routing weights are the chosen experts' own scores, renormalised. Counts are
int64, taken once for each training token (not in validation, not again under recompute, not for padding); the trainer
sums them over ranks and calls `update_expert_bias` after a successful optimizer step only.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .attach_loss import AttachLoss
from .balance_losses import router_z_loss, sequence_balance_loss
from .config import MoEConfig, ScoreFunction


class SigmoidRouter(nn.Module):
    """hidden_states [s, b, h] -> (routing_probs fp32 [t, e], routing_map bool [t, e]), t = s * b."""

    expert_bias: Tensor
    tokens_per_expert: Tensor
    loss_sums: Tensor

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        # ranks that route other tokens of the same documents
        shared = pg_collection and (config.sequence_parallel or config.context_parallel_size > 1)
        self.document_group = pg_collection.tp_cp if pg_collection and shared else None
        # fp32 in a bf16 model too: rounding flips the choice between close experts
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=torch.float32))
        self.weight.is_fp32_param = True  # type: ignore[attr-defined]
        # by this mark Megatron sums its gradient over the tensor-parallel ranks, each of which routes its own tokens
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]
        self.register_buffer("expert_bias", torch.zeros(moe.num_experts, dtype=torch.float32))
        # zero at every step boundary, so not part of a checkpoint
        self.register_buffer("tokens_per_expert", torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("loss_sums", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.loss_weight = 0.0
        """LM tokens / valid rows of the step (see `AttachLoss`): the factor, beside its coefficient, of each token's
        balance losses. The same for all micro-batches of a step, so it needs no place in theirs."""

    @property
    def _softmax(self) -> bool:
        return self.moe.score_function is ScoreFunction.softmax

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(self, hidden_states: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`documents` int [s, b]: each token's document, from 0; -1 is padding: routed, but neither counted nor in a
        loss. None: one document without padding."""
        logits = F.linear(hidden_states.flatten(0, 1).float(), self.weight)
        scores = logits.softmax(dim=-1) if self._softmax else logits.sigmoid()
        chosen = self._in_turn(scores) if self.moe.force_balance else self._best(scores.detach() + self.expert_bias)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        # renormalised for every k, as the released models do; Megatron leaves k = 1 as it is
        weights = scores * routing_map
        total = weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        routing_probs = weights / total * self.moe.routed_scaling
        if self.training and torch.is_grad_enabled():
            document = scores.new_zeros(len(scores), dtype=torch.int64) if documents is None else documents.flatten()
            self.tokens_per_expert += (routing_map & (document >= 0)[:, None]).sum(dim=0)
            if self.moe.has_losses:
                routing_probs = self._with_losses(routing_probs, logits, routing_map, document)
        return routing_probs, routing_map

    def _best(self, biased: Tensor) -> Tensor:
        """The k best experts [t, k] by score plus bias; with groups, out of the best `top_groups` groups only.

        A group's worth is the sum of its k / top_groups best experts (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
        """
        moe = self.moe
        if moe.num_groups > 1:
            # [t, groups, e / groups]
            grouped = biased.unflatten(-1, (moe.num_groups, -1))
            worth = grouped.topk(moe.top_k // moe.top_groups, dim=-1).values.sum(dim=-1)
            lost = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(moe.top_groups).indices, False)
            # not with 0, which beats the negative scores that a negative bias makes
            biased = grouped.masked_fill(lost[..., None], -torch.inf).flatten(1)
        return biased.topk(moe.top_k, dim=-1).indices

    def _in_turn(self, scores: Tensor) -> Tensor:
        """Token by token the next k experts [t, k], whatever the scores: equal loads for benchmarks."""
        k = self.moe.top_k
        return torch.arange(len(scores) * k, device=scores.device).view(-1, k) % self.moe.num_experts

    def _with_losses(self, routing_probs: Tensor, logits: Tensor, routing_map: Tensor, document: Tensor) -> Tensor:
        """`routing_probs` with the balance losses attached, and their sums over tokens taken down for the metrics."""
        moe = self.moe
        balance = sequence_balance_loss(
            logits, routing_map, document, moe.top_k, self.document_group, sigmoid=not self._softmax
        )
        z_loss = router_z_loss(logits, document)
        self.loss_sums += torch.stack([balance.detach(), z_loss.detach()])
        weighted = moe.aux_loss_coef * balance + moe.z_loss_coef * z_loss
        return AttachLoss.apply(routing_probs, weighted * self.loss_weight)

    @torch.no_grad()
    def take_counts(self) -> Tensor:
        """This rank's tokens of the step for each expert, int64 [e]; the counts start again at zero."""
        counts = self.tokens_per_expert.clone()
        self.tokens_per_expert.zero_()
        return counts

    @torch.no_grad()
    def take_losses(self) -> Tensor:
        """This rank's sums over the step's tokens of the (balance, z) loss, fp64 [2]; they start again at zero."""
        sums = self.loss_sums.clone()
        self.loss_sums.zero_()
        return sums

    @torch.no_grad()
    def update_expert_bias(self, counts: Tensor) -> None:
        """bias_e += rate * sign(mean load - load_e), from integer counts (DeepSeek-V3's rule, not recentred)."""
        if self.moe.force_balance:  # the bias chose nothing, so the counts are no news about it
            return
        error = counts.sum() - counts * counts.numel()
        self.expert_bias += self.moe.bias_update_rate * error.sign()
