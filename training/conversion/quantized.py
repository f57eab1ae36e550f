"""FP8 weights with block scales, back to one number each.

Two formats share the suffix `_scale_inv` and both multiply (despite the name): DeepSeek's and MiniMax-M2's fp32 scales,
one for 128 x 128 weights, and MXFP8's exponents, one byte for 32 weights of a row, worth 2^(byte - 127).
"""

import torch
from torch import Tensor

from ...model.hf import ConversionError

SUFFIX = "_scale_inv"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK, MX_BLOCK, MX_BIAS = 128, 32, 127


def scale_name(weight: str) -> str:
    return weight + SUFFIX


def blocks_of(name: str, shape: tuple[int, ...], scale_dtype: torch.dtype, scale_shape: tuple[int, ...]) -> int:
    """Columns that share a scale (rows: as many, or one in MXFP8). Raises ConversionError for other scales."""
    if len(shape) == 2:
        rows, columns = shape
        if scale_dtype == torch.float32 and scale_shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
            return BLOCK
        if scale_dtype in (torch.uint8, torch.float8_e8m0fnu) and scale_shape == (rows, -(-columns // MX_BLOCK)):
            return MX_BLOCK
    raise ConversionError(
        f"{name} {shape} has scales of {scale_dtype} {scale_shape}; known are fp32 for blocks of 128 x 128 and uint8 "
        "for 32 columns of a row."
    )


def dequantize(name: str, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight fp8 [out, in], scale fp32 [out / 128, in / 128] or uint8 [out, in / 32] (both rounded up) -> `dtype`."""
    block = blocks_of(name, tuple(weight.shape), scale.dtype, tuple(scale.shape))
    if block == MX_BLOCK:
        exponent = scale.view(torch.uint8).float() - MX_BIAS
        scale, rows = torch.exp2(exponent), 1
    else:
        rows = BLOCK
    values = torch.empty(weight.shape, dtype=dtype)
    for row in range(0, len(weight), BLOCK):  # a block row at a time, so that fp32 copies stay small
        part = scale[row // rows : -(-min(row + BLOCK, len(weight)) // rows)]
        factors = part.repeat_interleave(block, dim=1)[:, : weight.shape[1]]
        values[row : row + BLOCK] = (weight[row : row + BLOCK].float() * factors).to(dtype)
    return values
