"""Optional losses of the router. Each is a sum over tokens: the caller divides by one global number of tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F


def sequence_balance_loss(logits: Tensor, routing_map: Tensor, documents: Tensor, topk: int) -> Tensor:
    """DeepSeek-V3's sequence-wise balance loss (arXiv 2412.19437, eq. 17-20) with a document as the sequence.

    Of a document of T tokens: T * sum_e f_e P_e with f_e = e / (k T) * (tokens that chose expert e) and P_e = the mean
    of s_e / sum(s) over its tokens, s = sigmoid(logits). It is T when the experts' loads are equal, and more when the
    scores lean towards the experts that already have more. Weighing documents by their length makes the total a mean
    over tokens, which no packing and no split into micro-batches changes.

    Args:
        logits: fp32 [t, e].
        routing_map: bool [t, e], the chosen experts; no gradient.
        documents: int [t], the document of each token, from 0 and below t; -1 for padding, which adds nothing.
        topk: experts of each token, k.

    Returns:
        fp32 scalar.
    """
    tokens, experts = logits.shape
    valid = documents >= 0
    # padding goes to a row of its own; t rows for documents spare a wait for the GPU to learn how many there are
    rows = torch.where(valid, documents, tokens).long()
    ones = torch.ones_like(logits[:, 0])
    # [documents, e] and [documents]
    chosen = torch.zeros(tokens + 1, experts, device=logits.device).index_add_(0, rows, routing_map.float())
    lengths = torch.zeros(tokens + 1, device=logits.device).index_add_(0, rows, ones)
    load = chosen[rows] * (experts / topk) / lengths[rows, None]
    # s / sum(s) without an epsilon: one would let the router lower the loss by pushing all scores under it
    shares = F.logsigmoid(logits).softmax(dim=-1)
    return ((load * shares).sum(dim=-1) * valid).sum()


def router_z_loss(logits: Tensor, documents: Tensor) -> Tensor:
    """Sum over the documents' tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5): keeps logits small.

    logits fp32 [t, e], documents int [t] with -1 for padding -> fp32 scalar.
    """
    return (logits.logsumexp(dim=-1).square() * (documents >= 0)).sum()
