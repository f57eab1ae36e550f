"""Triton kernels of what follows the score gradient D = P_idx - P of the full-sequence KL: plain matrix products.

    d index_query = weight / sqrt(i)  D (index_key - c)          one program per (query tile, group)
    d index_key   = 1 / sqrt(i)       D^T (weight index_query)   one program per (key tile, group)

D is in memory in the dtype of the index inputs: rows of a chunk, keys of a window of positions. It is 0 where a key is
hidden, but made only up to the next multiple of 8 positions after a row's own: what lies beyond is not read.

Rows of D sum to 0 but for its rounding, so any c for all keys of a row changes nothing; with the mean of some keys an
offset that all share does not multiply the rounding. It is taken off at the end: D c is the sum of the row times c.
Where D is largest, in a document's first rows, its rounding is kept beside it.
"""

import triton
import triton.language as tl

LOST_AT = tl.constexpr(128)
"""Columns between D of the first rows of a document, which see as many keys at most, and what its rounding lost."""


@triton.jit
def _weigh_queries_kernel(
    iq_ptr, weight_ptr, largest_ptr, out_ptr, num_rows, stride_iqt, stride_iqg, stride_iqi,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out [t_q, NUM_GROUPS, INDEX_DIM]: queries times weight / largest; 0 where the weight is 0, whatever the query."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_i = tl.arange(0, INDEX_DIM)
    weight = tl.load(weight_ptr + place, mask=place < num_rows * NUM_GROUPS, other=0.0) / tl.load(largest_ptr)
    query = tl.load(
        iq_ptr + (place // NUM_GROUPS * stride_iqt + place % NUM_GROUPS * stride_iqg)[:, None]
        + offs_i[None, :] * stride_iqi,
        mask=(weight != 0)[:, None], other=0.0,
    )  # fmt: skip
    weighted = (query.to(tl.float32) * weight[:, None]).to(out_ptr.dtype.element_ty)
    mask = (place < num_rows * NUM_GROUPS)[:, None]
    tl.store(out_ptr + place[:, None] * INDEX_DIM + offs_i[None, :], weighted, mask=mask)


@triton.jit
def _difference_tile(difference_ptr, row, mask_m, position, column, first_key, first_row, stride_dt):
    """D [rows, keys] of the chunk and window, 0 where it was not made; column: of the window."""
    end = (position // 8 + 1) * 8 - first_key
    return tl.load(
        difference_ptr + (row - first_row)[:, None] * stride_dt + column[None, :],
        mask=mask_m[:, None] & (column[None, :] < end[:, None]), other=0.0,
    )  # fmt: skip


@triton.jit
def _query_product(
    pid, difference_ptr, ik_ptr, unit_ptr, tiles_ptr, partial_ptr, d_iq_ptr, first_row, first_key, end_key,
    stride_dt, stride_dg, stride_ikt, stride_iki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """unit D (index_key - c) of rows whose last key lies in the window; before that, the sum so far to `partial`."""
    tile = tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 4
    group = (pid % NUM_GROUPS).to(tl.int64)
    num_rows = tl.load(tile + 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, INDEX_DIM)
    mask_m = offs_m < num_rows
    row = tl.load(tile) + offs_m
    position = tl.load(tile + 2) + offs_m
    num_keys = tl.load(tile + 2) + num_rows
    if num_keys > first_key:
        out = (row * NUM_GROUPS + group)[:, None] * INDEX_DIM + offs_i[None, :]
        key_ptrs = ik_ptr + (tl.load(tile + 3) + offs_n)[:, None] * stride_ikt + offs_i[None, :] * stride_iki
        window_ptrs = key_ptrs + first_key * stride_ikt
        total = tl.zeros((BLOCK_M, INDEX_DIM), dtype=tl.float32)
        # The sum of a row in each of the fewest columns that a product has: in registers, D would lose its place in
        # Triton's pipeline before the product has read it.
        ones = tl.full((BLOCK_N, 16), 1.0, dtype=ik_ptr.dtype.element_ty)
        row_sums = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
        num_columns = (tl.minimum(num_keys, end_key) - first_key).to(tl.int32)
        for start in tl.range(0, num_columns, BLOCK_N, num_stages=STAGES):
            column = start + offs_n
            difference = _difference_tile(
                difference_ptr + group * stride_dg, row, mask_m, position, column, first_key, first_row, stride_dt
            )
            keys = tl.load(window_ptrs + start * stride_ikt, mask=(column < num_columns)[:, None], other=0.0)
            total = tl.dot(difference, keys, total, input_precision=PRECISION)
            row_sums = tl.dot(difference, ones, row_sums, input_precision=PRECISION)
        first_keys = tl.load(key_ptrs, mask=(offs_n < num_keys)[:, None], other=0.0)
        centre = tl.sum(first_keys.to(tl.float32), axis=0) / tl.minimum(num_keys, BLOCK_N).to(tl.float32)
        if (first_key == 0) & (tl.load(tile + 2) == 0):
            # A document's first rows, with the largest D: what its rounding lost.
            lost = _difference_tile(
                difference_ptr + group * stride_dg + LOST_AT, row, mask_m, position, offs_n, 0, first_row, stride_dt
            )
            total = tl.dot(lost, first_keys, total, input_precision=PRECISION)
            row_sums = tl.dot(lost, ones, row_sums, input_precision=PRECISION)
        total -= (tl.sum(row_sums, axis=1) / 16)[:, None] * centre[None, :]
        if first_key > 0:
            total += tl.load(partial_ptr + out, mask=mask_m[:, None], other=0.0)
        if num_keys > end_key:
            tl.store(partial_ptr + out, total, mask=mask_m[:, None])
        else:
            unit = tl.load(unit_ptr + row * NUM_GROUPS + group, mask=mask_m, other=0.0)
            tl.store(d_iq_ptr + out, (total * unit[:, None]).to(d_iq_ptr.dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def _key_product(
    pid, difference_ptr, weighted_ptr, tiles_ptr, d_ik_ptr, first_row, first_key, end_key, stride_dt, stride_dg,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add D^T weighted of the chunk to d_ik, for keys of the window."""
    tile = tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 6
    group = (pid % NUM_GROUPS).to(tl.int64)
    key_start = tl.load(tile + 2)
    if (key_start >= first_key) & (key_start < end_key):
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.arange(0, BLOCK_N)
        offs_i = tl.arange(0, INDEX_DIM)
        num_queries = tl.load(tile + 4)
        row = tl.load(tile + 3) + offs_m
        position = tl.load(tile + 5) - num_queries + offs_m
        column = tl.multiple_of(key_start - first_key, BLOCK_N) + offs_n
        total = tl.zeros((BLOCK_N, INDEX_DIM), dtype=tl.float32)
        # The first query that sees the first key of the tile.
        begin = tl.maximum(key_start + num_queries - tl.load(tile + 5), 0).to(tl.int32)
        query_ptrs = weighted_ptr + (row * NUM_GROUPS + group)[:, None] * INDEX_DIM + offs_i[None, :]
        for start in tl.range(begin, num_queries.to(tl.int32), BLOCK_M, num_stages=STAGES):
            mask_m = start + offs_m < num_queries
            difference = _difference_tile(
                difference_ptr + group * stride_dg, row + start, mask_m, position + start, column, first_key, first_row,
                stride_dt,
            )  # fmt: skip
            queries = tl.load(
                query_ptrs + tl.cast(start, tl.int64) * (NUM_GROUPS * INDEX_DIM), mask=mask_m[:, None], other=0.0
            )
            total = tl.dot(tl.trans(difference), queries, total, input_precision=PRECISION)
        key_row = tl.load(tile) + offs_n
        out = d_ik_ptr + (key_row * NUM_GROUPS + group)[:, None] * INDEX_DIM + offs_i[None, :]
        mask_n = (offs_n < tl.load(tile + 1))[:, None]
        tl.store(out, tl.load(out, mask=mask_n, other=0.0) + total, mask=mask_n)


@triton.jit(do_not_specialize=["first_row", "num_query_programs", "first_tile"])
def _dense_products_kernel(
    difference_ptr, ik_ptr, weighted_ptr, unit_ptr, tiles_ptr, key_tiles_ptr, partial_ptr, d_iq_ptr, d_ik_ptr,
    first_row, first_key, end_key, num_query_programs, first_tile,
    stride_dt, stride_dg, stride_ikt, stride_iki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, KEY_STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of query tiles, then of key tiles, which may not overlap: short documents need both at once.

    weighted: index queries [t_q, NUM_GROUPS, INDEX_DIM] times their weight; unit fp32 [t_q, NUM_GROUPS]; partial fp32
    [t_q, NUM_GROUPS, INDEX_DIM]; d_ik fp32 [t_k, NUM_GROUPS, INDEX_DIM]; c: mean of the row's first BLOCK_N keys.
    QUERIES: query rows of a step of a key tile's program.
    """
    pid = tl.program_id(0)
    if pid < num_query_programs:
        _query_product(
            pid, difference_ptr, ik_ptr, unit_ptr, tiles_ptr, partial_ptr, d_iq_ptr, first_row, first_key, end_key,
            stride_dt, stride_dg, stride_ikt, stride_iki, NUM_GROUPS, INDEX_DIM, BLOCK_M, BLOCK_N, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _key_product(
            first_tile * NUM_GROUPS + pid - num_query_programs, difference_ptr, weighted_ptr, key_tiles_ptr, d_ik_ptr,
            first_row, first_key, end_key, stride_dt, stride_dg, NUM_GROUPS, INDEX_DIM, QUERIES, BLOCK_N, PRECISION,
            KEY_STAGES,
        )  # fmt: skip


@triton.jit
def _sum_groups_kernel(
    d_ik_ptr, unit_ptr, out_ptr, num_keys,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [t_k, INDEX_DIM]: unit times the sum over groups of d_ik [t_k, NUM_GROUPS, INDEX_DIM], in order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_i = tl.arange(0, INDEX_DIM)
    mask = (row < num_keys)[:, None]
    total = tl.zeros((BLOCK_N, INDEX_DIM), dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        place = (row * NUM_GROUPS + group)[:, None] * INDEX_DIM + offs_i[None, :]
        total += tl.load(d_ik_ptr + place, mask=mask, other=0.0)
    total *= tl.load(unit_ptr)
    tl.store(out_ptr + row[:, None] * INDEX_DIM + offs_i[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)
