"""sparse_attention: exact attention over the kept blocks (README.md of this folder)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..checks import (
    check_attention_inputs,
    check_backend,
    check_block_indices,
    check_block_size,
    check_dense_up_to,
    check_device,
    check_floating,
    resolve_scale,
)
from ..segments import Segments
from ..triton_support import BACKENDS
from .reference import sparse_attention_reference


@torch.compiler.disable
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float | None = None,
    dense_up_to: int = 0,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over the visible tokens of its kept blocks; a group's heads share the blocks.

    Args: query [t_q, n, d], key and value [t_k, g, d] of one floating dtype, any strides; head h belongs to group
        h // (n/g). block_indices int32 [t_q, g, k] as `select_blocks` returns them. `softmax_scale` defaults to
        1/sqrt(d). Fragments of at most `dense_up_to` keys must keep all visible blocks, as `select_blocks` does up to
        k * block_size: the Triton backend takes the library kernels of `dense_attention` for them, which are exact,
        faster there, and deterministic as PyTorch is told to be.

    Returns:
        output [t_q, n, d] in the input dtype, differentiable in query, key and value.
        lse fp32 (fp64 for fp64 inputs) [t_q, n], natural log over the kept tokens, not differentiable.
        Rows in no document, or without any id: output 0, lse -inf, gradients 0.

    Raises ValueError for inputs that do not fit, and for ids that repeat, descend or are not visible. The Triton
        backend does not read ids back from a GPU to check them: such ids give wrong rows there. It is for fp16,
        bf16 and fp32, head dims and block sizes of 16 to 128 (powers of two), up to 16 heads a group, up to 32 blocks
        kept; it is deterministic, and its gradients are not differentiable again.
    """
    op = "sparse_attention"
    check_sparse_inputs(op, query, key, value, block_indices, segments, block_size, dense_up_to, backend)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    attend: Callable[..., tuple[Tensor, Tensor]]
    if backend == "triton":
        from .launch import sparse_attention_triton

        attend = partial(sparse_attention_triton, dense_up_to=dense_up_to)
    else:
        attend = sparse_attention_reference
    with torch.autocast(query.device.type, enabled=False):
        return attend(query, key, value, block_indices, segments, block_size=block_size, softmax_scale=scale)


def check_sparse_inputs(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    segments: Segments,
    block_size: int,
    dense_up_to: int,
    backend: str,
) -> None:
    """Raise ValueError for what `sparse_attention` does not take."""
    check_backend(op, backend, BACKENDS)
    check_floating(op, query=query, key=key, value=value)
    check_attention_inputs(op, segments, query, key, value)
    check_block_size(op, block_size)
    check_device(op, query=query, block_indices=block_indices)
    read_ids = backend == "reference" or not block_indices.is_cuda
    check_block_indices(op, block_indices, segments, key.shape[1], block_size, read_ids=read_ids)
    check_dense_up_to(op, dense_up_to, block_indices, block_size)
