"""Keys without what they have in common, for the products that make dQ.

The dS of a row sum to 0, so any vector c may be taken off all keys that the row kept: sum_j dS_j (k_j - c) is the same.
But dS and the slots of dQ have 16 bits, and would carry a common offset of the keys as noise. One c serves a document's
keys in one group: the mean over the blocks that its last query kept, so that a block nobody kept has no influence. If
a query keeps one block only, each block has its own.
"""

import triton
import triton.language as tl

from .kernel import load_block, size_of


@triton.jit
def _key_moments_kernel(
    key_ptr,
    block_table_ptr,
    moments_ptr,
    stride_kt,
    stride_kg,
    NUM_GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per (block, group): mean and variance of each channel, fp32 [blocks, g, 2, d]."""
    block = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    first_key = tl.load(block_table_ptr + 3 * block)
    num_keys = tl.load(block_table_ptr + 3 * block + 1)
    key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM).to(tl.float32)
    mean = tl.sum(key, 0) / num_keys
    spread = tl.where((tl.arange(0, BLOCK_SIZE) < num_keys)[:, None], key - mean[None, :], 0.0)
    place = moments_ptr + (block.to(tl.int64) * NUM_GROUPS + group) * (2 * HEAD_DIM) + tl.arange(0, HEAD_DIM)
    tl.store(place, mean)
    tl.store(place + HEAD_DIM, tl.sum(spread * spread, 0) / num_keys)


@triton.jit
def _centre_keys_kernel(
    key_ptr,
    block_table_ptr,
    query_table_ptr,
    block_indices_ptr,
    moments_ptr,
    centred_ptr,
    size_ptr,
    stride_kt,
    stride_kg,
    stride_it,
    stride_ig,
    stride_ik,
    NUM_GROUPS: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per (block, group): key - c in the keys' dtype [t_k, g, d], and log2 of its largest element.

    A channel of c is 0 unless it outweighs half the keys' spread, and rounded as the keys are: so the difference is
    mostly exact, and taking c off adds no error of its own.
    """
    block = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, HEAD_DIM)
    slots = tl.arange(0, SLOTS)
    if NUM_SELECTED == 1:
        blocks = block + slots
        is_used = slots == 0
    else:
        query_row = tl.load(block_table_ptr + 3 * block + 2).to(tl.int64)
        first_block = tl.load(query_table_ptr + query_row * 3)
        position = tl.load(query_table_ptr + query_row * 3 + 1)
        ids_ptr = block_indices_ptr + query_row * stride_it + group * stride_ig
        ids = tl.load(ids_ptr + slots * stride_ik, mask=slots < NUM_SELECTED, other=-1)
        is_used = (ids >= 0) & (ids * BLOCK_SIZE <= position)
        blocks = first_block + ids
    place = (blocks.to(tl.int64) * NUM_GROUPS + group) * (2 * HEAD_DIM)
    address = moments_ptr + place[:, None] + offs_d[None, :]
    num_used = tl.maximum(tl.sum(is_used.to(tl.int32), 0), 1)
    # [SLOTS, HEAD_DIM]
    mean = tl.sum(tl.load(address, mask=is_used[:, None], other=0.0), 0) / num_used
    variance = tl.sum(tl.load(address + HEAD_DIM, mask=is_used[:, None], other=0.0), 0) / num_used
    common = tl.where(4.0 * mean * mean > variance, mean, 0.0).to(key_ptr.dtype.element_ty).to(tl.float32)
    first_key = tl.load(block_table_ptr + 3 * block)
    num_keys = tl.load(block_table_ptr + 3 * block + 1)
    key = load_block(key_ptr, first_key, num_keys, group, stride_kt, stride_kg, BLOCK_SIZE, HEAD_DIM).to(tl.float32)
    is_key = (tl.arange(0, BLOCK_SIZE) < num_keys)[:, None]
    centred = tl.where(is_key, key - common[None, :], 0.0).to(key_ptr.dtype.element_ty)
    key_row = (first_key + tl.arange(0, BLOCK_SIZE)).to(tl.int64) * NUM_GROUPS + group
    tl.store(centred_ptr + key_row[:, None] * HEAD_DIM + offs_d[None, :], centred, mask=is_key)
    tl.store(size_ptr + block.to(tl.int64) * NUM_GROUPS + group, size_of(centred))
