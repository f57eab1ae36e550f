"""sparse_attention_with_kl in Triton (interpreted on the CPU) against the two ops it joins."""

import pytest
import torch

from msa_pretrain.kernels import (
    Segments,
    select_blocks,
    sparse_attention,
    sparse_attention_with_kl,
    sparse_indexer_kl,
)
from msa_pretrain.kernels.indexer_loss import dense_gradient
from msa_pretrain.kernels.sparse_training import launch

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKED = Segments.from_cu_seqlens([0, 1, 16, 16, 33, 73], 76)
# Two nested ranges of one document whose keys start at row 3, a padding row between, another document.
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (31, 9, 3, 98)), 57, 118)
NAMES = ("query", "key", "value", "index_query", "index_key")
ROUTED = Segments.from_cu_seqlens([0, 31, 63, 96, 97, 150], 152)
SHORT = Segments.from_cu_seqlens([0, 20, 21, 53], 55)


def inputs(segments, *, n, g, d, i, block_size, k, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (segments.num_queries, n, d),
        "key": (segments.num_keys, g, d),
        "value": (segments.num_keys, g, d),
        "index_query": (segments.num_queries, g, i),
        "index_key": (segments.num_keys, i),
        "grad": (segments.num_queries, n, d),
    }
    x = {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    sizes = dict(block_size=block_size, num_selected_blocks=k, backend="triton")
    ids, index_lse = select_blocks(x["index_query"], x["index_key"], segments, **sizes)
    weight = torch.rand(segments.num_queries, 1, generator=generator).round()
    return x, ids, index_lse, weight


def apart(x, ids, segments, weight, factor, dtype, **sizes):
    """Output, KL and gradients of the reference ops."""
    leaves = [x[name].to(dtype).requires_grad_() for name in NAMES]
    query, key, value, index_query, index_key = leaves
    output, lse = sparse_attention(query, key, value, ids, segments, **sizes)
    kl = sparse_indexer_kl(index_query, index_key, query, key, lse, ids, segments, **sizes)
    kl = (kl * weight).sum()
    loss = (output * x["grad"].to(dtype)).sum() + factor * kl
    return [output, kl, *torch.autograd.grad(loss, leaves)]


def together(x, ids, index_lse, segments, weight, factor, **sizes):
    leaves = [x[name].requires_grad_() for name in NAMES]
    sums = []
    arguments = dict(kl_weight=factor, row_weight=weight, record=sums.append, **sizes)
    output = sparse_attention_with_kl(*leaves, ids, index_lse, segments, **arguments)
    assert not sums
    # The loss has gradient 1 of its own, whatever comes from above.
    gradients = torch.autograd.grad(output, leaves, x["grad"])
    (kl,) = sums
    return [output, kl, *gradients]


# g, n/g, d, i, block size, k, queries a chunk; n/g below, at and between powers of two
SHAPES = {
    "heads6": (2, 6, 16, 32, 16, 3, 29),
    "heads16": (1, 16, 16, 16, 16, 4, 16384),
    "heads1": (3, 1, 32, 64, 32, 2, 16384),
    "heads5": (1, 5, 64, 16, 16, 2, 33),
}


@pytest.mark.parametrize(
    "shape, layout, dtype, dense_up_to",
    [
        ("heads6", PACKED, torch.float32, 0),
        ("heads6", FRAGMENTS, torch.float16, 0),
        ("heads16", FRAGMENTS, torch.float32, 0),
        ("heads1", PACKED, torch.float16, 0),
        ("heads5", ROUTED, torch.float32, 32),
        ("heads5", SHORT, torch.float32, 32),
    ],
    ids=lambda value: "" if isinstance(value, Segments) else str(value),
)
def test_it_equals_the_two_ops(shape, layout, dtype, dense_up_to):
    g, heads, d, i, block_size, k, query_chunk = SHAPES[shape]
    x, ids, index_lse, weight = inputs(layout, n=g * heads, g=g, d=d, i=i, block_size=block_size, k=k, dtype=dtype)
    truth = apart(x, ids, layout, weight.double(), 0.3, torch.float64, block_size=block_size)
    sizes = dict(block_size=block_size, query_chunk=query_chunk, dense_up_to=dense_up_to)
    actual = together(x, ids, index_lse, layout, weight, 0.3, **sizes)
    limit = 2e-3 if dtype == torch.float16 else 1e-6
    for name, ours, exact in zip(("output", "kl", *NAMES), actual, truth, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < (limit if name != "kl" else limit / 4), f"{name}: {error:.1e}"
    again = together(x, ids, index_lse, layout, weight, 0.3, **sizes)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.parametrize("layout", [ROUTED, SHORT], ids=["beside long ones", "alone"])
def test_short_documents_with_score_gradients_in_memory(monkeypatch, torch_dense, layout):
    """As on Hopper: one pass over all their tokens, with the selection's lse."""
    for module in (launch, dense_gradient):
        monkeypatch.setattr(module, "takes_hopper_dense", lambda *_: True)
    monkeypatch.setattr(dense_gradient, "HopperDense", torch_dense)
    monkeypatch.setattr(launch.IndexGradient, "add_all", None)
    sizes = dict(n=5, g=1, d=64, i=16, block_size=16, k=2, dtype=torch.float32)
    x, ids, index_lse, weight = inputs(layout, **sizes)
    truth = apart(x, ids, layout, weight.double(), 0.3, torch.float64, block_size=16)
    actual = together(x, ids, index_lse, layout, weight, 0.3, block_size=16, dense_up_to=32)
    for name, ours, exact in zip(("output", "kl", *NAMES), actual, truth, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < 1e-6, name


def test_rows_of_one_token_have_exactly_no_loss():
    """Every document is one token or its first token kept alone."""
    segments = Segments.from_cu_seqlens([0, 1, 2, 19], 20)
    x, ids, index_lse, weight = inputs(segments, n=2, g=1, d=16, i=16, block_size=16, k=1, dtype=torch.float32)
    weight.zero_()
    weight[[0, 1, 2, 18]] = 1.0  # single tokens; the first of a document; the first of a block kept alone
    _, kl, *gradients = together(x, ids, index_lse, segments, weight, 1.0, block_size=16)
    assert kl == 0 and all((gradient == 0).all() for gradient in gradients[3:])


def test_bad_inputs_are_refused():
    x, ids, index_lse, _ = inputs(PACKED, n=2, g=1, d=16, i=16, block_size=16, k=2, dtype=torch.float32)
    arguments = dict(kl_weight=1.0, record=print, block_size=16)
    tensors = [x[name] for name in NAMES]
    with pytest.raises(ValueError, match=r"sparse_attention_with_kl: index_lse \[t_q, g\] must be"):
        sparse_attention_with_kl(*tensors, ids, index_lse[:-1], PACKED, **arguments)
    with pytest.raises(ValueError, match=r"sparse_attention_with_kl: row_weight must be \[t_q, 1\] or \[t_q, g\]"):
        sparse_attention_with_kl(*tensors, ids, index_lse, PACKED, row_weight=index_lse[:, 0], **arguments)
    with pytest.raises(ValueError, match="sparse_attention_with_kl: block_size"):
        sparse_attention_with_kl(*tensors, ids, index_lse, PACKED, **{**arguments, "block_size": 0})
