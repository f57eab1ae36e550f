"""The Hopper kernel of the full-sequence KL's score gradient, and attach_dense_kl with it, in 16 bits on a GPU."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, attach_dense_kl, dense_attention, dense_indexer_kl
from msa_pretrain.kernels.indexer_loss import dense_gradient
from msa_pretrain.kernels.indexer_loss.hopper_dense_launch import KEYS, HopperDense

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


def exact(x, segments, columns):
    """P and P_idx [t_q, g, columns], the student's lse [t_q, g], sum of weight x KL: fp64 arithmetic of the inputs."""
    query, key, index_query, index_key, lse, weight = (tensor.double() for tensor in x)
    probs, student = (torch.zeros(*index_query.shape[:2], columns, device=DEVICE).double() for _ in range(2))
    index_lse, value = torch.full_like(weight, math.nan), 0.0
    for q_start, q_len, k_start, k_len in segments.rows:
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        hidden = (torch.arange(k_len) > torch.arange(k_len - q_len, k_len)[:, None]).to(DEVICE)[:, None]
        grouped = query[rows].unflatten(1, (key.shape[1], -1))
        grouped_lse = lse[rows].view(*grouped.shape[:3], 1)
        p = torch.zeros((), device=DEVICE)
        for head in range(grouped.shape[2]):  # One after the other: all at once are 8 GiB.
            scores = SCALE * torch.einsum("tgd,kgd->tgk", grouped[:, :, head], key[keys])
            p = p + (scores - grouped_lse[:, :, head]).exp() / grouped.shape[2]
        p = p.masked_fill(hidden, 0)
        x = (SCALE * torch.einsum("tgi,ki->tgk", index_query[rows], index_key[keys])).masked_fill(hidden, -math.inf)
        index_lse[rows] = x.logsumexp(2)
        log_student = (x - index_lse[rows, :, None]).masked_fill(hidden, 0)
        value += (weight[rows, :, None] * (torch.special.xlogy(p, p) - p * log_student)).sum()
        probs[rows, :, :k_len], student[rows, :, :k_len] = p, log_student.exp().masked_fill(hidden, 0)
    return probs, student, index_lse.float(), value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, NESTED], ids=["packed", "nested"])
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8), (7, 1), (5, 1), (3, 3)])
def test_score_gradient_and_value(n, g, segments, dtype):
    """D within a rounding of its 16 bits and 1e-5 of P and P_idx; value within 1e-5 of the sum of weights."""
    x = inputs(segments, n, g, dtype)
    columns = -(-segments.max_k_len // KEYS) * KEYS
    probs, student, index_lse, exact_value = exact(x, segments, columns)
    allowed = (student - probs).abs() * torch.finfo(dtype).eps + 1e-5 * (student + probs) + 1e-8
    written = torch.arange(columns, device=DEVICE) < (segments.positions(DEVICE)[:, None] // 8 + 1) * 8
    query, key, index_query, index_key, lse, weight = x
    make = HopperDense(index_query, index_key, query, key, lse, index_lse, weight, SCALE)
    for num_rows, window in ((segments.num_queries, columns), (500, 512)):
        value = 0.0
        for chunk in segments.chunks(num_rows):
            first = min(row[0] for row in chunk.rows)
            rows = slice(first, min(first + num_rows, segments.num_queries))
            used = chunk.query_mask(DEVICE)[rows]
            for first_key in range(0, chunk.max_k_len, window):
                keys = slice(first_key, min(first_key + window, columns))
                made = torch.full((rows.stop - first, g, keys.stop - first_key), -7.0, device=DEVICE, dtype=dtype)
                value += make(chunk, first, first_key, made).sum(dtype=torch.float64)
                error = (made.double() / make.lift - (student - probs)[rows, :, keys]).abs() - allowed[rows, :, keys]
                assert (error <= 0).masked_fill(~(written[rows, keys] & used[:, None])[:, None], True).all()
                early = [rows for rows in chunk.rows if rows[1] == rows[3] and not first_key]
                for q_start, q_len, _, _ in early:
                    # The first rows have what the rounding lost.
                    some = slice(q_start - first, q_start - first + min(q_len, KEYS // 2))
                    both = made[some].double()
                    both = (both[..., : KEYS // 2] + both[..., KEYS // 2 : KEYS]) / make.lift
                    at = slice(q_start, q_start + min(q_len, KEYS // 2)), slice(None), slice(KEYS // 2)
                    error = (both - (student - probs)[at]).abs() - 1e-5 * (student + probs)[at] - 1e-8
                    assert (error <= 0).masked_fill(~written[at[0], None, : KEYS // 2], True).all()
                # Rows of no document are not written.
                assert (made[~used] == -7).all()
        error = (value - exact_value).abs() / weight[segments.query_mask(DEVICE)].double().sum()
        print(f"value {value.item():.6f}, error by weight {error.item():.1e}")
        assert error <= 1e-5


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


@pytest.mark.parametrize("chunk_rows", [None, 1024], ids=["one chunk", "chunks and windows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, NESTED], ids=["packed", "nested"])
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_value_and_gradients(n, g, segments, dtype, chunk_rows, monkeypatch):
    """Within twice the error of the op that makes P in Triton, and 2e-6 of the largest value; NaN in the padding."""
    x = inputs(segments, n, g, dtype)
    if chunk_rows:
        monkeypatch.setattr(dense_gradient, "chunk_rows", lambda *_: chunk_rows)
        monkeypatch.setattr(dense_gradient, "WINDOW_KEYS", 1024)
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
