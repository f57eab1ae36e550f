"""tokens @ weights[e].T for the rows of every expert e, by torch's grouped_mm."""

import torch
from torch import Tensor
from torch.nn import functional as F


class TorchGroupedProduct:
    """The products of one layer for one micro-batch: made of its counts, then called with each of the weights."""

    def __init__(self, tokens_per_expert: Tensor, device: torch.device) -> None:
        """tokens_per_expert int [e] on any device; the rows' borders go to `device`."""
        self.ends = tokens_per_expert.cumsum(0).to(torch.int32).to(device)

    def __call__(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """tokens [t, k] sorted by expert, t > 0, weights [e, n, k] -> [t, n]."""
        return F.grouped_mm(tokens, weights.transpose(-2, -1), offs=self.ends)
