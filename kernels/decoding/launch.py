"""decode_attention in Triton: the launches and the registered op."""

import torch
import triton
from torch import Tensor

from ..block_selection.report import score_report
from ..triton_support import check_choice, check_triton, dot_precision, next_power_of_two
from ..tuning import tile_config
from . import kernel

DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
NUM_SELECTED = tuple(range(1, 33))
HEADS_PER_GROUP = tuple(range(1, 17))
NUM_GROUPS = tuple(range(1, 65))


@torch.library.custom_op("msa_pretrain::decode_attention", mutates_args=())
def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index_query: Tensor,
    index_key_cache: Tensor,
    cache_lengths: Tensor,
    block_size: int,
    num_selected: int,
    init_blocks: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_sequences, num_heads, head_dim = query.shape
    num_groups, index_dim = index_query.shape[1:]
    heads = num_heads // num_groups
    device = query.device
    output = torch.empty(query.shape, dtype=query.dtype, device=device)
    lse = torch.empty((num_sequences, num_heads), dtype=torch.float32, device=device)
    ids = torch.empty((num_sequences, num_groups, num_selected), dtype=torch.int32, device=device)
    if not num_sequences:
        return output, lse, ids
    report = score_report(device)
    report.raise_if_arrived("decode_attention")
    num_best = max(2, next_power_of_two(num_selected))
    num_blocks = max(triton.cdiv(index_key_cache.shape[1], block_size), 1)

    scan = tile_config("decode_scan", device, head_dim=index_dim, itemsize=index_query.dtype.itemsize)
    parts = triton.cdiv(num_blocks, scan.columns)
    scores = torch.empty((num_sequences, num_groups, num_blocks), dtype=torch.float32, device=device)
    kernel._decode_scores_kernel[(num_sequences * parts,)](
        index_query, index_key_cache, cache_lengths, scores, report.words, num_blocks, parts,
        *index_query.stride(), *index_key_cache.stride(),
        NUM_GROUPS=num_groups, GROUPS=max(16, next_power_of_two(num_groups)), INDEX_DIM=index_dim,
        BLOCK_SIZE=block_size, PART=scan.columns, PRECISION=dot_precision(index_query.dtype),
        STAGES=scan.num_stages, num_warps=scan.num_warps,
    )  # fmt: skip

    rank = tile_config("decode_rank", device, head_dim=index_dim, itemsize=index_query.dtype.itemsize)
    merge = tile_config("decode_merge", device, head_dim=index_dim, itemsize=index_query.dtype.itemsize)
    parts = triton.cdiv(num_blocks, rank.columns)
    columns = min(merge.columns, next_power_of_two(max(parts, 2) * num_best))
    bitonic = device.type == "cuda"
    best = torch.empty((num_sequences, num_groups, parts * num_best), dtype=torch.int64, device=device)
    kernel._decode_rank_kernel[(num_sequences * num_groups * parts,)](
        scores, cache_lengths, best, num_blocks, parts,
        NUM_GROUPS=num_groups, NUM_BEST=num_best, INIT_BLOCKS=init_blocks, BLOCK_SIZE=block_size,
        PART=rank.columns, BITONIC=bitonic, num_warps=rank.num_warps,
    )  # fmt: skip
    kernel._decode_merge_kernel[(num_sequences * num_groups,)](
        best, ids, parts * num_best,
        NUM_SELECTED=num_selected, NUM_BEST=num_best, COLUMNS=columns, BITONIC=bitonic,
        num_warps=max(1, merge.num_warps * columns // merge.columns),
    )  # fmt: skip

    shape = (num_sequences, num_groups, num_selected, heads)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=device)
    kernel._decode_fwd_kernel[(num_sequences * num_groups * num_selected,)](
        query, key_cache, value_cache, cache_lengths, ids, partial, partial_lse, softmax_scale,
        *query.stride(), *key_cache.stride(), *value_cache.stride(),
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, HEADS=heads, ROWS=16, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, PRECISION=dot_precision(query.dtype), SPLIT=query.dtype != torch.float32,
    )  # fmt: skip
    kernel._decode_combine_kernel[(num_sequences * num_heads,)](
        partial, partial_lse, output, lse,
        NUM_SELECTED=num_selected, NUM_SLOTS=num_best, HEADS=heads, HEAD_DIM=head_dim,
    )  # fmt: skip
    if device.type == "cpu":
        report.raise_if_arrived("decode_attention")
    return output, lse, ids


@_decode_attention.register_fake
def _(
    query, key_cache, value_cache, index_query, index_key_cache, cache_lengths, block_size, num_selected, init_blocks,
    softmax_scale,
):  # fmt: skip
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    ids = query.new_empty((*index_query.shape[:2], num_selected), dtype=torch.int32)
    return query.new_empty(query.shape), lse, ids


def decode_attention_triton(
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
    op = "decode_attention"
    num_groups, index_dim = index_query.shape[1:]
    check_triton(op, query, index_query)
    check_choice(op, "a head dim of", query.shape[2], DIMS)
    check_choice(op, "an index dim of", index_dim, DIMS)
    check_choice(op, "a block_size of", block_size, BLOCK_SIZES)
    check_choice(op, "num_selected_blocks of", num_selected_blocks, NUM_SELECTED)
    check_choice(op, "n/g of", query.shape[1] // num_groups, HEADS_PER_GROUP)
    check_choice(op, "g of", num_groups, NUM_GROUPS)
    return _decode_attention(
        query,
        key_cache,
        value_cache,
        index_query,
        index_key_cache,
        cache_lengths,
        block_size,
        num_selected_blocks,
        init_blocks,
        softmax_scale,
    )
