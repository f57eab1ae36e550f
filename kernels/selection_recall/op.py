"""selection_quality: how good the kept blocks are, on sampled rows (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import (
    check_attention_inputs,
    check_block_indices,
    check_block_size,
    check_device,
    check_floating,
    check_index_inputs,
    resolve_scale,
)
from ..segments import Segments
from .quality import SelectionQuality
from .reference import selection_quality_reference

SUPPORTS = ("kept", "full")


@torch.compiler.disable
def selection_quality(
    query: Tensor,
    key: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    block_indices: Tensor,
    segments: Segments,
    rows: Tensor,
    *,
    block_size: int,
    softmax_scale: float | None = None,
    support: str = "kept",
) -> SelectionQuality:
    """Sums of the quality measures over the query rows `rows`. Not differentiable.

    Args: query [t_q, n, d], key [t_k, g, d]; index_query [t_q, g, i], index_key [t_k, i]; block_indices int32
        [t_q, g, k] (in warm-up: what would be kept); rows int64 [number of sampled rows], row numbers of `query` in
        any order, a row given twice counts twice, rows in no document do not count. `support` is where KL, entropy
        and the fractions are taken: the "kept" tokens (sparse phase) or the "full" visible sequence (warm-up).

    Raises ValueError for inputs that do not fit.
    """
    op = "selection_quality"
    check_floating(op, query=query, key=key)
    check_floating(op, index_query=index_query, index_key=index_key)
    check_attention_inputs(op, segments, query, key)
    check_index_inputs(op, segments, index_query, index_key)
    if index_query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{op}: index_query has {index_query.shape[1]} groups but key has {key.shape[1]}. "
            "There is one index query head per KV group."
        )
    check_block_size(op, block_size)
    check_device(op, query=query, index_query=index_query, block_indices=block_indices)
    check_block_indices(op, block_indices, segments, key.shape[1], block_size)
    if support not in SUPPORTS:
        raise ValueError(f"{op}: unknown support '{support}'. Use one of: {', '.join(SUPPORTS)}.")
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise ValueError(f"{op}: rows must be int64 [number of rows]; got {rows.dtype} {tuple(rows.shape)}.")
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= segments.num_queries):
        raise ValueError(
            f"{op}: rows reach from {int(rows.min())} to {int(rows.max())} but the query rows are "
            f"0..{segments.num_queries - 1}. Sample row numbers of this query tensor."
        )
    return selection_quality_reference(
        query,
        key,
        index_query,
        index_key,
        block_indices,
        segments,
        rows,
        block_size=block_size,
        softmax_scale=resolve_scale(op, softmax_scale, query.shape[2]),
        support=support,
    )
