"""Block-sparse attention in plain PyTorch: dense attention with the mask narrowed to the kept blocks."""

from torch import Tensor

from ..dense_causal_attention.reference import attention_reference
from ..segments import Segments


def sparse_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    segments: Segments,
    *,
    block_size: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """See `sparse_attention`."""
    return attention_reference(
        query, key, value, block_indices, segments, block_size=block_size, softmax_scale=softmax_scale
    )
