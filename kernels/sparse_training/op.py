"""sparse_attention_with_kl: sparse attention whose backward also trains the indexer (README.md of this folder)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..block_sparse_attention.op import check_sparse_inputs
from ..checks import check_device, check_index_inputs, resolve_scale
from ..segments import Segments
from ..triton_support import check_choice

Record = Callable[[Tensor], None]


@torch.compiler.disable
def sparse_attention_with_kl(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    block_indices: Tensor,
    index_lse: Tensor,
    segments: Segments,
    *,
    block_size: int,
    kl_weight: float,
    record: Record,
    row_weight: Tensor | None = None,
    softmax_scale: float | None = None,
    dense_up_to: int = 0,
    query_chunk: int | None = None,
) -> Tensor:
    """`sparse_attention`, with kl_weight x sum(row_weight x `sparse_indexer_kl`) as a loss of its own; Triton only.

    Backward makes the gradients of the attention and, with gradient 1 whatever comes from above, those of the loss; P
    is computed once for both. Without a backward pass there is no KL: use `sparse_indexer_kl` to measure one.

    Args: as `sparse_attention` and `sparse_indexer_kl`; block_indices and index_lse of one `select_blocks` call.
        row_weight [t_q, 1] or [t_q, g] in 0..1 (None: all 1). `record` is called once in backward with the sum of
        row_weight x KL over rows and groups, fp64 scalar on the device.

    Returns output [t_q, n, d], differentiable in query, key, value, index_query and index_key.
    """
    op = "sparse_attention_with_kl"
    check_sparse_inputs(op, query, key, value, block_indices, segments, block_size, dense_up_to, "triton")
    check_index_inputs(op, segments, index_query, index_key)
    check_device(op, query=query, index_query=index_query, index_lse=index_lse)
    if index_lse.shape != index_query.shape[:2]:
        raise ValueError(
            f"{op}: index_lse [t_q, g] must be {tuple(index_query.shape[:2])} like index_query; got "
            f"{tuple(index_lse.shape)}. Pass the one that select_blocks returned with block_indices."
        )
    check_row_weight(op, row_weight, index_query)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    from ..block_sparse_attention.launch_support import QUERY_CHUNK, SUPPORTED_SIZES
    from .launch import IndexLoss, SparseAttentionWithKL

    check_choice(op, "index dim", index_query.shape[2], SUPPORTED_SIZES)
    routes = dict(
        block_size=block_size,
        softmax_scale=scale,
        dense_up_to=dense_up_to,
        query_chunk=query_chunk or QUERY_CHUNK,
    )
    loss = IndexLoss(kl_weight, row_weight, record)
    with torch.autocast(query.device.type, enabled=False):
        output: Tensor = SparseAttentionWithKL.apply(
            query, key, value, index_query, index_key, block_indices, index_lse, segments, routes, loss
        )
    return output


def check_row_weight(op: str, row_weight: Tensor | None, index_query: Tensor) -> None:
    rows, groups = index_query.shape[:2]
    if row_weight is not None and row_weight.shape not in ((rows, 1), (rows, groups)):
        raise ValueError(
            f"{op}: row_weight must be [t_q, 1] or [t_q, g], here [{rows}, 1] or [{rows}, {groups}]; got "
            f"{tuple(row_weight.shape)}."
        )
