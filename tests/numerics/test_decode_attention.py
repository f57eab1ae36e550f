"""decode_attention: the reference against the training ops, Triton (interpreted on the CPU) against the reference."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msa_pretrain.kernels import Segments, decode_attention, select_blocks, sparse_attention

BACKENDS = ["reference", "triton"]
LENGTHS = [1, 0, 16, 17, 96, 127]


def inputs(lengths, *, capacity=130, dtype=torch.float32, n=6, g=2, d=32, i=16, integer=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    b = len(lengths)
    x = {
        "query": draw(b, n, d),
        "key_cache": draw(b, capacity, g, d),
        "value_cache": draw(b, capacity, g, d),
        "index_query": draw(b, g, i),
        "index_key_cache": draw(b, capacity, i),
    }
    if integer:
        x |= {name: (0.6 * x[name]).round() for name in ("index_query", "index_key_cache")}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    return SimpleNamespace(**x, cache_lengths=torch.tensor(lengths, dtype=torch.int32))


def run(x, *, block_size=16, k=3, init_blocks=0, backend="triton", scale=None):
    output, lse, ids = decode_attention(
        **vars(x),
        block_size=block_size,
        num_selected_blocks=k,
        init_blocks=init_blocks,
        softmax_scale=scale,
        backend=backend,
    )
    return SimpleNamespace(output=output, lse=lse, ids=ids)


def doubled(x):
    return SimpleNamespace(**{name: t.double() if t.is_floating_point() else t for name, t in vars(x).items()})


def assert_bit_equal(one, other):
    for name, tensor in vars(one).items():
        assert torch.equal(tensor, getattr(other, name)), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_last_rows_of_the_full_forward(backend):
    """One sequence, decoded at every length that crosses or touches a block border, and at a few others."""
    lengths = [1, 15, 16, 17, 48, 49, 100]
    generator = torch.Generator().manual_seed(0)
    query, key, value, index_query, index_key = (
        torch.randn(shape, generator=generator)
        for shape in ((100, 6, 32), (100, 2, 32), (100, 2, 32), (100, 2, 16), (100, 16))
    )
    segments = Segments.from_cu_seqlens([0, 100])
    ids, _ = select_blocks(index_query, index_key, segments, block_size=16, num_selected_blocks=3)
    output, lse = sparse_attention(query, key, value, ids, segments, block_size=16)
    rows = torch.tensor(lengths) - 1
    result = run(
        SimpleNamespace(
            query=query[rows],
            key_cache=key.expand(len(rows), -1, -1, -1),
            value_cache=value.expand(len(rows), -1, -1, -1),
            index_query=index_query[rows],
            index_key_cache=index_key.expand(len(rows), -1, -1),
            cache_lengths=rows + 1,
        ),
        backend=backend,
    )
    assert torch.equal(result.ids, ids[rows])
    torch.testing.assert_close(result.output, output[rows], rtol=0, atol=2e-6)  # measured 6e-7
    torch.testing.assert_close(result.lse, lse[rows], rtol=0, atol=2e-6)


# dtype, n, g, d, i, block size, k, init blocks
CASES = [
    (torch.float32, 6, 2, 32, 16, 16, 3, 0),
    (torch.float16, 5, 5, 64, 32, 16, 1, 0),
    (torch.float16, 16, 1, 16, 64, 32, 4, 1),
    (torch.float32, 4, 2, 128, 128, 64, 12, 2),
]


@pytest.mark.parametrize("dtype, n, g, d, i, block_size, k, init_blocks", CASES)
def test_integer_index_inputs_equal_the_reference(dtype, n, g, d, i, block_size, k, init_blocks):
    """Many ties; the same ids. Output and lse by the rule: error <= 2 x the reference's in the same dtype + floor."""
    x = inputs(LENGTHS, dtype=dtype, n=n, g=g, d=d, i=i, integer=True)
    arguments = {"block_size": block_size, "k": k, "init_blocks": init_blocks}
    ours, same = run(x, **arguments), run(x, **arguments, backend="reference")
    truth = run(doubled(x), **arguments, backend="reference")
    assert torch.equal(ours.ids, same.ids) and ours.output.dtype == dtype and ours.lse.dtype == torch.float32
    assert ours.lse[1].tolist() == [-math.inf] * n and (ours.output[1] == 0).all() and (ours.ids[1] == -1).all()
    some = [row for row, length in enumerate(LENGTHS) if length]
    for name in ("output", "lse"):
        actual, peer, expected = (getattr(y, name)[some].double() for y in (ours, same, truth))
        allowed = 2 * (peer - expected).abs().max() + 2e-7 * expected.abs().max()
        assert (actual - expected).abs().max() <= allowed, name


def test_all_scores_equal_keeps_lowest_ids():
    x = inputs([128], capacity=128)
    x.index_query[:] = 0
    assert run(x).ids[0].tolist() == [[0, 1, 7]] * 2


def test_more_blocks_than_one_program_ranks():
    """140 blocks: parts are scanned and ranked apart, then merged."""
    x = inputs([2240, 1], capacity=2240, integer=True, n=1, g=1)
    ours, theirs = run(x), run(x, backend="reference")
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.output, theirs.output, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poison_past_the_length_changes_nothing(poison, backend):
    x = inputs([1, 17, 0, 60], capacity=64)
    clean = run(x, backend=backend)
    for row, length in enumerate([1, 17, 0, 60]):
        for cache in (x.key_cache, x.value_cache, x.index_key_cache):
            cache[row, length:] = poison
    poisoned = run(x, backend=backend)
    assert all(
        torch.equal(one, other) for one, other in zip(vars(clean).values(), vars(poisoned).values(), strict=True)
    )


def test_poison_in_blocks_that_are_not_kept_changes_nothing():
    x = inputs([96], capacity=100)
    clean = run(x, k=2)
    for group in range(2):
        for block in set(range(6)) - set(clean.ids[0, group].tolist()):
            x.key_cache[0, 16 * block : 16 * block + 16, group] = math.nan
            x.value_cache[0, 16 * block : 16 * block + 16, group] = math.nan
    assert torch.equal(clean.output, run(x, k=2).output)


def test_strided_inputs():
    x = inputs([50, 33], capacity=60)
    plain = run(x)
    fused = torch.cat([x.key_cache, x.value_cache], dim=2).transpose(0, 1).contiguous().transpose(0, 1)
    x.key_cache, x.value_cache = fused[:, :, :2], fused[:, :, 2:]
    x.query = x.query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    x.index_key_cache = x.index_key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    strided = run(x)
    assert torch.equal(plain.ids, strided.ids)
    torch.testing.assert_close(plain.output, strided.output, rtol=0, atol=1e-6)


def test_repeats_are_bit_equal():
    x = inputs([60, 17], dtype=torch.float16)
    assert_bit_equal(run(x), run(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_finite_visible_score_is_reported(backend):
    x = inputs([20, 40], capacity=40)
    x.index_key_cache[1, 30] = math.inf
    with pytest.raises(ValueError, match=r"score of query row 1 .*is (not finite|-?inf|nan)"):
        run(x, backend=backend)


def test_opcheck():
    op, calls = torch.ops.msa_pretrain.decode_attention.default, []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Record():
        run(inputs([5, 20], capacity=20, n=1, g=1), k=2)
    (arguments,) = calls
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"backend": "cuda"}, r"backend 'cuda' does not exist for this op\. Use one of: reference, triton"),
        ({"key_cache": torch.zeros(1, 8, 2, 16)}, r"sizes must agree and g must divide n .* \(1, 8, 2, 16\)"),
        ({"query": torch.zeros(2, 4)}, r"the layout is query \[b, n, d\]"),
        ({"query": torch.zeros(2, 3, 16)}, r"sizes must agree and g must divide n"),
        ({"cache_lengths": torch.zeros(2)}, r"cache_lengths must be int32 or int64 \[b\] = \[2\]; got torch.float32"),
        ({"value_cache": torch.zeros(2, 8, 2, 16).half()}, r"value_cache is torch.float16 but query is torch.float32"),
        ({"block_size": 0}, r"block_size \(0\) must be at least 1"),
        ({"init_blocks": 2}, r"init_blocks \(2\) must lie in 0\.\.1"),
        ({"block_size": 24, "backend": "triton"}, r"supports a block_size of 16, 32, 64, 128; got 24"),
        ({"num_selected_blocks": 40, "backend": "triton"}, r"supports num_selected_blocks of .* 32; got 40"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "query": torch.zeros(2, 4, 16),
        "key_cache": torch.zeros(2, 8, 2, 16),
        "value_cache": torch.zeros(2, 8, 2, 16),
        "index_query": torch.zeros(2, 2, 16),
        "index_key_cache": torch.zeros(2, 8, 16),
        "cache_lengths": torch.tensor([8, 3]),
        "block_size": 16,
        "num_selected_blocks": 2,
    } | change
    with pytest.raises(ValueError, match=message):
        decode_attention(**arguments)
