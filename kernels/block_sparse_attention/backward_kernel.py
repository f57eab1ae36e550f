"""Backward kernels of block-sparse attention, keys outer, without atomics (README.md, "Triton").

P is computed again from q, k and lse. dK and dV of an item stay in registers; a row of one item adds them to the
gradient itself, a row of several writes them to slots that a second kernel adds in order. dQ goes to one slot for each
(query, slot, head), in the keys' distance from what their block has in common, m_b (`_block_stats_kernel`):

    dQ = scale * sum over slots b of ( sum_j dS_j (k_j - m_b)  +  sigma_b (m_b - c) ),   sigma_b = sum_j dS_j

Since all dS of a row sum to 0, any c gives the same; c is the mean of the row's m_b. So a common offset of the keys
never meets the 16-bit rounding of dS and of the slots.
"""

import triton
import triton.language as tl

from .kernel import find_item, head_rows, load_block, pair_rows


@triton.jit(do_not_specialize=["num_rows"])
def _delta_kernel(
    output_ptr,
    grad_ptr,
    delta_ptr,
    grad_size_ptr,
    delta_size_ptr,
    num_rows,
    stride_ot,
    stride_on,
    stride_gt,
    stride_gn,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = <output, grad> of each (query, head); log2 of sum |grad| and of |delta|, rounded up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    query_row = row // NUM_HEADS
    head = row % NUM_HEADS
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    output = tl.load(
        output_ptr + (query_row * stride_ot + head * stride_on)[:, None] + offs_d, mask=mask[:, None], other=0.0
    ).to(tl.float32)
    grad = tl.load(
        grad_ptr + (query_row * stride_gt + head * stride_gn)[:, None] + offs_d, mask=mask[:, None], other=0.0
    ).to(tl.float32)
    delta = tl.sum(output * grad, 1)
    tl.store(delta_ptr + row, delta, mask=mask)
    grad_size = tl.ceil(tl.log2(tl.maximum(tl.sum(tl.abs(grad), 1), 1e-30)))
    tl.store(grad_size_ptr + row, grad_size, mask=mask)
    tl.store(delta_size_ptr + row, tl.ceil(tl.log2(tl.maximum(tl.abs(delta), 1e-30))), mask=mask)


@triton.jit
def add_or_put(
    grad_ptr, slot_ptr, tile, is_only, slot, first_key, num_keys, group, SIZE: tl.constexpr, DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Add a tile [SIZE, DIM] to grad [t_k, g, DIM], or write it to its slot."""
    offs = tl.arange(0, SIZE)
    offs_d = tl.arange(0, DIM)
    if is_only:
        place = (first_key + offs).to(tl.int64) * NUM_GROUPS + group
        mask = (offs < num_keys)[:, None]
        address = grad_ptr + place[:, None] * DIM + offs_d[None, :]
        tl.store(address, tl.load(address, mask=mask, other=0.0) + tile, mask=mask)
    else:
        place = slot.to(tl.int64) * SIZE + offs
        tl.store(slot_ptr + place[:, None] * DIM + offs_d[None, :], tile)


@triton.jit(do_not_specialize=["chunk", "first_pair", "num_blocks"])
def _sparse_attention_bwd_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_size_ptr,
    delta_size_ptr,
    query_table_ptr,
    block_table_ptr,
    common_ptr,
    stats_ptr,
    pairs_ptr,
    row_start_ptr,
    local_end_ptr,
    row_item_ptr,
    row_slot_ptr,
    item_row_ptr,
    chunk_item_ptr,
    dq_partial_ptr,
    dq_unit_ptr,
    sigma_ptr,
    dk_ptr,
    dv_ptr,
    dk_slot_ptr,
    dv_slot_ptr,
    chunk,
    first_pair,
    num_blocks,
    scale,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_gt,
    stride_gn,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per item. Tiles are transposed: [BLOCK_SIZE keys, ROWS = queries x heads]."""
    row, start, end, local_end, item = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, chunk
    )
    if start < end:
        block = row % num_blocks
        group = ((row // num_blocks) % NUM_GROUPS).to(tl.int64)
        first_key = tl.load(block_table_ptr + 2 * block)
        num_keys = tl.load(block_table_ptr + 2 * block + 1)
        # [BLOCK_SIZE, HEAD_DIM]
        key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM)
        value = load_block(value_ptr, first_key, num_keys, group, stride_vt, stride_vg, BLOCK_SIZE, HEAD_DIM)
        offs_d = tl.arange(0, HEAD_DIM)
        table_row = block.to(tl.int64) * NUM_GROUPS + group
        common = tl.load(common_ptr + table_row * HEAD_DIM + offs_d)
        centred = (key.to(tl.float32) - common[None, :]).to(key.dtype)
        value_size = tl.load(stats_ptr + table_row * 2)
        # |dq| <= max |k - m_b| * (max |v| * sum |grad| + |delta|) < 2^(size + 1): to the top of fp16's range.
        key_size = tl.load(stats_ptr + table_row * 2 + 1) + (1.0 - 15.0)
        dk = tl.zeros((BLOCK_SIZE, HEAD_DIM), dtype=tl.float32)
        dv = tl.zeros((BLOCK_SIZE, HEAD_DIM), dtype=tl.float32)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        LOG2E: tl.constexpr = 1.4426950408889634
        for i in tl.range(start * HEADS, end * HEADS, ROWS, num_stages=STAGES):
            is_real, pair, head = pair_rows(pairs_ptr, i, end, HEADS, ROWS)
            query_row = pair // (NUM_GROUPS * NUM_SELECTED)
            wide_row = query_row.to(tl.int64)
            query_head = group * HEADS + head
            # [ROWS, HEAD_DIM]
            query = tl.load(query_ptr + (wide_row * stride_qt + query_head * stride_qn)[:, None] + offs_d[None, :])
            grad = tl.load(grad_ptr + (wide_row * stride_gt + query_head * stride_gn)[:, None] + offs_d[None, :])
            row_place = wide_row * (NUM_GROUPS * HEADS) + query_head
            # Rows that only fill the tile up get P = 0.
            lse = tl.load(lse_ptr + row_place, mask=is_real, other=float("inf"))
            delta = tl.load(delta_ptr + row_place)
            place = (pair - first_pair).to(tl.int64) * HEADS + head
            grad_size = tl.load(grad_size_ptr + row_place) + value_size
            unit = key_size + tl.maximum(grad_size, tl.load(delta_size_ptr + row_place))
            unit = tl.minimum(tl.maximum(unit, -100.0), 100.0)
            tl.store(dq_unit_ptr + place, tl.exp2(unit), mask=is_real)
            # [BLOCK_SIZE, ROWS]
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            probs = tl.exp2(scores * (scale * LOG2E) - (lse * LOG2E)[None, :])
            if i < local_end * HEADS:
                last_key = tl.load(query_table_ptr + query_row * 3 + 2)
                probs = tl.where(key_row[:, None] <= last_key[None, :], probs, 0.0)
            dv += tl.dot(probs.to(grad.dtype), grad, input_precision=PRECISION)
            dprobs = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
            dscores = probs * (dprobs - delta[None, :])
            tl.store(sigma_ptr + place, tl.sum(dscores, 0), mask=is_real)
            dscores_low = dscores.to(query.dtype)
            dk += tl.dot(dscores_low, query, input_precision=PRECISION)
            dq = tl.dot(tl.trans(dscores_low), centred, input_precision=PRECISION)
            tl.store(
                dq_partial_ptr + place[:, None] * HEAD_DIM + offs_d[None, :],
                (dq * tl.exp2(-unit)[:, None]).to(dq_partial_ptr.dtype.element_ty),
                mask=is_real[:, None],
                cache_modifier=".cs",
            )
        first_item = tl.load(row_item_ptr + row)
        is_only = tl.load(row_item_ptr + row + 1) - first_item == 1
        slot = tl.load(row_slot_ptr + row) + item - first_item
        add_or_put(
            dk_ptr, dk_slot_ptr, dk * scale, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, HEAD_DIM, NUM_GROUPS
        )
        add_or_put(dv_ptr, dv_slot_ptr, dv, is_only, slot, first_key, num_keys, group, BLOCK_SIZE, HEAD_DIM, NUM_GROUPS)


@triton.jit(do_not_specialize=["chunk", "num_blocks"])
def _sum_slots_kernel(
    grad_ptr,
    slot_ptr,
    row_item_ptr,
    row_slot_ptr,
    block_table_ptr,
    chunk,
    num_blocks,
    NUM_GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per (row of this chunk, ROWS of its keys): add the slots of a row of several items, in order."""
    local_row = tl.program_id(0)
    row = chunk * NUM_GROUPS * num_blocks + local_row
    num_items = tl.load(row_item_ptr + row + 1) - tl.load(row_item_ptr + row)
    if num_items > 1:
        block = local_row % num_blocks
        group = local_row // num_blocks
        offs = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        offs_d = tl.arange(0, DIM)[None, :]
        mask = (offs < tl.load(block_table_ptr + 2 * block + 1))[:, None]
        place = (tl.load(block_table_ptr + 2 * block) + offs).to(tl.int64) * NUM_GROUPS + group
        address = grad_ptr + place[:, None] * DIM + offs_d
        total = tl.load(address, mask=mask, other=0.0)
        slot = tl.load(row_slot_ptr + row).to(tl.int64)
        for number in tl.range(0, num_items):
            total += tl.load(slot_ptr + ((slot + number) * BLOCK_SIZE + offs)[:, None] * DIM + offs_d)
        tl.store(address, total, mask=mask)


@triton.jit(do_not_specialize=["first_query", "num_queries"])
def _dq_kernel(
    partial_ptr,
    unit_ptr,
    sigma_ptr,
    common_ptr,
    weight_ptr,
    block_indices_ptr,
    query_table_ptr,
    dq_ptr,
    first_query,
    num_queries,
    scale,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHARED_KEY: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The formula at the top of this file for ROWS (query, head) rows, slots in order.

    SHARED_KEY is for the indexer's KL: one key (and common key) for all groups, and rows have weights.
    """
    mask, row, query_row, query_head, first_block, position = head_rows(
        first_query, num_queries, query_table_ptr, NUM_GROUPS, HEADS, ROWS
    )
    group = query_head // HEADS
    ids_ptr = block_indices_ptr + query_row * stride_it + group * stride_ig
    first_place = (row // HEADS) * (NUM_SELECTED * HEADS) + query_head % HEADS
    slots = tl.arange(0, SLOTS)
    ids = tl.load(
        ids_ptr[:, None] + slots[None, :] * stride_ik,
        mask=mask[:, None] & (slots < NUM_SELECTED)[None, :],
        other=-1,
    )
    # Visible ids come first.
    num_used = tl.sum(((ids >= 0) & (ids * BLOCK_SIZE <= position[:, None])).to(tl.int32), 1)
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    dq = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    # Where a tile is one query and group, its heads share the common keys.
    COMMON_ROWS: tl.constexpr = 1 if ROWS == HEADS else ROWS
    common_sum = tl.zeros((COMMON_ROWS, HEAD_DIM), dtype=tl.float32)
    sigma_sum = tl.zeros((ROWS,), dtype=tl.float32)
    for slot in tl.range(0, tl.max(num_used, 0), num_stages=STAGES):
        is_kept = slot < num_used
        place = first_place + slot * HEADS
        # [COMMON_ROWS, HEAD_DIM]
        if ROWS == HEADS:
            tile_query = first_query + tl.program_id(0).to(tl.int64) // NUM_GROUPS
            tile_group = tl.program_id(0) % NUM_GROUPS
            block = tl.load(block_indices_ptr + tile_query * stride_it + tile_group * stride_ig + slot * stride_ik)
            table_row = (tl.load(query_table_ptr + tile_query * 3) + block).to(tl.int64) * NUM_GROUPS + tile_group
            common = tl.load(common_ptr + table_row * HEAD_DIM + offs_d)
        else:
            blocks = tl.load(ids_ptr + slot * stride_ik, mask=is_kept, other=0)
            table_rows = (first_block + blocks).to(tl.int64)
            if not SHARED_KEY:
                table_rows = table_rows * NUM_GROUPS + group
            common = tl.load(common_ptr + table_rows[:, None] * HEAD_DIM + offs_d, mask=is_kept[:, None], other=0.0)
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + offs_d, mask=is_kept[:, None], other=0.0)
        unit = tl.load(unit_ptr + place, mask=is_kept, other=0.0)
        sigma = tl.load(sigma_ptr + place, mask=is_kept, other=0.0)
        dq += partial.to(tl.float32) * unit[:, None] + sigma[:, None] * common
        common_sum += common
        sigma_sum += sigma
    dq -= (sigma_sum / tl.maximum(num_used, 1).to(tl.float32))[:, None] * common_sum
    place = query_row * (NUM_GROUPS * HEADS) + query_head
    if SHARED_KEY:
        dq *= tl.load(weight_ptr + place, mask=mask, other=0.0)[:, None]
    tl.store(dq_ptr + place[:, None] * HEAD_DIM + offs_d, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask[:, None])
