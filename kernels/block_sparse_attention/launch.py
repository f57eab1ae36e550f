"""The Triton backend of sparse_attention: launches, and the custom op with its gradient."""

import torch
import triton
from torch import Tensor

from ..dense_causal_attention.library import backward_runs, check_head_dim, dense_tables, forward_alone, forward_runs
from ..segments import Segments
from ..triton_support import check_triton, dot_precision, next_power_of_two, unit_stride
from ..tuning import longest_query_tile_document
from .backward_launch import OnTeacher, sparse_backward
from .hopper_launch import HopperForward, takes_hopper_kernels
from .kernel import _combine_kernel, _sparse_attention_fwd_kernel
from .launch_support import (
    QUERY_CHUNK,
    check_supported,
    chunk_ranges,
    index_arguments,
    partial_dtype,
    tile_for,
    value_sizes,
)
from .query_tile_launch import query_tile_forward, query_tile_table
from .reverse_index import build_reverse_index, document_tables


@torch.library.custom_op("msa_pretrain::sparse_attention", mutates_args=())
def _sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    dense_table: Tensor,
    dense_borders: Tensor,
    keys_query_table: Tensor,
    keys_block_table: Tensor,
    tile_table: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
    query_tile_up_to: int,
    all_rows_valid: bool,
) -> tuple[Tensor, Tensor]:
    """`query_table` and `block_table` are of the sparse documents, `dense_table` and `dense_borders` of the others.

    Forward takes the sparse documents of at most `query_tile_up_to` keys by query tiles (`tile_table`) and the others
    keys outer (`keys_query_table` and `keys_block_table`). Backward takes all of them keys outer.
    """
    if all_rows_valid and not block_table.shape[0] and dense_table.shape[0] == 1:
        return forward_alone(query, key, value, dense_table, dense_borders, softmax_scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if keys_block_table.shape[0]:
        sparse = (block_indices, keys_query_table, keys_block_table, block_size, softmax_scale, query_chunk)
        _sparse_forward(output, lse, query, key, value, *sparse)
    elif not all_rows_valid:
        output.zero_()
        lse.fill_(-torch.inf)
    if tile_table.shape[0]:
        tile = tile_for("query_tile_fwd", query, key.shape[1])
        query_tile_forward(
            output, lse, query, key, value, block_indices, tile_table, tile,
            block_size=block_size, softmax_scale=softmax_scale, num_keys=query_tile_up_to,
        )  # fmt: skip
    forward_runs(output, lse, query, key, value, dense_table, dense_borders, softmax_scale)
    return output, lse


@_sparse_attention.register_fake
def _(
    query,
    key,
    value,
    block_indices,
    query_table,
    block_table,
    dense_table,
    dense_borders,
    keys_query_table,
    keys_block_table,
    tile_table,
    block_size,
    softmax_scale,
    query_chunk,
    query_tile_up_to,
    all_rows_valid,
):
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), lse


def _sparse_forward(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
) -> None:
    """Write all rows; 0 and -inf where `query_table` has no document."""
    num_queries, num_heads, head_dim = query.shape
    num_groups, num_selected = block_indices.shape[1:]
    heads = num_heads // num_groups
    num_blocks = block_table.shape[0]
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    tile = tile_for("sparse_attention_fwd", query, num_groups)
    combine = tile_for("combine_slots", query, num_groups)
    value_size = value_sizes(value, block_table, block_size)
    index = build_reverse_index(
        block_indices,
        query_table,
        num_blocks,
        block_size=block_size,
        query_chunk=query_chunk,
        item_queries=tile.columns,
    )
    chunk_rows = min(query_chunk, num_queries)
    partial = query.new_empty((chunk_rows, num_groups, num_selected, heads, head_dim), dtype=partial_dtype(query.dtype))
    partial_lse, partial_weight = (query.new_empty(partial.shape[:4], dtype=torch.float32) for _ in range(2))
    hopper = HopperForward(query, partial) if takes_hopper_kernels(query, num_groups, block_size) else None
    tables = [query_table, block_table, value_size, *index_arguments(index)]
    results = (partial_lse, partial_weight)
    sizes = dict(NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, HEADS=heads)
    for chunk, (first_query, chunk_queries) in enumerate(chunk_ranges(index, num_queries)):
        numbers = (chunk, first_query * num_groups * num_selected, num_blocks, softmax_scale * 1.4426950408889634)
        if hopper is not None:
            hopper.launch(index.max_items, key, value, tables, results, numbers, **sizes)
        else:
            _sparse_attention_fwd_kernel[(index.max_items,)](
                query,
                key,
                value,
                *tables,
                partial,
                *results,
                *numbers,
                *query.stride()[:2],
                *key.stride()[:2],
                *value.stride()[:2],
                HEAD_DIM=head_dim,
                BLOCK_SIZE=block_size,
                ROWS=tile.rows,
                PRECISION=dot_precision(query.dtype),
                num_warps=tile.num_warps,
                **sizes,
            )
        _combine_kernel[(triton.cdiv(chunk_queries * num_heads, combine.rows),)](
            partial,
            *results,
            block_indices,
            query_table,
            output,
            lse,
            first_query,
            chunk_queries,
            *block_indices.stride(),
            SLOTS=next_power_of_two(num_selected),
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            ROWS=combine.rows,
            STAGES=combine.num_stages,
            num_warps=combine.num_warps,
            **sizes,
        )


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    dense_table: Tensor,
    dense_borders: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
    on_teacher: OnTeacher | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `on_teacher` sees P of the sparse documents."""
    dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # Rows add to these chunk after chunk, and documents with nested ranges one after the other.
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    tensors = (grad, query, key, value, output, lse)
    if block_table.shape[0]:
        sparse = (block_indices, query_table, block_table, block_size, softmax_scale, query_chunk)
        sparse_backward(dq, dk, dv, *tensors, *sparse, on_teacher)
    else:
        dq.zero_()
    backward_runs(dq, dk, dv, *tensors, dense_table, dense_borders, softmax_scale)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


@torch.library.custom_op("msa_pretrain::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    dense_table: Tensor,
    dense_borders: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (grad, query, key, value, output, lse)
    tables = (block_indices, query_table, block_table, dense_table, dense_borders)
    return attention_gradients(*tensors, *tables, block_size, softmax_scale, query_chunk)


@_sparse_attention_backward.register_fake
def _(
    grad,
    query,
    key,
    value,
    output,
    lse,
    block_indices,
    query_table,
    block_table,
    dense_table,
    dense_borders,
    block_size,
    softmax_scale,
    query_chunk,
):
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value))


def _setup_context(ctx, inputs, output):
    query, key, value, block_indices, query_table, block_table, dense_table, dense_borders, *_ = inputs
    ctx.block_size, ctx.softmax_scale, ctx.query_chunk = inputs[11:14]
    tables = (query_table, block_table, dense_table, dense_borders)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, block_indices, *tables, *output)


def _backward(ctx, grad_output, grad_lse):
    query, key, value, *tables, output, lse = ctx.saved_tensors
    sizes = (ctx.block_size, ctx.softmax_scale, ctx.query_chunk)
    grads = _sparse_attention_backward(grad_output, query, key, value, output, lse, *tables, *sizes)
    return *grads, *[None] * 13


_sparse_attention.register_autograd(_backward, setup_context=_setup_context)


def sparse_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float,
    dense_up_to: int = 0,
    query_chunk: int = QUERY_CHUNK,
    query_tile_up_to: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `sparse_attention`. `query_chunk` bounds the memory of partial results and changes no output bit.

    Forward takes documents of at most `query_tile_up_to` keys (those of `dense_up_to` apart) by query tiles; by default
    the length up to which `tuning` has them faster.
    """
    check_triton("sparse_attention", query)
    check_supported("sparse_attention", query, key, block_indices, block_size)
    num_groups, device = key.shape[1], query.device
    heads = query.shape[1] // num_groups
    if query_tile_up_to is None:
        query_tile_up_to = longest_query_tile_document(device, heads_per_group=heads, itemsize=query.dtype.itemsize)
    short, long = segments.split_at(dense_up_to)
    by_tile, by_key = long.split_at(query_tile_up_to)
    if short.num_valid_rows:
        check_head_dim(query)
    tables = (*document_tables(long, block_size, device), *dense_tables(short, device))
    tile_table = query_tile_table(by_tile, tile_for("query_tile_fwd", query, num_groups), heads, device)
    return torch.ops.msa_pretrain.sparse_attention(
        query, key, value, block_indices, *tables, *document_tables(by_key, block_size, device), tile_table,
        block_size, softmax_scale, query_chunk, query_tile_up_to, segments.num_valid_rows == segments.num_queries,
    )  # fmt: skip
