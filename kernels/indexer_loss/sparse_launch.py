"""The Triton backend of sparse_indexer_kl: launches, and the custom op with its gradient."""

import math

import torch
import triton
from torch import Tensor

from ..block_sparse_attention.launch_support import (
    QUERY_CHUNK,
    SUPPORTED_SIZES,
    check_supported,
    chunk_ranges,
    index_arguments,
    tile_for,
)
from ..block_sparse_attention.reverse_index import build_reverse_index, document_tables
from ..segments import Segments
from ..triton_support import check_choice, check_triton, dot_precision, next_power_of_two, unit_stride
from .dense_launch import dense_indexer_kl_triton
from .sparse_backward import IndexGradient
from .sparse_kernel import _kl_rows_kernel, _sparse_kl_fwd_kernel

LOG2E = 1.0 / math.log(2.0)


@torch.library.custom_op("msa_pretrain::sparse_indexer_kl", mutates_args=())
def _sparse_indexer_kl(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
) -> tuple[Tensor, Tensor]:
    """KL fp32 [t_q, g] and the student's lse fp32 [t_q, g]; +inf in rows of one token, which have no gradient."""
    num_queries, num_groups, num_selected = block_indices.shape
    index_dim, (num_heads, head_dim) = index_query.shape[2], query.shape[1:]
    num_blocks = block_table.shape[0]
    kl, index_lse = (torch.empty((num_queries, num_groups), dtype=torch.float32, device=query.device) for _ in range(2))
    if num_blocks == 0:
        return kl.zero_(), index_lse.fill_(-torch.inf)
    index_query, index_key, query, key = (unit_stride(x) for x in (index_query, index_key, query, key))
    lse = lse.to(torch.float32).contiguous()
    tile = tile_for("sparse_kl_fwd", query, num_groups)
    index = build_reverse_index(
        block_indices,
        query_table,
        num_blocks,
        block_size=block_size,
        query_chunk=query_chunk,
        item_queries=tile.columns,
    )
    rows = tile_for("group_rows", query, num_groups)
    slot_lse, mass, cross = (
        query.new_empty((min(query_chunk, num_queries), num_groups, num_selected), dtype=torch.float32)
        for _ in range(3)
    )
    for chunk, (first_query, chunk_queries) in enumerate(chunk_ranges(index, num_queries)):
        _sparse_kl_fwd_kernel[(index.max_items,)](
            index_query,
            index_key,
            query,
            key,
            lse,
            query_table,
            block_table,
            *index_arguments(index),
            slot_lse,
            mass,
            cross,
            chunk,
            first_query * num_groups * num_selected,
            num_blocks,
            softmax_scale * LOG2E,
            LOG2E / math.sqrt(index_dim),
            *index_query.stride()[:2],
            index_key.stride(0),
            *query.stride()[:2],
            *key.stride()[:2],
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            HEADS=num_heads // num_groups,
            HEAD_DIM=head_dim,
            INDEX_DIM=index_dim,
            BLOCK_SIZE=block_size,
            ROWS=tile.rows,
            PRECISION=dot_precision(query.dtype),
            INDEX_PRECISION=dot_precision(index_query.dtype),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        _kl_rows_kernel[(triton.cdiv(chunk_queries * num_groups, rows.rows),)](
            slot_lse,
            mass,
            cross,
            block_indices,
            query_table,
            kl,
            index_lse,
            first_query,
            chunk_queries,
            *block_indices.stride(),
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            SLOTS=next_power_of_two(num_selected),
            BLOCK_SIZE=block_size,
            ROWS=rows.rows,
            num_warps=rows.num_warps,
        )
    return kl, index_lse


@_sparse_indexer_kl.register_fake
def _(
    index_query,
    index_key,
    query,
    key,
    lse,
    block_indices,
    query_table,
    block_table,
    block_size,
    softmax_scale,
    query_chunk,
):
    shape = index_query.shape[:2]
    return index_query.new_empty(shape, dtype=torch.float32), index_query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("msa_pretrain::sparse_indexer_kl_backward", mutates_args=())
def _sparse_indexer_kl_backward(
    grad: Tensor,
    index_lse: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
) -> tuple[Tensor, Tensor]:
    index_query, index_key, grad = unit_stride(index_query), unit_stride(index_key), grad.to(torch.float32)
    # A power of two that brings the weights to at most 1, for the 16-bit product.
    unit = grad.abs().amax().clamp(min=1e-30).log2().ceil().exp2()
    tables = (block_indices, query_table, block_table)
    gradient = IndexGradient(index_query, index_key, index_lse, grad / unit, unit, *tables, block_size, measure=False)
    if block_table.shape[0]:
        gradient.add_all((query, key, lse, softmax_scale), query_chunk)
    return gradient.result()


@_sparse_indexer_kl_backward.register_fake
def _(
    grad,
    index_lse,
    index_query,
    index_key,
    query,
    key,
    lse,
    block_indices,
    query_table,
    block_table,
    block_size,
    softmax_scale,
    query_chunk,
):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (index_query, index_key))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.block_size, ctx.softmax_scale, ctx.query_chunk = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx, grad_kl, grad_index_lse):
    sizes = (ctx.block_size, ctx.softmax_scale, ctx.query_chunk)
    dq, dk = _sparse_indexer_kl_backward(grad_kl, *ctx.saved_tensors, *sizes)
    return dq, dk, *[None] * 9


_sparse_indexer_kl.register_autograd(_backward, setup_context=_setup_context)


def sparse_indexer_kl_triton(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float,
    dense_up_to: int = 0,
    query_chunk: int = QUERY_CHUNK,
) -> Tensor:
    """See `sparse_indexer_kl`. `query_chunk` bounds the memory of partial results."""
    op = "sparse_indexer_kl"
    check_triton(op, index_query, query)
    check_choice(op, "index dim", index_query.shape[2], SUPPORTED_SIZES)
    check_supported(op, query, key, block_indices, block_size)
    short, long = segments.split_at(dense_up_to)
    teacher = (query.detach(), key.detach(), lse.detach())
    parts = []
    if long.num_valid_rows or not short.num_valid_rows:
        tables = document_tables(long, block_size, query.device)
        sizes = (block_size, softmax_scale, query_chunk)
        parts.append(_sparse_indexer_kl(index_query, index_key, *teacher, block_indices, *tables, *sizes)[0])
    if short.num_valid_rows:
        parts.append(dense_indexer_kl_triton(index_query, index_key, *teacher, short, softmax_scale=softmax_scale))
    # Each is 0 in the other's rows.
    return sum(parts[1:], parts[0])
