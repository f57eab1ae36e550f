"""sparse_attention_with_kl on a GPU: bf16, real sizes, against the reference ops, and its bits."""

import pytest
import torch

from msa_pretrain.kernels import (
    Segments,
    select_blocks,
    sparse_attention,
    sparse_attention_with_kl,
    sparse_indexer_kl,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NAMES = ("output", "kl", "d_query", "d_key", "d_value", "d_index_query", "d_index_key")
# A document on the dense route, one by query tiles, padding.
SEGMENTS = Segments.from_cu_seqlens([0, 1000, 4100], 4110)
FACTOR = 0.5


def inputs(n, g):
    generator = torch.Generator(DEVICE).manual_seed(0)
    t = SEGMENTS.num_queries
    shapes = ((t, n, 128), (t, g, 128), (t, g, 128), (t, g, 128), (t, 128), (t, n, 128))
    *leaves, grad = (torch.randn(*s, generator=generator, device=DEVICE, dtype=torch.bfloat16) for s in shapes)
    index = (leaves[3], leaves[4])
    chosen = select_blocks(*index, SEGMENTS, block_size=128, num_selected_blocks=16, backend="triton")
    return [leaf.requires_grad_() for leaf in leaves], grad, *chosen


def together(leaves, grad, ids, index_lse):
    sums = []
    options = dict(block_size=128, dense_up_to=2048, kl_weight=FACTOR, record=sums.append)
    output = sparse_attention_with_kl(*leaves, ids, index_lse, SEGMENTS, **options)
    gradients = torch.autograd.grad(output, leaves, grad)
    return [output.detach(), *sums, *gradients]


def apart(leaves, grad, ids):
    query, key, value, *index = leaves
    output, lse = sparse_attention(query, key, value, ids, SEGMENTS, block_size=128)
    kl = sparse_indexer_kl(*index, query.detach(), key.detach(), lse, ids, SEGMENTS, block_size=128).double().sum()
    attention = torch.autograd.grad(output, leaves[:3], grad)
    return [output.detach(), kl.detach(), *attention, *torch.autograd.grad(FACTOR * kl, index)]


@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_it_equals_the_reference_and_repeats_its_bits(n, g):
    leaves, grad, ids, index_lse = inputs(n, g)
    torch.use_deterministic_algorithms(True)
    try:
        ours, again = (together(leaves, grad, ids, index_lse) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, a, b, exact in zip(NAMES, ours, again, apart(leaves, grad, ids), strict=True):
        assert torch.equal(a, b), name
        error = ((a.double() - exact.double()).norm() / exact.double().norm()).item()
        assert error < (1e-4 if name == "kl" else 6e-3), f"{name}: {error:.1e}"
