"""The Triton backend of sparse_attention: launches, and the custom op with its gradient."""

import torch
import triton
from torch import Tensor

from ..dense_causal_attention.library import backward_runs, check_head_dim, dense_tables, forward_alone, forward_runs
from ..segments import Segments
from ..triton_support import check_choice, check_triton, dot_precision, next_power_of_two, unit_stride
from ..tuning import TileConfig, longest_query_tile_document, tile_config
from .backward_kernel import _delta_kernel, _dq_kernel, _sparse_attention_bwd_kernel, _sum_slots_kernel
from .kernel import _block_stats_kernel, _combine_kernel, _sparse_attention_fwd_kernel
from .query_tile_launch import query_tile_forward, query_tile_table
from .reverse_index import ReverseIndex, build_reverse_index, document_tables

QUERY_CHUNK = 16384
"""Queries whose partial results exist at one time: 4 GiB of them for 64 heads of 128, k=16, in 16 bits."""

SUPPORTED_SIZES = (16, 32, 64, 128)
HEADS_PER_GROUP = tuple(range(1, 17))
NUM_SELECTED = tuple(range(1, 33))
SUM_ROWS = 16


def check_supported(op: str, query: Tensor, key: Tensor, block_indices: Tensor, block_size: int) -> None:
    """Raise ValueError for sizes that the keys-outer kernels do not do."""
    check_choice(op, "block_size", block_size, SUPPORTED_SIZES)
    check_choice(op, "head dim", query.shape[2], SUPPORTED_SIZES)
    check_choice(op, "query heads per KV group", query.shape[1] // key.shape[1], HEADS_PER_GROUP)
    check_choice(op, "number of kept blocks", block_indices.shape[2], NUM_SELECTED)


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float32 else torch.float16


def tile_for(op: str, query: Tensor, num_groups: int) -> TileConfig:
    _, num_heads, head_dim = query.shape
    return tile_config(
        op, query.device, head_dim=head_dim, heads_per_group=num_heads // num_groups, itemsize=query.dtype.itemsize
    )


def block_stats(key: Tensor, value: Tensor, block_table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Common key fp32 [blocks, g, d], and fp32 [blocks, g, 2]: log2 of the largest |value| and |key - common key|."""
    num_blocks = block_table.shape[0]
    _, num_groups, head_dim = key.shape
    common = key.new_empty((num_blocks, num_groups, head_dim), dtype=torch.float32)
    stats = key.new_empty((num_blocks, num_groups, 2), dtype=torch.float32)
    _block_stats_kernel[(num_blocks, num_groups)](
        key,
        value,
        block_table,
        common,
        stats,
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_GROUPS=num_groups,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
    return common, stats


def index_arguments(index: ReverseIndex, *, slots: bool = False) -> list[Tensor]:
    """The index as the kernels take it, with the gradient slots if they need them."""
    before = [index.pairs, index.row_start, index.local_end, index.row_item]
    return [*before, *([index.row_slot] if slots else []), index.item_row, index.chunk_item]


def chunk_ranges(index: ReverseIndex, num_queries: int) -> list[tuple[int, int]]:
    """First query and number of queries of each chunk."""
    starts = range(0, num_queries, index.query_chunk)
    return [(start, min(index.query_chunk, num_queries - start)) for start in starts]


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
    _, stats = block_stats(key, value, block_table, block_size)
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
    for chunk, (first_query, chunk_queries) in enumerate(chunk_ranges(index, num_queries)):
        _sparse_attention_fwd_kernel[(index.max_items,)](
            query,
            key,
            value,
            query_table,
            block_table,
            stats,
            *index_arguments(index),
            partial,
            partial_lse,
            partial_weight,
            chunk,
            first_query * num_groups * num_selected,
            num_blocks,
            softmax_scale * 1.4426950408889634,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            ROWS=tile.rows,
            PRECISION=dot_precision(query.dtype),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        _combine_kernel[(triton.cdiv(chunk_queries * num_heads, combine.rows),)](
            partial,
            partial_lse,
            partial_weight,
            block_indices,
            query_table,
            output,
            lse,
            first_query,
            chunk_queries,
            *block_indices.stride(),
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            SLOTS=next_power_of_two(num_selected),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            ROWS=combine.rows,
            STAGES=combine.num_stages,
            num_warps=combine.num_warps,
        )


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
    dq = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # Rows add to these chunk after chunk, and documents with nested ranges one after the other.
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
    tensors = (grad, query, key, value, output, lse)
    if block_table.shape[0]:
        sparse = (block_indices, query_table, block_table, block_size, softmax_scale, query_chunk)
        _sparse_backward(dq, dk, dv, *tensors, *sparse)
    else:
        dq.zero_()
    backward_runs(dq, dk, dv, *tensors, dense_table, dense_borders, softmax_scale)
    return dq, dk.to(key.dtype), dv.to(value.dtype)


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


def _sparse_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
    softmax_scale: float,
    query_chunk: int,
) -> None:
    """Write `dq`, 0 where `query_table` has no document; add to `dk` and `dv`, fp32."""
    num_queries, num_heads, head_dim = query.shape
    num_groups, num_selected = block_indices.shape[1:]
    heads = num_heads // num_groups
    num_blocks = block_table.shape[0]
    grad, query, key, value, output = (unit_stride(tensor) for tensor in (grad, query, key, value, output))
    tile = tile_for("sparse_attention_bwd", query, num_groups)
    combine = tile_for("combine_slots", query, num_groups)
    common, stats = block_stats(key, value, block_table, block_size)
    index = build_reverse_index(
        block_indices,
        query_table,
        num_blocks,
        block_size=block_size,
        query_chunk=query_chunk,
        item_queries=tile.columns,
    )
    delta_rows = 4 * combine.rows
    delta, grad_size, delta_size = (torch.empty_like(lse) for _ in range(3))
    _delta_kernel[(triton.cdiv(lse.numel(), delta_rows),)](
        output,
        grad,
        delta,
        grad_size,
        delta_size,
        lse.numel(),
        *output.stride()[:2],
        *grad.stride()[:2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=delta_rows,
        num_warps=4,
    )
    chunk_rows = min(query_chunk, num_queries)
    partial = query.new_empty((chunk_rows, num_groups, num_selected, heads, head_dim), dtype=partial_dtype(query.dtype))
    unit, sigma = (query.new_empty(partial.shape[:4], dtype=torch.float32) for _ in range(2))
    dk_slots, dv_slots = (
        query.new_empty((index.max_slots, block_size, head_dim), dtype=torch.float32) for _ in range(2)
    )
    for chunk, (first_query, chunk_queries) in enumerate(chunk_ranges(index, num_queries)):
        _sparse_attention_bwd_kernel[(index.max_items,)](
            query,
            key,
            value,
            grad,
            lse,
            delta,
            grad_size,
            delta_size,
            query_table,
            block_table,
            common,
            stats,
            *index_arguments(index, slots=True),
            partial,
            unit,
            sigma,
            dk,
            dv,
            dk_slots,
            dv_slots,
            chunk,
            first_query * num_groups * num_selected,
            num_blocks,
            softmax_scale,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *grad.stride()[:2],
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            ROWS=tile.rows,
            PRECISION=dot_precision(query.dtype),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        for total, slots in ((dk, dk_slots), (dv, dv_slots)):
            sum_slots(total, slots, index, chunk, block_table, num_groups)
        _dq_kernel[(triton.cdiv(chunk_queries * num_heads, combine.rows),)](
            partial,
            unit,
            sigma,
            common,
            lse,
            block_indices,
            query_table,
            dq,
            first_query,
            chunk_queries,
            softmax_scale,
            *block_indices.stride(),
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            SLOTS=next_power_of_two(num_selected),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            SHARED_KEY=False,
            ROWS=combine.rows,
            STAGES=combine.num_stages,
            num_warps=combine.num_warps,
        )


def sum_slots(
    total: Tensor, slots: Tensor, index: ReverseIndex, chunk: int, block_table: Tensor, num_groups: int
) -> None:
    """Add the slots [slots, l, dim] of one chunk to `total` [t_k, g, dim], in order."""
    num_blocks = block_table.shape[0]
    _, block_size, dim = slots.shape
    _sum_slots_kernel[(num_groups * num_blocks, triton.cdiv(block_size, SUM_ROWS))](
        total,
        slots,
        index.row_item,
        index.row_slot,
        block_table,
        chunk,
        num_blocks,
        NUM_GROUPS=num_groups,
        DIM=dim,
        BLOCK_SIZE=block_size,
        ROWS=SUM_ROWS,
        num_warps=4,
    )


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
