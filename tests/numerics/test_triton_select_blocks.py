"""select_blocks in Triton (interpreted on the CPU) against the reference."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from msa_pretrain.kernels import Segments, raise_if_not_finite, select_blocks

LENGTHS = [1, 15, 16, 17, 0, 127, 128, 129]
BORDERS = [sum(LENGTHS[:j]) for j in range(len(LENGTHS) + 1)]
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (30, 9, 3, 98), (57, 0, 118, 0), (58, 1, 130, 49)), 60, 180)


def inputs(num_queries, num_keys, *, dtype=torch.float32, g=2, i=16, integer=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    index_query = torch.randn(num_queries, g, i, generator=generator)
    index_key = torch.randn(num_keys, i, generator=generator)
    if integer:
        index_query, index_key = (0.6 * index_query).round(), (0.6 * index_key).round()
    return index_query.to(dtype), index_key.to(dtype)


def run(index_query, index_key, segments, *, block_size=16, k=4, init_blocks=0, backend="triton"):
    ids, lse = select_blocks(
        index_query,
        index_key,
        segments,
        block_size=block_size,
        num_selected_blocks=k,
        init_blocks=init_blocks,
        backend=backend,
    )
    return SimpleNamespace(ids=ids, lse=lse)


def one_group(scores, *, query_row):
    """Inputs of one document in which the query at `query_row` scores each key as listed."""
    index_query = torch.zeros(len(scores), 1, 16)
    index_query[query_row, 0, 0] = 1
    index_key = torch.zeros(len(scores), 16)
    index_key[:, 0] = torch.tensor(scores)
    return index_query, index_key, Segments.from_cu_seqlens([0, len(scores)])


def by_block(*scores):
    """One score a block of 16 tokens."""
    return [score for score in scores for _ in range(16)]


def assert_same(actual, expected, atol=2e-6):
    assert torch.equal(actual.ids, expected.ids)
    torch.testing.assert_close(actual.lse, expected.lse, rtol=0, atol=atol)


# dtype, g, i, block size, k, init blocks: every index dim and block size; k below, at and between powers of two.
CASES = [
    (torch.float32, 1, 16, 32, 1, 0),
    (torch.float16, 2, 64, 16, 3, 1),
    (torch.float32, 3, 32, 32, 5, 2),
    (torch.float16, 2, 128, 64, 2, 0),
    (torch.float32, 1, 64, 128, 32, 3),
]


@pytest.mark.parametrize("dtype, g, i, block_size, k, init_blocks", CASES)
def test_integer_inputs_equal_the_reference(g, i, block_size, k, init_blocks, dtype):
    """Exact sums and many ties: the same ids; packed documents of awkward lengths, one empty, and padding."""
    segments = Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 5)
    x = inputs(segments.num_queries, segments.num_keys, dtype=dtype, g=g, i=i, integer=True)
    kwargs = {"block_size": block_size, "k": k, "init_blocks": init_blocks}
    assert_same(run(*x, segments, **kwargs), run(*x, segments, **kwargs, backend="reference"))


def test_fragments_with_nested_key_ranges():
    x = inputs(60, 180, integer=True)
    assert_same(run(*x, FRAGMENTS), run(*x, FRAGMENTS, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_real_inputs_differ_at_the_cut_only(dtype):
    """A block that one kept and the other not lies within 2 i 2^-24 sum|products| of the cut."""
    index_query, index_key = inputs(300, 300, dtype=dtype, g=1, i=64)
    segments = Segments.from_cu_seqlens([0, 300])
    ours, theirs = (run(index_query, index_key, segments, backend=backend) for backend in ("triton", "reference"))
    scores = torch.einsum("tgi,ji->tgj", index_query.double(), index_key.double())
    magnitudes = torch.einsum("tgi,ji->tgj", index_query.double().abs(), index_key.double().abs())
    scores, magnitudes = (F.pad(x, (0, 4)) for x in (scores, magnitudes))
    scores = scores.masked_fill(torch.arange(304) > torch.arange(300)[:, None, None], -math.inf)
    pooled, bound = (x.unflatten(2, (-1, 16)).amax(3) for x in (scores, magnitudes))
    rows, groups = (ours.ids != theirs.ids).any(2).nonzero(as_tuple=True)
    assert len(rows) <= 300 / 1000
    for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
        mine, other = (set(x.ids[row, group].tolist()) - {-1} for x in (ours, theirs))
        cut = min(pooled[row, group, b] for b in other - {row // 16})
        for block in mine ^ other:
            assert abs(pooled[row, group, block] - cut) <= 2 * 64 * 2.0**-24 * bound[row, group].max()
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=0, atol=2e-6)  # measured 5e-7


def test_each_document_keeps_the_blocks_of_its_solo_run():
    """The lse may round differently here: the interpreter's matrix products depend on a row's place in the tile."""
    lengths = [1, 127, 3, 0, 65]
    borders = [sum(lengths[:j]) for j in range(len(lengths) + 1)]
    index_query, index_key = inputs(borders[-1], borders[-1])
    packed = run(index_query, index_key, Segments.from_cu_seqlens(borders), block_size=32, k=2)
    for start, length in zip(borders, lengths, strict=False):
        rows = slice(start, start + length)
        solo = run(index_query[rows], index_key[rows], Segments.from_cu_seqlens([0, length]), block_size=32, k=2)
        assert_same(SimpleNamespace(ids=packed.ids[rows], lse=packed.lse[rows]), solo, atol=1e-6)
        if length:
            part = Segments(rows=((0, 1, start, length),), num_queries=1, num_keys=borders[-1])
            last = run(index_query[start + length - 1 : start + length], index_key, part, block_size=32, k=2)
            row = slice(start + length - 1, start + length)
            assert_same(SimpleNamespace(ids=packed.ids[row], lse=packed.lse[row]), last, atol=1e-6)


def test_score_chunks_change_nothing(monkeypatch):
    from msa_pretrain.kernels.block_selection import launch

    x = inputs(300, 300)
    whole = run(*x, Segments.from_cu_seqlens([0, 170, 300]), block_size=64, k=2)
    monkeypatch.setattr(launch, "SCORE_BUFFER", 1500)
    chunked = run(*x, Segments.from_cu_seqlens([0, 170, 300]), block_size=64, k=2)
    assert torch.equal(whole.ids, chunked.ids) and torch.equal(whole.lse, chunked.lse)


def test_repeats_are_bit_equal():
    x = inputs(100, 100, dtype=torch.float16)
    first, second = (run(*x, Segments.from_cu_seqlens([0, 100])) for _ in range(2))
    assert torch.equal(first.ids, second.ids) and torch.equal(first.lse, second.lse)


def test_all_scores_equal_keeps_lowest_ids():
    ids = run(*one_group(by_block(*[0.0] * 8), query_row=127), k=3).ids
    assert ids[127, 0].tolist() == [0, 1, 7]


def test_scores_closer_than_bf16_are_told_apart():
    ids = run(*one_group(by_block(10.01, 10.02, 10.03, 10.04, 0.0), query_row=79), k=3).ids
    assert ids[79, 0].tolist() == [2, 3, 4]


def test_negative_zero_equals_positive_zero():
    ids = run(*one_group(by_block(-0.0, 0.0, -0.0, 0.0, 0.0), query_row=79), k=3).ids
    assert ids[79, 0].tolist() == [0, 1, 4]


def test_half_filled_block_takes_no_padding():
    """The local block scores -2 and is kept anyway; of the others, -1 beats -3."""
    scores = [*by_block(-3.0, -1.0, -3.0), -5.0, -2.0]
    assert run(*one_group(scores, query_row=49), k=2).ids[49, 0].tolist() == [1, 3]


def test_short_document_pads_with_minus_one():
    index_query, index_key, segments = one_group([1.0, 2.0, 3.0], query_row=2)
    result = run(index_query, index_key, segments, block_size=128, k=16)
    assert result.ids[:, 0].tolist() == [[0] + [-1] * 15] * 3
    assert result.lse[2, 0].item() == pytest.approx(math.log(sum(math.exp(s / 4) for s in (1, 2, 3))), abs=1e-6)


def test_local_block_with_the_top_score_is_counted_once():
    ids = run(*one_group(by_block(3.0, 1.0, 2.0, 9.0), query_row=63), k=3).ids
    assert ids[63, 0].tolist() == [0, 2, 3]


def test_init_blocks_come_after_the_local_block_and_before_the_scores():
    x = one_group(by_block(-9.0, -8.0, 5.0, 7.0, 6.0, 0.0), query_row=95)
    for init_blocks, expected in enumerate(([3, 4, 5], [0, 3, 5], [0, 1, 5])):
        assert run(*x, k=3, init_blocks=init_blocks).ids[95, 0].tolist() == expected


def test_one_block_means_the_local_block():
    ids = run(*inputs(70, 70), Segments.from_cu_seqlens([0, 70]), k=1).ids
    assert ids[:, :, 0].T.tolist() == [[t // 16 for t in range(70)]] * 2


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poison_outside_the_documents_changes_nothing(poison):
    index_query, index_key = inputs(60, 180)
    clean = run(index_query, index_key, FRAGMENTS)
    used = [row for _, _, start, length in FRAGMENTS.rows for row in range(start, start + length)]
    index_query[~FRAGMENTS.query_mask("cpu")] = poison
    index_key[[row for row in range(180) if row not in used]] = poison
    poisoned = run(index_query, index_key, FRAGMENTS)
    assert torch.equal(clean.ids, poisoned.ids) and torch.equal(clean.lse, poisoned.lse)


def test_rows_in_no_document_and_empty_batches():
    index_query, index_key = inputs(9, 9)
    result = run(index_query, index_key, Segments.from_cu_seqlens([0, 7], 9))
    assert (result.ids[7:] == -1).all() and (result.lse[7:] == -math.inf).all() and result.lse[:7].isfinite().all()
    nothing = run(index_query, index_key, Segments(rows=(), num_queries=9, num_keys=9))
    assert (nothing.ids == -1).all() and (nothing.lse == -math.inf).all()


def test_strided_inputs():
    index_query, index_key = inputs(50, 50)
    segments = Segments.from_cu_seqlens([0, 50])
    fused = torch.cat([index_query, index_key[:, None]], dim=1).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strided, plain = run(fused[:, :2], fused[:, 2], segments), run(index_query, index_key, segments)
    assert torch.equal(strided.ids, plain.ids) and torch.equal(strided.lse, plain.lse)


@pytest.mark.parametrize(
    "where, value, message",
    [
        ("index_query", math.nan, r"index_query row 21 is not finite"),
        ("index_key", -math.inf, r"index_key row 21 is not finite"),
        ("both", 3e19, r"a score of query row 21 is not finite"),
        ("both", -3e19, r"a score of query row 21 is not finite"),
    ],
)
def test_non_finite_visible_score_is_reported_once(where, value, message):
    index_query, index_key = inputs(40, 40)
    if where in ("index_query", "both"):
        index_query[21] = abs(value)
    if where in ("index_key", "both"):
        index_key[21] = value
    segments = Segments.from_cu_seqlens([0, 22, 40])
    with pytest.raises(ValueError, match=message):
        run(index_query, index_key, segments)
    raise_if_not_finite()
    run(*inputs(40, 40), segments)


def test_future_non_finite_key_is_not_reported():
    index_query, index_key = inputs(40, 40)
    index_key[30:] = math.nan
    assert (run(index_query, index_key, Segments(((0, 30, 0, 30),), 40, 40)).ids[:30, 0, 0] == 0).all()


def test_opcheck():
    from msa_pretrain.kernels.block_selection.launch import select_blocks_triton

    index_query, index_key = inputs(40, 40, g=1)
    calls = []
    op = torch.ops.msa_pretrain.select_blocks.default

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Record():
        segments = Segments.from_cu_seqlens([0, 25, 33], 40)
        select_blocks_triton(index_query, index_key, segments, block_size=16, num_selected_blocks=2, init_blocks=0)
    (arguments,) = calls
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": torch.bfloat16}, r"got bfloat16 on the CPU, which Triton's interpreter computes wrongly"),
        ({"dtype": torch.float64}, r"supports float16, bfloat16 and float32; got torch.float64"),
        ({"i": 48}, r"supports an index dim of 16, 32, 64, 128; got 48"),
        ({"block_size": 24}, r"supports a block_size of 16, 32, 64, 128; got 24"),
        ({"k": 33}, r"supports num_selected_blocks of 1, 2, .*, 32; got 33"),
    ],
)
def test_refusals(change, message):
    arguments = {"dtype": torch.float32, "i": 16, "block_size": 16, "k": 2} | change
    x = inputs(6, 6, dtype=arguments["dtype"], i=arguments["i"])
    with pytest.raises(ValueError, match=message):
        run(*x, Segments.from_cu_seqlens([0, 6]), block_size=arguments["block_size"], k=arguments["k"])


@pytest.mark.parametrize(
    "segments", [Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 3), FRAGMENTS], ids=["whole", "pieces"]
)
@pytest.mark.parametrize("k", [9, 12, 32])
def test_documents_that_keep_all_their_blocks_are_not_ranked(segments, k, monkeypatch):
    """Up to 9 blocks of 16 tokens, with the first k that fits and one between powers of two."""
    from msa_pretrain.kernels.block_selection import kernel

    index = inputs(segments.num_queries, 180 if segments is FRAGMENTS else segments.num_queries)
    expected = run(*index, segments, k=k, init_blocks=1, backend="reference")
    monkeypatch.setattr(kernel, "_rank_blocks_kernel", None)
    assert_same(run(*index, segments, k=k, init_blocks=1), expected)
