"""Value and gradients of the full-sequence KL in one go, for row weights that are known beforehand.

On Hopper the teacher of a chunk of query rows is made once, left in memory, and read for the value, the query gradient
and the key gradient. Elsewhere the two kernels of `dense_indexer_kl` each make it themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..segments import Segments
from ..tuning import TileConfig, tile_config
from ..work_tables import query_tiles
from .dense_launch import (
    FP16_SCALE,
    SavedTeacher,
    _dense_indexer_kl,
    _dense_indexer_kl_backward,
    dense_kl_read_bwd_key,
    dense_kl_read_fwd,
    dense_student,
    key_tiles_in_layers,
    op_tables,
    several_tokens,
)
from .hopper_teacher_launch import KEYS, HopperTeacher, takes_hopper_teacher

TEACHER_BYTES = 2 * 2**30
"""Most memory for P of one chunk, as long as that is CHUNK_ROWS or more."""
CHUNK_ROWS = 128
"""Chunks are a multiple of so many query rows."""

Teacher = Callable[[Segments, int, Tensor], None]
"""Writes P of a chunk: see `HopperTeacher`."""


def dense_kl_gradient(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    segments: Segments,
    weight: Tensor,
    factor: Tensor | float,
    *,
    softmax_scale: float,
    index_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of weight x `dense_indexer_kl`, gradients of factor x that sum by index_query and by index_key).

    Args: inputs as `dense_indexer_kl`, none of them differentiated; weight fp32 [t_q, g] in 0..1, anything in rows of
        no document; factor a number or a scalar tensor; index_lse fp32 [t_q, g], the student's lse over all visible
        tokens, where the caller has it.

    Returns the sum as fp64 scalar and the gradients in the dtypes of their inputs.
    """
    several = several_tokens(segments, query.device)
    weight = torch.where(several[:, None], weight, 0.0)
    if takes_hopper_teacher(query, index_query):
        teacher = HopperTeacher(query, key, lse, softmax_scale)
        return gradient_by_chunks(teacher, index_query, index_key, segments, weight, factor, index_lse=index_lse)
    tensors = (index_query, index_key, query, key, lse.float())
    query_table, *tables = op_tables(index_query, query, key.shape[1], segments)
    kl, student, d_unit = _dense_indexer_kl(*tensors, query_table, *tables, softmax_scale, True)
    gradients = _dense_indexer_kl_backward(weight * factor, *tensors, student, d_unit, *tables, softmax_scale)
    return (weight * kl).sum(dtype=torch.float64), *gradients


def chunk_rows(num_groups: int, columns: int) -> int:
    """Query rows of a chunk."""
    return max(TEACHER_BYTES // (4 * num_groups * columns) // CHUNK_ROWS, 1) * CHUNK_ROWS


def gradient_by_chunks(
    teacher: Teacher,
    index_query: Tensor,
    index_key: Tensor,
    segments: Segments,
    weight: Tensor,
    factor: Tensor | float,
    *,
    index_lse: Tensor | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dense_kl_gradient`; weight is 0 in rows of less than two tokens. `rows`: query rows of a chunk."""
    num_queries, num_groups, index_dim = index_query.shape
    device = index_query.device
    columns = -(-max(segments.max_k_len, 1) // KEYS) * KEYS
    rows = min(rows or chunk_rows(num_groups, columns), num_queries)
    forward, backward = (_config(f"dense_kl_read_{name}", index_query) for name in ("fwd", "bwd"))
    if index_lse is None:
        config = _config("dense_student", index_query)
        student = dense_student(index_query, index_key, query_tiles(segments, device, rows=config.rows), config)
    else:
        student = torch.stack([index_lse, torch.ones_like(index_lse)], dim=2)
    several = several_tokens(segments, device)
    scale = index_dim**-0.5
    probs = weight.new_empty((rows, num_groups, columns))
    value = weight.new_zeros((), dtype=torch.float64)
    d_index_query = torch.zeros_like(index_query, memory_format=torch.contiguous_format)
    d_index_key = weight.new_zeros((index_key.shape[0], num_groups, index_dim))
    # Weights near 1: fp16 has no room for small ones.
    largest = weight.amax().clamp(min=torch.finfo(torch.float32).tiny)
    scaled = weight / largest
    for chunk in segments.chunks(rows) if rows else ():
        first = min(row[0] for row in chunk.rows)
        own = slice(first, max(row[0] + row[1] for row in chunk.rows))
        saved = SavedTeacher(probs[: own.stop - first], first, student)
        teacher(chunk, first, saved.probs)
        kl, d_unit = dense_kl_read_fwd(
            index_query, index_key, saved, query_tiles(chunk, device, rows=forward.rows), forward
        )
        row_weight, is_used = weight[own], several[own, None]
        value += torch.where(is_used, row_weight * kl, 0.0).sum(dtype=torch.float64)
        gradient = row_weight[:, :, None] * d_unit * (scale * factor)
        d_index_query[own] = torch.where(is_used[:, :, None], gradient, 0.0).to(index_query.dtype)
        tiles, layers = key_tiles_in_layers(chunk, device, backward.columns)
        dense_kl_read_bwd_key(index_query, index_key, saved, scaled, d_index_key, tiles, layers.tolist(), backward)
    lifted = FP16_SCALE if index_query.dtype == torch.float16 else 1.0
    d_index_key = d_index_key.sum(dim=1) * (largest * (scale / lifted) * factor)
    return value, d_index_query, d_index_key.to(index_key.dtype)


def _config(op: str, index_query: Tensor) -> TileConfig:
    return tile_config(op, index_query.device, head_dim=index_query.shape[2], itemsize=index_query.dtype.itemsize)
