"""The Hopper kernel of the full-sequence KL's teacher, and attach_dense_kl with it, in 16 bits on a GPU."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, attach_dense_kl, dense_attention, dense_indexer_kl
from msa_pretrain.kernels.indexer_loss import dense_gradient
from msa_pretrain.kernels.indexer_loss.hopper_teacher_launch import KEYS, HopperTeacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

DEVICE = torch.device("cuda")
LENGTHS = [1, 63, 64, 300, 1000, 2048, 4097]
BORDERS = [sum(LENGTHS[:j]) for j in range(len(LENGTHS) + 1)]
PACKED = Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 9)
NESTED = Segments(((200, 400, 0, 400), (600, 100, 0, 1500), (0, 200, 1500, 700), (700, 1, 1500, 33)), 720, 2300)
SCALE = 128**-0.5
FACTOR = 0.5
NAMES = ("kl", "d_index_query", "d_index_key")


def inputs(segments, n, g, dtype=torch.bfloat16, padding=math.nan):
    """query, key (strided views), index query, index key, lse, weights; `padding` in rows of no document."""
    generator = torch.Generator(DEVICE).manual_seed(n)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    query = draw(segments.num_queries, n + 2, 128)[:, 1:-1]
    key = draw(segments.num_keys, g + 2, 128)[:, 1:-1]
    index_query, index_key = draw(segments.num_queries, g, 128), draw(segments.num_keys, 128)
    _, lse = dense_attention(query, key, key, segments, backend="triton")
    weight = torch.rand(segments.num_queries, g, generator=generator, device=DEVICE)
    outside = ~segments.query_mask(DEVICE)
    used = torch.zeros(segments.num_keys, dtype=torch.bool, device=DEVICE)
    for _, _, k_start, k_len in segments.rows:
        used[k_start : k_start + k_len] = True
    for tensor, rows in ((query, outside), (index_query, outside), (weight, outside), (key, ~used), (index_key, ~used)):
        tensor[rows] = padding
    return query, key, index_query, index_key, lse, weight


def exact_probs(query, key, lse):
    """[rows, g, keys] in fp32 arithmetic of the 16-bit numbers."""
    grouped = query.double().unflatten(1, (key.shape[1], -1))
    scores = SCALE * torch.einsum("tghd,kgd->tghk", grouped, key.double())
    return (scores - lse.double().view(*grouped.shape[:3], 1)).exp().mean(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, NESTED], ids=["packed", "nested"])
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8), (7, 1), (5, 1), (3, 3)])
def test_the_teacher(n, g, segments, dtype):
    query, key, _, _, lse, _ = inputs(segments, n, g, dtype)
    columns = -(-segments.max_k_len // KEYS) * KEYS
    teacher = HopperTeacher(query, key, lse, SCALE)
    for rows in (segments.num_queries, 500):
        for chunk in segments.chunks(rows):
            first = min(row[0] for row in chunk.rows)
            probs = torch.full((min(rows, segments.num_queries), g, columns), -1.0, device=DEVICE)
            teacher(chunk, first, probs)
            used = torch.zeros(len(probs), dtype=torch.bool, device=DEVICE)
            for q_start, q_len, k_start, k_len in chunk.rows:
                own, keys = slice(q_start - first, q_start - first + q_len), slice(k_start, k_start + k_len)
                used[own] = True
                exact = exact_probs(query[q_start : q_start + q_len], key[keys], lse[q_start : q_start + q_len])
                position = torch.arange(k_len - q_len, k_len, device=DEVICE)
                visible = (torch.arange(k_len, device=DEVICE) <= position[:, None])[:, None].expand_as(exact)
                error = (probs[own, :, :k_len] - exact).abs()[visible] / exact[visible]
                assert error.max() < 2e-5, f"{q_len} queries, {k_len} keys: {error.max().item():.1e}"
            # Rows of no document are not written.
            assert (probs[~used] == -1).all()


def together(query, key, index_query, index_key, lse, weight, segments):
    leaves = [tensor.detach().requires_grad_() for tensor in (index_query, index_key)]
    output, sums = torch.zeros_like(query).requires_grad_(), []
    loss = dict(kl_weight=FACTOR, row_weight=weight, record=sums.append)
    attached = attach_dense_kl(output, *leaves, query, key, lse, segments, **loss)
    gradients = torch.autograd.grad(attached, leaves, torch.zeros_like(attached))
    return dict(zip(NAMES, (*sums, *gradients), strict=True))


def apart(query, key, index_query, index_key, lse, weight, segments, backend, dtype=None):
    query, key, index_query, index_key = (
        tensor.to(dtype or tensor.dtype) for tensor in (query, key, index_query, index_key)
    )
    leaves = [tensor.detach().requires_grad_() for tensor in (index_query, index_key)]
    kl = dense_indexer_kl(*leaves, query, key, lse, segments, backend=backend)
    some = segments.query_mask(DEVICE)
    total = (kl[some].double() * weight[some]).sum()
    return dict(zip(NAMES, (total.detach(), *torch.autograd.grad(FACTOR * total, leaves)), strict=True))


@pytest.mark.parametrize("chunk_rows", [None, 1024], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, NESTED], ids=["packed", "nested"])
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_value_and_gradients(n, g, segments, dtype, chunk_rows, monkeypatch):
    """Within twice the error of the op that makes P in Triton, and 2e-6 of the largest value; NaN in the padding."""
    x = inputs(segments, n, g, dtype)
    if chunk_rows:
        monkeypatch.setattr(dense_gradient, "chunk_rows", lambda *_: chunk_rows)
    ours = together(*x, segments)
    clean = inputs(segments, n, g, dtype, padding=0.0)
    truth, peers = apart(*clean, segments, "reference", torch.float64), apart(*clean, segments, "triton")
    for name, expected in truth.items():
        error, peer = ((y[name].double() - expected).abs().max().item() for y in (ours, peers))
        allowed = 2 * peer + 2e-6 * expected.abs().max().item()
        print(f"{name}: error {error:.2e}, peer {peer:.2e}, allowed {allowed:.2e}")
        assert error <= allowed, f"{name}: error {error:.2e} > {allowed:.2e}, peer {peer:.2e}"


@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_20_repeats_are_bit_equal(n, g):
    x = inputs(PACKED, n, g)
    first = together(*x, PACKED)
    for _ in range(20):
        again = together(*x, PACKED)
        assert all(torch.equal(first[name], again[name]) for name in NAMES)


def test_it_does_not_synchronise():
    x = inputs(PACKED, 64, 4)
    together(*x, PACKED)
    torch.cuda.set_sync_debug_mode("error")
    try:
        together(*x, PACKED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
