"""Optional losses of the router. Each is a sum over tokens: the caller divides by one global number of tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def sequence_balance_loss(
    logits: Tensor,
    routing_map: Tensor,
    documents: Tensor,
    topk: int,
    group: dist.ProcessGroup | None = None,
    *,
    sigmoid: bool = True,
) -> Tensor:
    """DeepSeek-V3's sequence-wise balance loss (arXiv 2412.19437, eq. 17-20) with a document as the sequence.

    Of a document of T tokens: T * sum_e f_e P_e with f_e = e / (k T) * (tokens that chose expert e) and P_e = the mean
    of s_e / sum(s) over its tokens, s = sigmoid(logits). It is T when the experts' loads are equal, and more when the
    scores lean towards the experts that already have more. Weighing documents by their length makes the total a mean
    over tokens, which no packing and no split into micro-batches changes.

    Args:
        logits: fp32 [t, e].
        routing_map: bool [t, e], the chosen experts; no gradient.
        documents: int [t], a number for the document of each token, the same on all ranks of `group`, from 0 and below
            their number of tokens; -1 for padding, which adds nothing.
        topk: experts of each token, k.
        sigmoid: False: s = softmax(logits) over all experts.
        group: ranks that hold the other tokens of the same documents (sequence and context parallelism).

    Returns:
        fp32 scalar: the share of this rank's tokens in the loss.
    """
    tokens, experts = logits.shape
    valid = documents >= 0
    # padding goes to a row of its own; a row for each token spares a wait for the GPU to count the documents
    size = tokens * (group.size() if group else 1)
    rows = torch.where(valid, documents, size).long()
    # [documents, e + 1]: tokens that chose each expert, and tokens
    sums = torch.zeros(size + 1, experts + 1, device=logits.device)
    sums.index_add_(0, rows, F.pad(routing_map.float(), (0, 1), value=1.0))
    if group:
        dist.all_reduce(sums, group=group)
    load = (sums[:, :-1] * (experts / topk) / sums[:, -1:].clamp_min(1))[rows]
    # s / sum(s) without an epsilon: one would let the router lower the loss by pushing all scores under it
    shares = (F.logsigmoid(logits) if sigmoid else logits).softmax(dim=-1)
    return ((load * shares).sum(dim=-1) * valid).sum()


def router_z_loss(logits: Tensor, documents: Tensor) -> Tensor:
    """Sum over the documents' tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5): keeps logits small.

    logits fp32 [t, e], documents int [t] with -1 for padding -> fp32 scalar.
    """
    return (logits.logsumexp(dim=-1).square() * (documents >= 0)).sum()
