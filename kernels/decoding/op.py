"""decode_attention: one new token per sequence against its cache (README.md of this folder)."""

import torch
from torch import Tensor

from ..checks import check_backend, check_block_size, check_device, check_floating, resolve_scale
from ..triton_support import BACKENDS
from .reference import decode_attention_reference


@torch.compiler.disable
@torch.no_grad()
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index_query: Tensor,
    index_key_cache: Tensor,
    cache_lengths: Tensor,
    *,
    block_size: int,
    num_selected_blocks: int,
    init_blocks: int = 0,
    softmax_scale: float | None = None,
    backend: str = "reference",
) -> tuple[Tensor, Tensor, Tensor]:
    """Select blocks for the newest token of each sequence and attend to them. Not differentiable.

    Args: query [b, n, d]; key_cache and value_cache [b, capacity, g, d] of its dtype; index_query [b, g, i] and
        index_key_cache [b, capacity, i] of one floating dtype; any strides. cache_lengths int32 or int64 [b]: tokens of
        each sequence, the newest included, from 0 to the capacity. It is read on the device by the Triton backend.

    Returns:
        output [b, n, d] in the dtype of `query`, lse fp32 (fp64 for fp64 inputs) [b, n] over the kept tokens, and
        block_indices int32 [b, g, k], all as `select_blocks` and `sparse_attention` give for the last token of the
        sequence. Sequences of length 0: output 0, lse -inf, ids -1. Cache rows past the length are never read.

    Raises ValueError for inputs that do not fit, and for visible index scores that are not finite as `select_blocks`.
    """
    op = "decode_attention"
    check_backend(op, backend, BACKENDS)
    check_floating(op, query=query, key_cache=key_cache, value_cache=value_cache)
    check_floating(op, index_query=index_query, index_key_cache=index_key_cache)
    check_device(op, query=query, index_query=index_query, cache_lengths=cache_lengths)
    _check_shapes(op, query, key_cache, value_cache, index_query, index_key_cache, cache_lengths)
    check_block_size(op, block_size)
    if not 0 <= init_blocks < num_selected_blocks:
        raise ValueError(
            f"{op}: init_blocks ({init_blocks}) must lie in 0..{num_selected_blocks - 1}, as the local block takes one "
            f"of the num_selected_blocks ({num_selected_blocks}) slots."
        )
    if backend == "triton":
        from .launch import decode_attention_triton as decode
    else:
        decode = decode_attention_reference
    with torch.autocast(query.device.type, enabled=False):
        return decode(
            query,
            key_cache,
            value_cache,
            index_query,
            index_key_cache,
            cache_lengths,
            block_size=block_size,
            num_selected_blocks=num_selected_blocks,
            init_blocks=init_blocks,
            softmax_scale=resolve_scale(op, softmax_scale, query.shape[2]),
        )


def _check_shapes(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index_query: Tensor,
    index_key_cache: Tensor,
    cache_lengths: Tensor,
) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key_cache, value_cache, index_query, index_key_cache))
    layout = "query [b, n, d], key_cache and value_cache [b, capacity, g, d], index_query [b, g, i] and "
    layout += f"index_key_cache [b, capacity, i]; got {shapes}."
    ranks = (query.ndim, key_cache.ndim, value_cache.ndim, index_query.ndim, index_key_cache.ndim)
    if ranks != (3, 4, 4, 3, 3):
        raise ValueError(f"{op}: the layout is {layout}")
    num_sequences, num_heads, head_dim = query.shape
    capacity, num_groups = key_cache.shape[1:3]
    fits = (
        key_cache.shape == value_cache.shape == (num_sequences, capacity, num_groups, head_dim)
        and index_query.shape[:2] == (num_sequences, num_groups)
        and index_key_cache.shape == (num_sequences, capacity, index_query.shape[2])
    )
    if not fits or num_groups == 0 or num_heads % num_groups:
        raise ValueError(f"{op}: sizes must agree and g must divide n in {layout}")
    if cache_lengths.shape != (num_sequences,) or cache_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: cache_lengths must be int32 or int64 [b] = [{num_sequences}]; got {cache_lengths.dtype} "
            f"{tuple(cache_lengths.shape)}."
        )
