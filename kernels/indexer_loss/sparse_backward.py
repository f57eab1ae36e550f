"""Gradient of the sparse KL: launches, chunk after chunk of queries, with the teacher recomputed or read."""

import math

import torch
import triton
from torch import Tensor

from ..block_sparse_attention.backward_kernel import _dq_kernel
from ..block_sparse_attention.backward_launch import sum_slots
from ..block_sparse_attention.launch_support import (
    centre_keys,
    chunk_ranges,
    index_arguments,
    partial_dtype,
    tile_for,
)
from ..block_sparse_attention.reverse_index import ReverseIndex, build_reverse_index
from ..triton_support import dot_precision, next_power_of_two, unit_stride
from .sparse_kernel import _kl_weights_kernel, _sparse_kl_bwd_kernel

LOG2E = 1.0 / math.log(2.0)


class IndexGradient:
    """Adds up the gradient of sum over rows of factor x weight x KL, for weights [t_q, g] of at most 1.

    Index inputs have a dense last dimension; index_lse fp32 [t_q, g] is over the visible tokens of the kept blocks.
    With `measure`, `kl` is the sum over rows of weight x KL in nats, in fp64.
    """

    def __init__(
        self,
        index_query: Tensor,
        index_key: Tensor,
        index_lse: Tensor,
        weight: Tensor,
        factor: Tensor | float,
        block_indices: Tensor,
        query_table: Tensor,
        block_table: Tensor,
        block_size: int,
        *,
        measure: bool,
    ) -> None:
        self.measure = measure
        self.kl = index_lse.new_zeros((), dtype=torch.float64)
        self.index_query, self.index_key, self.index_lse = index_query, index_key, index_lse
        self.block_indices, self.query_table, self.block_table = block_indices, query_table, block_table
        self.block_size, self.factor, self.scale = block_size, factor, 1.0 / math.sqrt(index_query.shape[2])
        num_queries, num_groups, num_selected = block_indices.shape
        self.dq = torch.empty_like(index_query, memory_format=torch.contiguous_format)
        # Rows add to it chunk after chunk; the groups share the index key and are summed at the end.
        self.dk = index_key.new_zeros((index_key.shape[0], num_groups, index_key.shape[1]), dtype=torch.float32)
        self.weight = torch.zeros_like(index_lse)
        if not block_table.shape[0]:
            self.dq.zero_()
            return
        # One key for all groups.
        tables = (block_indices, query_table, block_table, block_size)
        self.centred, key_size = centre_keys(index_key[:, None], *tables)
        self.unit, self.weighted_unit = (torch.empty_like(index_lse) for _ in range(2))
        rows = tile_for("group_rows", index_query, num_groups)
        _kl_weights_kernel[(triton.cdiv(index_lse.numel(), rows.rows),)](
            weight.contiguous(),
            key_size,
            block_indices,
            query_table,
            self.weight,
            self.unit,
            self.weighted_unit,
            num_queries,
            *block_indices.stride(),
            NUM_GROUPS=num_groups,
            NUM_SELECTED=num_selected,
            SLOTS=next_power_of_two(num_selected),
            BLOCK_SIZE=block_size,
            ROWS=rows.rows,
            num_warps=rows.num_warps,
        )
        self.weighted_unit *= factor

    def add(
        self,
        index: ReverseIndex,
        chunk: int,
        first_query: int,
        num_queries: int,
        teacher: Tensor | tuple[Tensor, Tensor, Tensor, float],
    ) -> None:
        """Add a chunk of queries. The teacher: P as `OnTeacher` gives it, or query, key, lse and softmax scale."""
        num_groups, num_selected = self.block_indices.shape[1:]
        index_dim, num_blocks, dtype = self.index_query.shape[2], self.block_table.shape[0], self.index_query.dtype
        is_saved = isinstance(teacher, Tensor)
        tile = tile_for("sparse_kl_read" if is_saved else "sparse_kl_bwd", self.index_query, num_groups)
        if is_saved:
            saved, query, key, lse, softmax_scale = (
                teacher,
                self.index_query,
                self.index_key[:, None],
                self.index_lse,
                1.0,
            )
        else:
            saved, (query, key, lse, softmax_scale) = self.weight, teacher
        partial = self.index_query.new_empty(
            (num_queries, num_groups, num_selected, index_dim), dtype=partial_dtype(dtype)
        )
        dk_slots = self.dk.new_empty((index.max_slots, self.block_size, index_dim))
        item_kl = self.index_lse.new_zeros(index.max_items) if self.measure else self.weight
        sizes = dict(NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, BLOCK_SIZE=self.block_size)
        _sparse_kl_bwd_kernel[(index.max_items,)](
            self.index_query,
            self.index_key,
            self.centred,
            query,
            key,
            lse,
            saved,
            self.index_lse,
            self.weight,
            self.unit,
            self.query_table,
            self.block_table,
            *index_arguments(index, slots=True),
            partial,
            item_kl,
            self.dk,
            dk_slots,
            chunk,
            first_query * num_groups * num_selected,
            num_blocks,
            softmax_scale * LOG2E,
            self.scale * LOG2E,
            *self.index_query.stride()[:2],
            self.index_key.stride(0),
            *query.stride()[:2],
            *key.stride()[:2],
            HEADS=query.shape[1] // num_groups,
            HEAD_DIM=query.shape[2],
            INDEX_DIM=index_dim,
            SAVED_TEACHER=is_saved,
            MEASURE=self.measure,
            ROWS=tile.rows,
            PRECISION=dot_precision(query.dtype),
            INDEX_PRECISION=dot_precision(dtype),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **sizes,
        )
        if self.measure:
            self.kl += item_kl.sum(dtype=torch.float64)
        sum_slots(self.dk, dk_slots, index, chunk, self.block_table, num_groups)
        combine = tile_for("combine_slots", query, num_groups)
        _dq_kernel[(triton.cdiv(num_queries * num_groups, combine.rows),)](
            partial,
            self.weighted_unit,
            self.block_indices,
            self.query_table,
            self.dq,
            first_query,
            num_queries,
            self.scale,
            *self.block_indices.stride(),
            SLOTS=next_power_of_two(num_selected),
            HEADS=1,
            HEAD_DIM=index_dim,
            ROWS=combine.rows,
            STAGES=combine.num_stages,
            num_warps=combine.num_warps,
            **sizes,
        )

    def add_all(self, teacher: tuple[Tensor, Tensor, Tensor, float], query_chunk: int) -> None:
        """Add all queries, with P computed from query, key, lse and the softmax scale."""
        query, key, lse, softmax_scale = teacher
        teacher = unit_stride(query), unit_stride(key), lse.to(torch.float32).contiguous(), softmax_scale
        index = build_reverse_index(
            self.block_indices,
            self.query_table,
            self.block_table.shape[0],
            block_size=self.block_size,
            query_chunk=query_chunk,
            item_queries=tile_for("sparse_kl_bwd", self.index_query, key.shape[1]).columns,
        )
        for chunk, (first_query, num_queries) in enumerate(chunk_ranges(index, self.block_indices.shape[0])):
            self.add(index, chunk, first_query, num_queries, teacher)

    def result(self) -> tuple[Tensor, Tensor]:
        """Gradients of index_query and index_key, in their dtypes."""
        return self.dq, (self.dk.sum(1) * (self.scale * self.factor)).to(self.index_key.dtype)
