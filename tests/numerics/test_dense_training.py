"""attach_dense_kl in Triton (interpreted on the CPU) against the ops it joins, and its chunks with P by torch."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, attach_dense_kl, dense_attention, dense_indexer_kl
from msa_pretrain.kernels.indexer_loss.dense_gradient import dense_kl_gradient, gradient_by_chunks
from msa_pretrain.kernels.indexer_loss.dense_launch import dense_student
from msa_pretrain.kernels.tuning import TileConfig
from msa_pretrain.kernels.work_tables import query_tiles

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKED = Segments.from_cu_seqlens([0, 1, 2, 17, 33, 162], 165)
# Nested ranges of one document, a fragment without queries, the last row of a document, padding rows.
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (30, 9, 3, 98), (57, 0, 118, 0), (58, 1, 130, 49)), 60, 180)
# Three windows of 256 keys.
LONG = Segments.from_cu_seqlens([0, 40, 560], 563)
NAMES = ("query", "key", "value", "index_query", "index_key")
N, G, D, I = 6, 2, 32, 16  # noqa: E741
SCALE = D**-0.5
FACTOR = 0.3
# The rule: error <= 2 x the reference's in the same dtype + floor x largest value; the sum of the KL, which is fp32 in
# each row, needs the floor.
FLOOR = 2e-6


def inputs(segments, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = dict(query=(N, D), key=(G, D), value=(G, D), index_query=(G, I), index_key=(I,))
    counts = dict(query=segments.num_queries, index_query=segments.num_queries)
    x = {
        name: torch.randn(counts.get(name, segments.num_keys), *shape, generator=generator).to(dtype)
        for name, shape in rows.items()
    }
    x["grad"] = torch.randn(segments.num_queries, N, D, generator=generator).to(dtype)
    weight = torch.rand(segments.num_queries, G, generator=generator)
    weight[::5] = 0
    return x, weight


def apart(x, segments, weight, dtype):
    """KL and gradients of the reference ops."""
    leaves = [x[name].to(dtype).requires_grad_() for name in NAMES]
    query, key, value, *index = leaves
    output, lse = dense_attention(query, key, value, segments)
    kl = (dense_indexer_kl(*index, query, key, lse, segments) * weight).sum()
    loss = (output * x["grad"].to(dtype)).sum() + FACTOR * kl
    return [kl, *torch.autograd.grad(loss, leaves)]


def together(x, segments, weight, grad=None):
    leaves = [x[name].detach().requires_grad_() for name in NAMES]
    query, key, value, *index = leaves
    sums = []
    output, lse = dense_attention(query, key, value, segments, backend="triton")
    loss = dict(kl_weight=FACTOR, row_weight=weight, record=sums.append)
    attached = attach_dense_kl(output, *index, query, key, lse, segments, **loss)
    assert torch.equal(attached, output) and not sums
    gradients = torch.autograd.grad(attached, leaves, x["grad"] if grad is None else grad)
    (kl,) = sums
    assert kl.dtype == torch.float64 and kl.shape == ()
    return [kl, *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, FRAGMENTS], ids=["packed", "fragments"])
def test_it_equals_the_two_ops(dtype, segments):
    x, weight = inputs(segments, dtype)
    truth = apart(x, segments, weight.double(), torch.float64)
    ours, same = together(x, segments, weight), apart(x, segments, weight, dtype)
    for name, exact, one, other in zip(("kl", *NAMES), truth, ours, same, strict=True):
        error, peer = ((y.double() - exact).abs().max().item() for y in (one, other))
        allowed = 2 * peer + FLOOR * exact.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.2e} > {allowed:.2e}, peer {peer:.2e}"


def test_the_loss_has_gradient_1_of_its_own():
    x, weight = inputs(FRAGMENTS, torch.float32)
    plain, scaled = together(x, FRAGMENTS, weight), together(x, FRAGMENTS, weight, torch.zeros_like(x["grad"]))
    assert all((gradient == 0).all() for gradient in scaled[1:4])
    assert all(torch.equal(one, other) for one, other in zip(plain[4:], scaled[4:], strict=True))


def test_one_weight_a_row_and_none():
    x, _ = inputs(FRAGMENTS, torch.float32)
    for row_weight, same in ((None, torch.ones(60, 2)), (torch.arange(60.0)[:, None] / 60, None)):
        same = row_weight.expand(60, 2).contiguous() if same is None else same
        one, other = together(x, FRAGMENTS, row_weight), together(x, FRAGMENTS, same)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "segments, dtype, rows, window",
    [
        (PACKED, torch.float32, None, None),
        (PACKED, torch.float16, 40, 256),
        (LONG, torch.float32, None, 256),
        (LONG, torch.float16, 130, 256),
        (FRAGMENTS, torch.float32, 16, 256),
    ],
    ids=["one chunk", "packed, chunks", "windows", "chunks and windows", "fragments, chunks"],
)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_score_gradients_in_memory_give_what_the_kernels_make(torch_dense, segments, dtype, rows, window, offset):
    """An offset that all index keys share changes nothing, though D is rounded to 16 bits."""
    x, weight = inputs(segments, dtype)
    _, lse = dense_attention(x["query"], x["key"], x["value"], segments)
    lse = lse.float()
    index_query, index_key = x["index_query"], x["index_key"] + (offset * torch.linspace(-1, 1, I)).to(dtype)
    weight = torch.where(segments.positions("cpu")[:, None] > 0, weight, 0.0)
    leaves = [t.double().requires_grad_() for t in (index_query, index_key)]
    kl = (dense_indexer_kl(*leaves, x["query"].double(), x["key"].double(), lse.double(), segments) * weight).sum()
    truth = (kl.detach(), *torch.autograd.grad(FACTOR * kl, leaves))
    tiles = query_tiles(segments, "cpu", rows=128)
    index_lse = dense_student(index_query, index_key, tiles, TileConfig(128, 128, num_warps=4, num_stages=1))
    for tensor in (index_query, x["query"], lse, index_lse):
        tensor[~segments.query_mask("cpu")] = math.nan
    teacher = (x["query"], x["key"], lse)
    make = torch_dense(index_query, index_key, *teacher, index_lse, weight, SCALE)
    ours = gradient_by_chunks(make, index_query, index_key, segments, weight, FACTOR, rows=rows, window=window)
    # One rounding of D and one of the result.
    bounds = (1e-6, 1e-5, 1e-5) if dtype == torch.float32 else (2e-5, 2.0**-10, 2.0**-10)
    for one, other, bound in zip(ours, truth, bounds, strict=True):
        error = (one.double() - other).abs().max().item()
        assert error <= bound * other.abs().max().item(), f"{error:.2e} of {other.abs().max().item():.2e}"


def test_a_tensor_factor_is_a_factor():
    x, weight = inputs(FRAGMENTS, torch.float32)
    _, lse = dense_attention(x["query"], x["key"], x["value"], FRAGMENTS)
    arguments = [x[name] for name in ("index_query", "index_key", "query", "key")]
    results = [
        dense_kl_gradient(*arguments, lse, FRAGMENTS, weight, factor, softmax_scale=SCALE)
        for factor in (0.5, torch.tensor(0.5))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_rows_of_one_token_and_of_no_document_have_no_loss():
    segments = Segments.from_cu_seqlens([0, 1, 2, 40], 43)
    x, weight = inputs(segments, torch.float32)
    weight = torch.zeros_like(weight)
    weight[[0, 1, 2]], weight[40:] = 1.0, math.nan
    kl, *gradients = together(x, segments, weight)
    assert kl == 0 and all((gradient == 0).all() for gradient in gradients[3:])


def test_an_empty_batch():
    segments = Segments(rows=((0, 0, 0, 0),), num_queries=5, num_keys=4)
    x, weight = inputs(segments, torch.float32)
    assert all((result == 0).all() for result in together(x, segments, weight))
    by_chunks = gradient_by_chunks(None, x["index_query"], x["index_key"], segments, weight * 0, FACTOR)
    assert all((result == 0).all() for result in by_chunks)


def test_bad_inputs_are_refused():
    x, _ = inputs(PACKED, torch.float32)
    output, lse = dense_attention(x["query"], x["key"], x["value"], PACKED)
    tensors = [x[name] for name in ("index_query", "index_key", "query", "key")]
    arguments = dict(kl_weight=1.0, record=print)
    for row_weight in (torch.ones(165), torch.ones(165, 3), torch.ones(164, 1)):
        with pytest.raises(ValueError, match=r"attach_dense_kl: row_weight must be \[t_q, 1\] or \[t_q, g\], here"):
            attach_dense_kl(output, *tensors, lse, PACKED, row_weight=row_weight, **arguments)
    with pytest.raises(ValueError, match="attach_dense_kl: lse must be float32 or float64"):
        attach_dense_kl(output, *tensors, lse[1:], PACKED, **arguments)
    with pytest.raises(ValueError, match="attach_dense_kl: backend 'triton' supports float16, bfloat16 and float32"):
        attach_dense_kl(output, *(tensor.double() for tensor in tensors), lse, PACKED, **arguments)


def test_chunks_of_segments():
    """Cut at 16 rows: fragments in two, keys up to the last query's, chunks without queries left out."""
    chunks = FRAGMENTS.chunks(16)
    assert [chunk.rows for chunk in chunks] == [
        ((0, 16, 3, 46),),
        ((16, 14, 3, 60), (30, 2, 3, 91)),
        ((40, 8, 101, 8), (32, 7, 3, 98)),
        ((48, 9, 101, 17), (58, 1, 130, 49)),
    ]
    assert FRAGMENTS.chunks(16) is chunks and all(chunk.num_keys == 180 for chunk in chunks)
    assert len(Segments(((8, 2, 0, 2),), 64, 2).chunks(8)) == 1
