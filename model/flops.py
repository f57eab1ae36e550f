"""Floating-point operations of the work really done, by phase (spec section 6). A multiply-add counts as two."""

from collections.abc import Iterable

from .config import ModelSpec, Phase
from .parameters import active_matmul_parameters, index_matmul_parameters

# The backward of attention recomputes the scores: five matrix products for the forward's two.
ATTENTION_BACKWARD = 2.5


def visible_pairs(length: int) -> int:
    """Causal (query, key) pairs of one document."""
    return length * (length + 1) // 2


def kept_pairs(length: int, block_size: int, top_k: int) -> int:
    """(query, key) pairs of one document's kept blocks: all of them while a query sees at most k blocks.

    Past that a query in its block's token p keeps (k - 1) l + p + 1 keys.
    """
    full = min(length, top_k * block_size)
    blocks, rest = divmod(length - full, block_size)
    earlier = (top_k - 1) * block_size
    return (
        visible_pairs(full)
        + blocks * (earlier * block_size + visible_pairs(block_size))
        + (earlier * rest + visible_pairs(rest))
    )


def attention_forward(spec: ModelSpec, lengths: Iterable[int], phase: Phase) -> tuple[float, float, float]:
    """(main branch, index scores, KL gradients) of one MSA layer over documents of these lengths.

    The first two are of a forward pass, the third of a backward pass; a layer without index branch is `Phase.dense`.
    """
    model, attention = spec.model, spec.attention
    lengths = list(lengths)
    visible = sum(visible_pairs(length) for length in lengths)
    attended = visible
    if phase is Phase.sparse:
        attended = sum(kept_pairs(length, attention.block_size, attention.top_k) for length in lengths)
    heads = model.num_query_heads * model.head_dim
    main = 4.0 * heads * attended
    if phase is Phase.dense:
        return main, 0.0, 0.0
    index = model.num_kv_heads * attention.index_dim
    return main, 2.0 * index * visible, 2.0 * (heads + 3 * index) * attended


def linear_flops(spec: ModelSpec) -> int:
    """Products of one token with weights, forward and backward; recompute not counted.

    Six operations a weight: the product, and the gradients of its input and of the weight. The index branch is detached
    from its input and has none of the former, unless `attention.detach` is off.
    """
    num_msa = len([*spec.msa_layers, *filter(spec.is_msa, spec.mtp_layers)])
    unused = 2 * num_msa * index_matmul_parameters(spec) if spec.attention.detach else 0
    return 6 * active_matmul_parameters(spec) - unused


def step_flops(spec: ModelSpec, lengths: Iterable[int], phase: Phase) -> float:
    """One training step (forward and backward, recompute not counted) over documents of these lengths."""
    lengths = list(lengths)
    flops = float(linear_flops(spec) * sum(lengths))
    num_msa = len([*spec.msa_layers, *filter(spec.is_msa, spec.mtp_layers)])
    num_dense = spec.model.num_layers + spec.model.mtp_layers - num_msa
    for layers, kind in ((num_msa, phase), (num_dense, Phase.dense)):
        if layers:
            main, index, kl = attention_forward(spec, lengths, kind)
            flops += layers * (main * (1 + ATTENTION_BACKWARD) + index + kl)
    return flops


def sparse_speedup(spec: ModelSpec, length: int) -> float:
    """GQA over MSA forward FLOPs of one layer at one context length, kept blocks counted whole as the paper does (3.3).

    28.4 for 64/4 heads at 2^20 tokens. Meant for lengths past `block_size * top_k`.
    """
    model, attention = spec.model, spec.attention
    heads, index = model.num_query_heads * model.head_dim, model.num_kv_heads * attention.index_dim
    kept = attention.top_k * attention.block_size
    return 2 * heads * length**2 / (index * length**2 + 4 * heads * length * kept)
