"""What the launches of the keys-outer kernels share."""

import torch
from torch import Tensor

from ..triton_support import check_choice, next_power_of_two
from ..tuning import TileConfig, tile_config
from .centring_kernel import _centre_keys_kernel, _key_moments_kernel
from .kernel import _value_sizes_kernel
from .reverse_index import ReverseIndex

QUERY_CHUNK = 16384
"""Queries whose partial results exist at one time: 4 GiB of them for 64 heads of 128, k=16, in 16 bits."""

SUPPORTED_SIZES = (16, 32, 64, 128)
HEADS_PER_GROUP = tuple(range(1, 17))
NUM_SELECTED = tuple(range(1, 33))


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


def value_sizes(value: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """fp32 [blocks, g]: log2 of the largest |value| of each block."""
    grid = (block_table.shape[0], value.shape[1])
    size = value.new_empty(grid, dtype=torch.float32)
    _value_sizes_kernel[grid](
        value,
        block_table,
        size,
        *value.stride()[:2],
        NUM_GROUPS=value.shape[1],
        HEAD_DIM=value.shape[2],
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
    return size


def centre_keys(
    key: Tensor,
    block_indices: Tensor,
    query_table: Tensor,
    block_table: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """key [t_k, g, d] without what a document's keys have in common, and fp32 [blocks, g]: log2 of its largest element.

    Rows in no block are not written. A single key head goes by the blocks that the first group kept.
    """
    num_keys, num_groups, head_dim = key.shape
    grid = (block_table.shape[0], num_groups)
    moments = key.new_empty((*grid, 2, head_dim), dtype=torch.float32)
    sizes = dict(NUM_GROUPS=num_groups, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, num_warps=4)
    _key_moments_kernel[grid](key, block_table, moments, *key.stride()[:2], **sizes)
    centred = key.new_empty((num_keys, num_groups, head_dim))
    size = key.new_empty(grid, dtype=torch.float32)
    _centre_keys_kernel[grid](
        key,
        block_table,
        query_table,
        block_indices,
        moments,
        centred,
        size,
        *key.stride()[:2],
        *block_indices.stride(),
        NUM_SELECTED=block_indices.shape[2],
        SLOTS=next_power_of_two(block_indices.shape[2]),
        **sizes,
    )
    return centred, size


def index_arguments(index: ReverseIndex, *, slots: bool = False) -> list[Tensor]:
    """The index as the kernels take it, with the gradient slots if they need them."""
    before = [index.pairs, index.row_start, index.local_end, index.row_item]
    return [*before, *([index.row_slot] if slots else []), index.item_row, index.chunk_item]


def chunk_ranges(index: ReverseIndex, num_queries: int) -> list[tuple[int, int]]:
    """First query and number of queries of each chunk."""
    starts = range(0, num_queries, index.query_chunk)
    return [(start, min(index.query_chunk, num_queries - start)) for start in starts]
