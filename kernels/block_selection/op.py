"""select_blocks: which KV blocks each query keeps (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import check_backend, check_block_size, check_floating, check_index_inputs
from ..segments import Segments
from ..triton_support import BACKENDS
from .reference import select_blocks_reference


@torch.compiler.disable
def select_blocks(
    index_query: Tensor,
    index_key: Tensor,
    segments: Segments,
    *,
    block_size: int,
    num_selected_blocks: int,
    init_blocks: int = 0,
    backend: str = "reference",
) -> tuple[Tensor, Tensor]:
    """Keep the k best KV blocks of each query row and group. Not differentiable.

    Args: index_query [t_q, g, i] and index_key [t_k, i] of one floating dtype, any strides.

    Returns:
        block_indices int32 [t_q, g, k]: ids within the document (position // block_size), ascending, -1 at the end.
            The local block is always there, then the `init_blocks` first blocks, then the best by raw dot product,
            ties to the lower id.
        index_lse fp32 (fp64 for fp64 inputs) [t_q, g]: natural log of the sum of exp(dot / sqrt(i)) over the visible
            tokens of the kept blocks.
        Rows in no document: ids -1, lse -inf.

    Raises ValueError for inputs that do not fit, and when a visible score is not finite. On a GPU the Triton backend
        does not wait for its kernels: such a score is raised by a later call, or by `raise_if_not_finite()`, which a
        training loop calls where it synchronises anyway.
    """
    op = "select_blocks"
    check_backend(op, backend, BACKENDS)
    check_floating(op, index_query=index_query, index_key=index_key)
    check_index_inputs(op, segments, index_query, index_key)
    check_block_size(op, block_size)
    if num_selected_blocks < 1:
        raise ValueError(
            f"{op}: num_selected_blocks ({num_selected_blocks}) must be at least 1: the local block is always kept."
        )
    if not 0 <= init_blocks < num_selected_blocks:
        raise ValueError(
            f"{op}: init_blocks ({init_blocks}) must lie in 0..{num_selected_blocks - 1}, as the local block takes one "
            f"of the num_selected_blocks ({num_selected_blocks}) slots."
        )
    if backend == "triton":
        from .launch import select_blocks_triton as select
    else:
        select = select_blocks_reference
    with torch.autocast(index_query.device.type, enabled=False):
        return select(
            index_query,
            index_key,
            segments,
            block_size=block_size,
            num_selected_blocks=num_selected_blocks,
            init_blocks=init_blocks,
        )
