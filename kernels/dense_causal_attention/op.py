"""dense_attention: full causal attention within each document (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import check_attention_inputs, check_backend, check_floating, resolve_scale
from ..segments import Segments
from .library import dense_attention_library, has_library
from .reference import dense_attention_reference

BACKENDS = ("reference", "triton")


@torch.compiler.disable
def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    softmax_scale: float | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over all tokens of its document up to itself.

    Args: query [t_q, n, d], key and value [t_k, g, d] of one floating dtype, any strides; head h belongs to group
        h // (n/g). `softmax_scale` defaults to 1/sqrt(d).

    Returns:
        output [t_q, n, d] in the input dtype, differentiable in query, key and value.
        lse fp32 (fp64 for fp64 inputs) [t_q, n], natural log, not differentiable.
        Rows in no document: output 0, lse -inf, gradients 0.

    Backend "triton" takes the fused library kernels for fp16 and bf16 on a GPU, and a deterministic one of them under
    `torch.use_deterministic_algorithms(True)` (library.py says which). There is no such kernel for fp32 or for the CPU:
    there it computes as the reference does.

    Raises ValueError for inputs that do not fit.
    """
    op = "dense_attention"
    check_backend(op, backend, BACKENDS)
    check_floating(op, query=query, key=key, value=value)
    check_attention_inputs(op, segments, query, key, value)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    with torch.autocast(query.device.type, enabled=False):
        if backend == "triton" and has_library(query):
            return dense_attention_library(query, key, value, segments, softmax_scale=scale)
        return dense_attention_reference(query, key, value, segments, softmax_scale=scale)
