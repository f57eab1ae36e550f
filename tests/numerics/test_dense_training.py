"""attach_dense_kl in Triton (interpreted on the CPU) against the ops it joins, and its chunks with P by torch."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, attach_dense_kl, dense_attention, dense_indexer_kl
from msa_pretrain.kernels.indexer_loss import dense_launch
from msa_pretrain.kernels.indexer_loss.dense_gradient import dense_kl_gradient, gradient_by_chunks

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKED = Segments.from_cu_seqlens([0, 1, 2, 17, 33, 162], 165)
# Nested ranges of one document, a fragment without queries, the last row of a document, padding rows.
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (30, 9, 3, 98), (57, 0, 118, 0), (58, 1, 130, 49)), 60, 180)
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


def torch_teacher(x, lse, segments):
    """P by plain torch; whatever it need not write is NaN."""

    def write(chunk, first, probs):
        assert probs.shape[2] % 256 == 0 and chunk.num_queries == segments.num_queries
        probs.fill_(math.nan)
        for q_start, q_len, k_start, k_len in chunk.rows:
            query = x["query"][q_start : q_start + q_len].float().view(q_len, G, N // G, D)
            scores = SCALE * torch.einsum("tghd,kgd->tghk", query, x["key"][k_start : k_start + k_len].float())
            all_probs = (scores - lse[q_start : q_start + q_len].view(q_len, G, N // G, 1)).exp().mean(2)
            position = torch.arange(k_len - q_len, k_len)
            hidden = torch.arange(k_len) > position[:, None]
            probs[q_start - first : q_start - first + q_len, :, :k_len] = all_probs.masked_fill(
                hidden[:, None], math.nan
            )

    return write


@pytest.mark.parametrize(
    "segments, dtype, rows, part_keys",
    [
        (PACKED, torch.float32, None, 8192),
        (PACKED, torch.float16, 40, 128),
        (FRAGMENTS, torch.float32, 16, 128),
    ],
    ids=["one chunk", "packed, chunks and parts", "fragments, chunks and parts"],
)
def test_a_teacher_in_memory_gives_what_the_kernels_make(monkeypatch, segments, dtype, rows, part_keys):
    monkeypatch.setattr(dense_launch, "PART_KEYS", part_keys)
    x, weight = inputs(segments, dtype)
    index = (x["index_query"], x["index_key"])
    _, lse = dense_attention(x["query"], x["key"], x["value"], segments)
    lse = lse.float()
    weight = torch.where(segments.positions("cpu")[:, None] > 0, weight, 0.0)
    expected = dense_kl_gradient(*index, x["query"], x["key"], lse, segments, weight, FACTOR, softmax_scale=SCALE)
    teacher = torch_teacher(x, lse, segments)
    scores = torch.zeros(segments.num_queries, G, dtype=torch.float32)
    for q_start, q_len, k_start, k_len in segments.rows:
        s = torch.einsum(
            "tgi,ki->tgk", index[0][q_start : q_start + q_len].double(), index[1][k_start : k_start + k_len].double()
        )
        hidden = torch.arange(k_len) > torch.arange(k_len - q_len, k_len)[:, None]
        scores[q_start : q_start + q_len] = (s / I**0.5).masked_fill(hidden[:, None], -math.inf).logsumexp(2).float()
    for index_lse in (None, scores):
        ours = gradient_by_chunks(teacher, *index, segments, weight, FACTOR, index_lse=index_lse, rows=rows)
        for one, other in zip(ours, expected, strict=True):
            assert one.dtype == other.dtype
            # fp16: one unit of rounding of the results
            bound = 2e-6 if one.dtype != torch.float16 else 2.0**-11
            assert (one - other).abs().max() <= bound * other.abs().max()


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
