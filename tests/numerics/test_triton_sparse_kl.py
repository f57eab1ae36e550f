"""sparse_indexer_kl in Triton (interpreted on the CPU) against the reference."""

import math
from types import SimpleNamespace

import pytest
import torch

from msa_pretrain.kernels import Segments, dense_indexer_kl, select_blocks, sparse_attention, sparse_indexer_kl
from msa_pretrain.kernels.block_sparse_attention.reverse_index import document_tables
from msa_pretrain.kernels.indexer_loss.sparse_launch import sparse_indexer_kl_triton

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKED = Segments.from_cu_seqlens([0, 1, 16, 16, 33, 73], 76)
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (31, 9, 3, 98)), 57, 118)


def inputs(segments, *, n, g, d, i, block_size, k, dtype=torch.float32, offset=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_queries, num_keys = segments.num_queries, segments.num_keys
    index_query = torch.randn(num_queries, g, i, generator=generator).to(dtype)
    index_key = (torch.randn(num_keys, i, generator=generator) + offset).to(dtype)
    query = torch.randn(num_queries, n, d, generator=generator).to(dtype)
    key = torch.randn(num_keys, g, d, generator=generator).to(dtype)
    ids, _ = select_blocks(index_query, index_key, segments, block_size=block_size, num_selected_blocks=k)
    _, lse = sparse_attention(query.float(), key.float(), key.float(), ids, segments, block_size=block_size)
    grad = torch.rand(num_queries, g, generator=generator) + 0.5
    index = {"index_query": index_query.requires_grad_(), "index_key": index_key.requires_grad_()}
    return SimpleNamespace(**index, query=query, key=key, lse=lse, ids=ids, grad=grad)


def run(x, segments, block_size, *, query_chunk=None, dense_up_to=0, backend="triton"):
    arguments = (x.index_query, x.index_key, x.query, x.key, x.lse, x.ids, segments)
    if query_chunk is None:
        kl = sparse_indexer_kl(*arguments, block_size=block_size, dense_up_to=dense_up_to, backend=backend)
    else:
        scale = x.query.shape[2] ** -0.5
        kl = sparse_indexer_kl_triton(*arguments, block_size=block_size, softmax_scale=scale, query_chunk=query_chunk)
    gradients = torch.autograd.grad(kl, (x.index_query, x.index_key), x.grad.to(kl.dtype))
    return dict(zip(("kl", "d_index_query", "d_index_key"), (kl.detach(), *gradients), strict=True))


def as_double(x):
    tensors = {name: t if name == "ids" else t.detach().double() for name, t in vars(x).items()}
    for name in ("index_query", "index_key"):
        tensors[name].requires_grad_()
    return SimpleNamespace(**tensors)


def eager(x, segments, block_size):
    """Plain PyTorch in the dtype of the inputs, one fragment at a time."""
    pieces = torch.zeros(x.grad.shape)
    for q_start, q_len, k_start, k_len in segments.rows:
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        heads = x.query.shape[1] // x.key.shape[1]
        position, token = torch.arange(k_len - q_len, k_len)[:, None], torch.arange(k_len)
        kept = (x.ids[rows, :, :, None] == token // block_size).any(dim=2) & (token <= position)[:, None]
        scores = torch.einsum("qhd,khd->qhk", x.query[rows], x.key[keys].repeat_interleave(heads, dim=1))
        probs = (scores * x.query.shape[2] ** -0.5 - x.lse[rows, :, None].to(scores.dtype)).exp()
        teacher = probs.unflatten(1, (-1, heads)).mean(dim=2).masked_fill(~kept, 0.0)
        scores = torch.einsum("qgi,ki->qgk", x.index_query[rows], x.index_key[keys]) * x.index_query.shape[2] ** -0.5
        student = scores.masked_fill(~kept, torch.finfo(scores.dtype).min).log_softmax(dim=2)
        kl = (torch.special.xlogy(teacher, teacher) - teacher * student.masked_fill(~kept, 0.0)).sum(dim=2)
        pieces = torch.cat([pieces[:q_start], kl.float(), pieces[q_start + q_len :]])
    gradients = torch.autograd.grad(pieces, (x.index_query, x.index_key), x.grad)
    return dict(zip(("kl", "d_index_query", "d_index_key"), (pieces.detach(), *gradients), strict=True))


def assert_within_rule(actual, same, truth):
    """At most twice the error of PyTorch on the same inputs, plus a few fp32 roundings of the largest number."""
    for name, exact in truth.items():
        size = exact.abs().max() + 1.0
        for norm in (math.inf, 2):
            error, allowed = (torch.linalg.vector_norm(r[name].double() - exact, norm) for r in (actual, same))
            count = 1 if norm == math.inf else exact.numel() ** 0.5
            assert error <= 2 * allowed + 4e-7 * size * count, f"{name}: {error:.2e} > 2 x {allowed:.2e} (norm {norm})"


# g, n/g, d, i, block size, k, queries a chunk
SHAPES = {
    "heads6": (2, 6, 16, 32, 16, 3, 29),
    "heads16": (1, 16, 16, 16, 16, 4, 16384),
    "heads1": (3, 1, 32, 64, 32, 2, 16384),
    "wide": (1, 2, 128, 128, 64, 1, 33),
}


@pytest.mark.parametrize(
    "shape, layout, dtype, offset",
    [
        ("heads6", PACKED, torch.float32, 0.0),
        ("heads6", FRAGMENTS, torch.float16, 3.0),
        ("heads16", FRAGMENTS, torch.float32, 3.0),
        ("heads1", PACKED, torch.float16, 0.0),
        ("wide", FRAGMENTS, torch.float16, 0.0),
    ],
    ids=lambda value: "" if isinstance(value, Segments) else str(value),
)
def test_error_is_at_most_twice_that_of_plain_pytorch(shape, layout, dtype, offset):
    g, heads, d, i, block_size, k, query_chunk = SHAPES[shape]
    x = inputs(layout, n=g * heads, g=g, d=d, i=i, block_size=block_size, k=k, dtype=dtype, offset=offset)
    actual = run(x, layout, block_size, query_chunk=query_chunk)
    same = eager(x, layout, block_size)
    truth = run(as_double(x), layout, block_size, backend="reference")
    assert actual["kl"].dtype == torch.float32 and actual["d_index_key"].dtype == dtype
    assert_within_rule(actual, same, truth)


def test_kl_by_hand():
    """Teacher one-hot on key 0, all index scores 0: ln of the number of visible tokens."""
    segments = Segments.from_cu_seqlens([0, 4])
    query = torch.zeros(4, 1, 16)
    query[..., 0] = 400.0
    key = torch.zeros(4, 1, 16)
    key[0, 0, 0] = 1.0
    lse = torch.full((4, 1), 100.0)
    ids = torch.zeros(4, 1, 1, dtype=torch.int32)
    zero = torch.zeros(4, 1, 16)
    kl = sparse_indexer_kl(zero, zero[:, 0], query, key, lse, ids, segments, block_size=16, backend="triton")
    torch.testing.assert_close(kl[:, 0], torch.tensor([1.0, 2.0, 3.0, 4.0]).log(), rtol=0, atol=1e-6)
    assert kl[0, 0] == 0


def test_all_blocks_equal_the_full_sequence():
    segments = Segments.from_cu_seqlens([0, 40])
    x = inputs(segments, n=3, g=1, d=16, i=16, block_size=16, k=3)
    sparse = run(x, segments, 16)
    full = dense_indexer_kl(x.index_query, x.index_key, x.query, x.key, x.lse, segments)
    torch.testing.assert_close(sparse["kl"], full.detach(), rtol=0, atol=2e-6)
    for name, expected in zip(
        ("d_index_query", "d_index_key"), torch.autograd.grad(full, (x.index_query, x.index_key), x.grad), strict=True
    ):
        torch.testing.assert_close(sparse[name], expected, rtol=0, atol=2e-6)


def test_the_dense_route_changes_no_result():
    """Documents on both sides of k * l = 32 tokens, one token alone, padding; and a batch of short ones only."""
    for borders in ([0, 31, 63, 96, 97, 150], [0, 20, 21, 53]):
        segments = Segments.from_cu_seqlens(borders, borders[-1] + 2)
        x = inputs(segments, n=6, g=2, d=16, i=16, block_size=16, k=2)
        sparse, mixed = (run(x, segments, 16, dense_up_to=limit) for limit in (0, 32))
        for name, expected in sparse.items():
            torch.testing.assert_close(mixed[name], expected, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert (mixed["kl"][borders[-1] :] == 0).all()


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poison_strides_and_dead_rows(poison):
    """Padding is never read; views and a gradient of stride 0 change no bit; rows of one token have none."""
    segments = Segments(((0, 1, 2, 1), (1, 36, 3, 36)), 40, 42)
    clean = inputs(segments, n=4, g=2, d=16, i=16, block_size=16, k=2)
    clean.grad = torch.ones(40, 2)
    expected = run(clean, segments, 16, query_chunk=20)
    dirty = inputs(segments, n=4, g=2, d=16, i=16, block_size=16, k=2)
    dirty.grad = torch.ones(1, 1).expand(40, 2)
    for name in ("index_query", "query", "index_key", "key"):
        tensor = getattr(dirty, name).detach()
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), poison)
        view = wide[..., : tensor.shape[-1]] if name != "query" else wide[..., ::2]
        view.copy_(tensor)
        view[37:] = poison
        if name in ("index_key", "key"):
            view[37:39] = tensor[37:39]
            view[:2] = view[39:] = poison
        setattr(dirty, name, view.requires_grad_(name.startswith("index")))
    actual = run(dirty, segments, 16, query_chunk=20)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    for row in (0, 37, 38, 39):
        assert (actual["kl"][row] == 0).all() and (actual["d_index_query"][row] == 0).all()
    assert (actual["d_index_key"][[0, 1, 2, 39, 40, 41]] == 0).all()


def test_a_batch_without_documents():
    segments = Segments.from_cu_seqlens([0], 4)
    x = inputs(segments, n=2, g=1, d=16, i=16, block_size=16, k=2)
    assert all((tensor == 0).all() for tensor in run(x, segments, 16).values())


def test_opcheck():
    segments = Segments.from_cu_seqlens([0, 20], 21)
    x = inputs(segments, n=2, g=1, d=16, i=16, block_size=16, k=2)
    tables = document_tables(segments, 16, torch.device("cpu"))
    arguments = (x.index_query, x.index_key, x.query, x.key, x.lse, x.ids, *tables, 16, 0.25, 16384)
    torch.library.opcheck(torch.ops.msa_pretrain.sparse_indexer_kl.default, arguments)


def test_index_dim_is_refused_by_name():
    segments = Segments.from_cu_seqlens([0, 5])
    x = inputs(segments, n=2, g=1, d=16, i=24, block_size=16, k=2)
    with pytest.raises(ValueError, match="supports index dim 16, 32, 64, 128; got 24"):
        run(x, segments, 16)
