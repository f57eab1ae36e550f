"""attach_dense_kl: dense attention whose backward also trains the indexer (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import resolve_scale
from ..indexer_loss.op import check_kl_inputs
from ..segments import Segments
from ..sparse_training.op import Record, check_row_weight


@torch.compiler.disable
def attach_dense_kl(
    output: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    segments: Segments,
    *,
    kl_weight: float,
    record: Record,
    row_weight: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """`output`, with kl_weight x sum(row_weight x `dense_indexer_kl`) as a loss of its own; Triton only.

    Backward passes the gradient of output on as it is and makes, with gradient 1 whatever comes from above, those of
    the loss; value and gradients share one computation of P. Without a backward pass there is no KL: use
    `dense_indexer_kl` to measure one.

    Args: output of any shape, and query, key, lse of the `dense_attention` call that made it; index_query and index_key
        as `dense_indexer_kl` takes them. row_weight [t_q, 1] or [t_q, g] in 0..1 (None: all 1). `record` is called once
        in backward with the sum of row_weight x KL over rows and groups, fp64 scalar on the device.

    Returns output, differentiable in output, index_query and index_key.
    """
    op = "attach_dense_kl"
    check_kl_inputs(op, index_query, index_key, query, key, lse, segments)
    check_row_weight(op, row_weight, index_query)
    scale = resolve_scale(op, softmax_scale, query.shape[2])
    from ..indexer_loss.dense_launch import check_supported
    from ..sparse_training.launch import IndexLoss
    from .launch import AttachDenseKL

    check_supported(op, index_query, index_key, query, key)
    loss = IndexLoss(kl_weight, row_weight, record)
    with torch.autocast(query.device.type, enabled=False):
        attached: Tensor = AttachDenseKL.apply(
            output, index_query, index_key, query.detach(), key.detach(), lse.detach(), segments, scale, loss
        )
    return attached
