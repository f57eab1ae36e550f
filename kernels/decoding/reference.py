"""Decoding in plain PyTorch: each sequence is a fragment with one query, so the training ops say what it is."""

from torch import Tensor

from ..block_selection.reference import select_blocks_reference
from ..block_sparse_attention.reference import sparse_attention_reference
from ..segments import Segments


def decode_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index_query: Tensor,
    index_key_cache: Tensor,
    cache_lengths: Tensor,
    *,
    block_size: int,
    num_selected_blocks: int,
    init_blocks: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `decode_attention`."""
    num_sequences, capacity = index_key_cache.shape[:2]
    rows = tuple(
        (number, 1, number * capacity, length) for number, length in enumerate(cache_lengths.tolist()) if length
    )
    segments = Segments(rows=rows, num_queries=num_sequences, num_keys=num_sequences * capacity)
    block_indices, _ = select_blocks_reference(
        index_query,
        index_key_cache.flatten(0, 1),
        segments,
        block_size=block_size,
        num_selected_blocks=num_selected_blocks,
        init_blocks=init_blocks,
    )
    output, lse = sparse_attention_reference(
        query,
        key_cache.flatten(0, 1),
        value_cache.flatten(0, 1),
        block_indices,
        segments,
        block_size=block_size,
        softmax_scale=softmax_scale,
    )
    return output, lse, block_indices
