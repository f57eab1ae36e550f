"""Partial rotary embedding from positions: the first `rotary_dim` channels of a head turn, the others pass."""

import math

import torch
from torch import Tensor

from .config import RopeScaling


def rotation(
    positions: Tensor, rotary_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [t, 1, rotary_dim], of each token's angle; channel pairs are (c, c + rotary_dim / 2).

    Args:
        positions: int [t], restarting at each document.
        rotary_dim: rotated channels, even; 0 gives empty tables.
        theta: base of the frequencies.
        scaling: of long wavelengths; None leaves all as they are.
    """
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    inverse_frequency = theta ** (-pairs / max(rotary_dim, 1))
    if scaling is not None and scaling.factor != 1:
        turns = scaling.original_length * inverse_frequency / (2 * math.pi)  # in a sequence of the first training
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0, 1)
        inverse_frequency = inverse_frequency * (kept + (1 - kept) / scaling.factor)
    # float64 angles: at a million tokens an fp32 product is off by 0.06 rad
    angles = positions.double()[:, None] * inverse_frequency
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().float(), angles.sin().float()


def apply_rotation(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading channels of heads [t, heads, dim]; computed in fp32, returned in the dtype of `heads`."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == 0:
        return heads
    turning, passing = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(heads.dtype), passing], dim=-1)
