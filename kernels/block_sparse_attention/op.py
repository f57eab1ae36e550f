"""sparse_attention: exact attention over the kept blocks (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import (
    check_attention_inputs,
    check_backend,
    check_block_indices,
    check_block_size,
    check_device,
    check_floating,
    resolve_scale,
)
from ..segments import Segments
from .reference import sparse_attention_reference

BACKENDS = ("reference",)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over the visible tokens of its kept blocks; a group's heads share the blocks.

    Args: query [t_q, n, d], key and value [t_k, g, d] of one floating dtype, any strides; head h belongs to group
        h // (n/g). block_indices int32 [t_q, g, k] as `select_blocks` returns them. `softmax_scale` defaults to
        1/sqrt(d).

    Returns:
        output [t_q, n, d] in the input dtype, differentiable in query, key and value.
        lse fp32 (fp64 for fp64 inputs) [t_q, n], natural log over the kept tokens, not differentiable.
        Rows in no document, or without any id: output 0, lse -inf, gradients 0.

    Raises ValueError for inputs that do not fit, and for ids that repeat, descend or are not visible.
    """
    op = "sparse_attention"
    check_backend(op, backend, BACKENDS)
    check_floating(op, query=query, key=key, value=value)
    check_attention_inputs(op, segments, query, key, value)
    check_block_size(op, block_size)
    check_device(op, query=query, block_indices=block_indices)
    check_block_indices(op, block_indices, segments, key.shape[1], block_size)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    with torch.autocast(query.device.type, enabled=False):
        return sparse_attention_reference(
            query, key, value, block_indices, segments, block_size=block_size, softmax_scale=scale
        )
