"""Launches of the sparse backward, chunk after chunk of queries."""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ..triton_support import dot_precision, next_power_of_two, unit_stride
from .backward_kernel import (
    _delta_kernel,
    _dq_kernel,
    _row_sizes_kernel,
    _sparse_attention_bwd_kernel,
    _sum_slots_kernel,
)
from .hopper_launch import HopperBackward, takes_hopper_kernels
from .launch_support import centre_keys, chunk_ranges, index_arguments, partial_dtype, tile_for, value_sizes
from .reverse_index import ReverseIndex, build_reverse_index

SUM_ROWS = 16

OnTeacher = Callable[[ReverseIndex, int, int, int, Tensor], None]
"""Called after a chunk with the index, the chunk, its first query, its number of queries, and P of its pairs, mean over
the heads of the group: [queries, g, k, l] in units of TEACHER_UNIT, valid until the call returns."""


def sparse_backward(
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
    on_teacher: OnTeacher | None = None,
) -> None:
    """Write `dq`, 0 where `query_table` has no document; add to `dk` and `dv`, fp32."""
    num_queries, num_heads, head_dim = query.shape
    num_groups, num_selected = block_indices.shape[1:]
    heads = num_heads // num_groups
    num_blocks = block_table.shape[0]
    grad, query, key, value, output = (unit_stride(tensor) for tensor in (grad, query, key, value, output))
    tile = tile_for("sparse_attention_bwd", query, num_groups)
    combine = tile_for("combine_slots", query, num_groups)
    value_size = value_sizes(value, block_table, block_size)
    centred, key_size = centre_keys(key, block_indices, query_table, block_table, block_size)
    index = build_reverse_index(
        block_indices,
        query_table,
        num_blocks,
        block_size=block_size,
        query_chunk=query_chunk,
        item_queries=tile.columns,
    )
    blocks = dict(
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, SLOTS=next_power_of_two(num_selected), BLOCK_SIZE=block_size
    )
    heads_of_rows = dict(HEADS=heads, HEAD_DIM=head_dim, ROWS=combine.rows, num_warps=combine.num_warps)
    row_size = lse.new_empty((num_queries, num_groups, 2))
    group_rows = tile_for("group_rows", query, num_groups)
    _row_sizes_kernel[(triton.cdiv(num_queries * num_groups, group_rows.rows),)](
        value_size,
        key_size,
        block_indices,
        query_table,
        row_size,
        num_queries,
        *block_indices.stride(),
        **blocks,
        ROWS=group_rows.rows,
        num_warps=group_rows.num_warps,
    )
    delta, unit = (torch.empty_like(lse) for _ in range(2))
    _delta_kernel[(triton.cdiv(lse.numel(), combine.rows),)](
        output,
        grad,
        row_size,
        delta,
        unit,
        num_queries,
        *output.stride()[:2],
        *grad.stride()[:2],
        NUM_GROUPS=num_groups,
        **heads_of_rows,
    )
    chunk_rows = min(query_chunk, num_queries)
    partial = query.new_empty((chunk_rows, num_groups, num_selected, heads, head_dim), dtype=partial_dtype(query.dtype))
    teacher = partial
    if on_teacher is not None:
        teacher = partial.new_empty((*partial.shape[:3], block_size))
    dk_slots, dv_slots = (
        query.new_empty((index.max_slots, block_size, head_dim), dtype=torch.float32) for _ in range(2)
    )
    # That kernel has 32-bit offsets within P of a chunk.
    is_small = chunk_rows * num_groups * num_selected * block_size < 2**31
    is_hopper = is_small and takes_hopper_kernels(query, num_groups, block_size)
    hopper = HopperBackward(query, grad, partial) if is_hopper else None
    key_blocks, rows = (key, centred, value), (lse, delta, unit)
    tables = [query_table, block_table, *index_arguments(index, slots=True)]
    results = (teacher, dk, dv, dk_slots, dv_slots)
    sizes = dict(NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, HEADS=heads, TEACHER=on_teacher is not None)
    for chunk, (first_query, chunk_queries) in enumerate(chunk_ranges(index, num_queries)):
        numbers = (chunk, first_query * num_groups * num_selected, num_blocks, softmax_scale)
        if hopper is not None:
            hopper.launch(index.max_items, key_blocks, rows, tables, results, numbers, **sizes)
        else:
            _sparse_attention_bwd_kernel[(index.max_items,)](
                query,
                *key_blocks,
                grad,
                *rows,
                *tables,
                partial,
                *results,
                *numbers,
                *query.stride()[:2],
                *key.stride()[:2],
                *value.stride()[:2],
                *grad.stride()[:2],
                HEAD_DIM=head_dim,
                BLOCK_SIZE=block_size,
                PLACES=next_power_of_two(heads),
                SAME_STRIDES=query.stride() == grad.stride(),
                ROWS=tile.rows,
                PRECISION=dot_precision(query.dtype),
                STAGES=tile.num_stages,
                num_warps=tile.num_warps,
                **sizes,
            )
        for total, slots in ((dk, dk_slots), (dv, dv_slots)):
            sum_slots(total, slots, index, chunk, block_table, num_groups)
        _dq_kernel[(triton.cdiv(chunk_queries * num_heads, combine.rows),)](
            partial,
            unit,
            block_indices,
            query_table,
            dq,
            first_query,
            chunk_queries,
            softmax_scale,
            *block_indices.stride(),
            STAGES=combine.num_stages,
            **blocks,
            **heads_of_rows,
        )
        if on_teacher is not None:
            on_teacher(index, chunk, first_query, chunk_queries, teacher)


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
