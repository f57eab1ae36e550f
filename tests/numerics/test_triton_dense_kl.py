"""dense_indexer_kl in Triton (interpreted on the CPU) against float64 and the reference of the same dtype."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msa_pretrain.kernels import Segments, dense_attention, dense_indexer_kl

LENGTHS = [1, 15, 16, 17, 0, 127, 129]
BORDERS = [sum(LENGTHS[:j]) for j in range(len(LENGTHS) + 1)]
PACKED = Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 5)
# Nested ranges of one document, a fragment without queries, the last row of a document, padding rows.
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (30, 9, 3, 98), (57, 0, 118, 0), (58, 1, 130, 49)), 60, 180)
NAMES = ("kl", "d_index_query", "d_index_key")

# The rule: error <= 2 x the reference's in the same dtype + floor x largest value. Only kl itself, which is fp32, needs
# the floor: 4e-7 of the largest value on most inputs, 1.4e-6 at n/g = 1, scale 0.3, where torch with two threads is
# lucky (4 ulp of the largest value; the kernel has 19: its scores, up to 10 in size, are rounded before the sum).
FLOOR = 2e-6


def inputs(segments, *, dtype=torch.float32, n=6, g=2, d=32, i=16, shift=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    x = SimpleNamespace(
        index_query=draw(segments.num_queries, g, i),
        index_key=draw(segments.num_keys, i) + shift * draw(i),
        query=draw(segments.num_queries, n, d),
        key=draw(segments.num_keys, g, d) + shift * draw(g, d),
    )
    return SimpleNamespace(**{name: tensor.to(dtype) for name, tensor in vars(x).items()})


def run(x, segments, backend="triton", weights=None, scale=None, lse=None):
    """kl and both gradients under fixed random row weights."""
    index_query, index_key = x.index_query.detach().requires_grad_(), x.index_key.detach().requires_grad_()
    if lse is None:
        _, lse = dense_attention(x.query, x.key, x.key, segments, softmax_scale=scale)
    kl = dense_indexer_kl(index_query, index_key, x.query, x.key, lse, segments, softmax_scale=scale, backend=backend)
    if weights is None:
        weights = torch.rand(kl.shape, generator=torch.Generator().manual_seed(7)).to(kl.dtype)
    gradients = torch.autograd.grad(kl, (index_query, index_key), weights.to(kl.dtype))
    return dict(zip(NAMES, (kl.detach(), *gradients), strict=True))


def check(x, segments, **kwargs):
    truth = run(SimpleNamespace(**{name: t.double() for name, t in vars(x).items()}), segments, "reference", **kwargs)
    same, ours = run(x, segments, "reference", **kwargs), run(x, segments, **kwargs)
    for name in NAMES:
        assert ours[name].dtype == same[name].dtype
        error, peer = ((y[name].double() - truth[name]).abs().max().item() for y in (ours, same))
        allowed = 2 * peer + FLOOR * truth[name].abs().max().item()
        assert error <= allowed, f"{name}: error {error:.2e} > {allowed:.2e}, peer {peer:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("segments", [PACKED, FRAGMENTS], ids=["packed", "fragments"])
@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["random", "offset_keys"])
def test_value_and_gradients(dtype, segments, shift):
    check(inputs(segments, dtype=dtype, shift=shift), segments)


@pytest.mark.parametrize("n, g, d, i", [(1, 1, 64, 64), (12, 2, 16, 32), (5, 1, 32, 128), (16, 1, 128, 16)])
def test_shapes(n, g, d, i):
    segments = Segments.from_cu_seqlens([0, 40, 41, 70])
    check(inputs(segments, n=n, g=g, d=d, i=i), segments, scale=0.3)


def test_small_weights_survive_in_fp16():
    """Weights of 1e-8, as a loss over many rows has: the gradient of a weight of 1, scaled, when stored in fp32."""
    segments = Segments.from_cu_seqlens([0, 150])
    x = inputs(segments, dtype=torch.float16)
    from msa_pretrain.kernels.indexer_loss import dense_launch

    kernel = dense_launch.dense_kl_bwd_key
    results = []

    def record(*args):
        results.append(kernel(*args))
        return results[-1]

    dense_launch.dense_kl_bwd_key = record
    try:
        for weight in (1.0, 1e-8):
            run(x, segments, weights=torch.full((150, 2), weight))
    finally:
        dense_launch.dense_kl_bwd_key = kernel
    torch.testing.assert_close(results[1] * 1e8, results[0], rtol=1e-5, atol=1e-6)


def test_one_hot_teacher_and_flat_index():
    query, key = torch.ones(4, 1, 16), torch.zeros(4, 1, 16)
    key[0] = 50
    x = SimpleNamespace(index_query=torch.zeros(4, 1, 16), index_key=torch.ones(4, 16), query=query, key=key)
    result = run(x, Segments.from_cu_seqlens([0, 4]))
    expected = torch.tensor([0.0, math.log(2), math.log(3), math.log(4)])
    torch.testing.assert_close(result["kl"][:, 0], expected, rtol=0, atol=1e-6)
    assert result["kl"][0, 0] == 0 and result["kl"].mean().item() == pytest.approx(0.794513, abs=1e-6)


def test_rows_with_one_token_and_rows_in_no_document_are_exactly_zero():
    segments = Segments.from_cu_seqlens([0, 1, 2, 40], 43)
    result = run(inputs(segments), segments)
    zero_rows = [0, 1, 2, 40, 41, 42]
    for name in ("kl", "d_index_query"):
        is_zero = (result[name] == 0).flatten(1)
        assert is_zero[zero_rows].all() and not is_zero.all(1)[[3, 20, 39]].any(), name
    assert (result["d_index_key"][[0, 1, 40, 41, 42]] == 0).all()


def test_an_empty_batch():
    segments = Segments(rows=((0, 0, 0, 0),), num_queries=5, num_keys=4)
    result = run(inputs(segments), segments)
    assert all((tensor == 0).all() for tensor in result.values())


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poison_outside_the_documents_changes_nothing(poison):
    x = inputs(FRAGMENTS)
    _, lse = dense_attention(x.query, x.key, x.key, FRAGMENTS)
    weights = torch.rand(60, 2)
    clean = run(x, FRAGMENTS, weights=weights, lse=lse)
    padding = ~FRAGMENTS.query_mask("cpu")
    used = [row for _, _, start, length in FRAGMENTS.rows for row in range(start, start + length)]
    free = [row for row in range(180) if row not in used]
    for tensor in (x.index_query, x.query, lse, weights):
        tensor[padding] = poison
    x.index_key[free], x.key[free] = poison, poison
    poisoned = run(x, FRAGMENTS, weights=weights, lse=lse)
    for name in NAMES:
        assert torch.equal(clean[name], poisoned[name]), name


def test_strided_inputs_and_stride_0_gradients():
    segments = Segments.from_cu_seqlens([0, 50])
    x = inputs(segments)
    fused = torch.cat([x.query, x.key], dim=1).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    index = torch.cat([x.index_query, x.index_key[:, None]], dim=1).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    strided = SimpleNamespace(query=fused[:, :6], key=fused[:, 6:], index_query=index[:, :2], index_key=index[:, 2])
    _, lse = dense_attention(x.query, x.key, x.key, segments)
    lse_strided = lse.T.contiguous().T
    plain = run(x, segments, weights=torch.full((50, 2), 0.5), lse=lse)
    other = run(strided, segments, weights=torch.tensor(0.5).expand(50, 2), lse=lse_strided)
    for name in NAMES:
        torch.testing.assert_close(plain[name], other[name], rtol=0, atol=1e-6)


def test_future_tokens_change_no_past_row():
    segments = Segments.from_cu_seqlens([0, 140])
    x = inputs(segments)
    before = run(x, segments)
    x.key[130:] += 100
    x.index_key[130:] += 100
    after = run(x, segments, lse=dense_attention(x.query, x.key, x.key, segments)[1])
    for name in ("kl", "d_index_query"):
        assert torch.equal(before[name][:130], after[name][:130]) and not torch.equal(before[name], after[name])


def test_repeats_are_bit_equal():
    x = inputs(FRAGMENTS, dtype=torch.float16)
    first, second = (run(x, FRAGMENTS) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_only_the_index_inputs_get_gradients():
    segments = Segments.from_cu_seqlens([0, 20])
    x = inputs(segments)
    tensors = [t.requires_grad_() for t in (x.query, x.key, x.index_query, x.index_key)]
    _, lse = dense_attention(x.query, x.key, x.key, segments)
    kl = dense_indexer_kl(x.index_query, x.index_key, x.query, x.key, lse, segments, backend="triton")
    gradients = torch.autograd.grad(kl.sum(), tensors, allow_unused=True)
    assert gradients[:2] == (None, None) and all((gradient != 0).any() for gradient in gradients[2:])


def test_without_gradients_the_value_is_the_same():
    segments = Segments.from_cu_seqlens([0, 20])
    x = inputs(segments)
    _, lse = dense_attention(x.query, x.key, x.key, segments)
    kl = dense_indexer_kl(x.index_query, x.index_key, x.query, x.key, lse, segments, backend="triton")
    assert torch.equal(kl, run(x, segments)["kl"]) and not kl.requires_grad


def test_opcheck():
    ops = torch.ops.msa_pretrain
    calls = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.setdefault(func, args)
            return func(*args, **(kwargs or {}))

    segments = Segments.from_cu_seqlens([0, 25, 33], 40)
    with Record():
        run(inputs(segments), segments)
    forward = list(calls[ops.dense_indexer_kl.default])
    forward[0], forward[1] = forward[0].detach().requires_grad_(), forward[1].detach().requires_grad_()
    torch.library.opcheck(ops.dense_indexer_kl.default, forward)
    backward = [x.detach() if isinstance(x, torch.Tensor) else x for x in calls[ops.dense_indexer_kl_backward.default]]
    torch.library.opcheck(ops.dense_indexer_kl_backward.default, backward)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": torch.bfloat16}, r"got bfloat16 on the CPU, which Triton's interpreter computes wrongly"),
        ({"dtype": torch.float64}, r"supports float16, bfloat16 and float32; got torch.float64"),
        ({"i": 48}, r"supports an index dim of 16, 32, 64, 128; got 48"),
        ({"d": 80}, r"supports a head dim of 16, 32, 64, 128; got 80"),
        ({"n": 34}, r"supports n/g of 1, 2, .*, 16; got 17"),
    ],
)
def test_refusals(change, message):
    segments = Segments.from_cu_seqlens([0, 6])
    x = inputs(segments, **change)
    lse = torch.zeros(x.query.shape[:2])
    with pytest.raises(ValueError, match=message):
        run(x, segments, lse=lse)
