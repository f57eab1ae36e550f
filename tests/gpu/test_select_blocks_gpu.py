"""select_blocks and decode_attention in Triton at real sizes, in 16 bits, on a GPU."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, decode_attention, raise_if_not_finite, select_blocks, sparse_attention

pytestmark = pytest.mark.gpu
LENGTHS = [1, 15, 16, 17, 0, 127, 128, 129, 507, 1021, 2048]
BORDERS = [sum(LENGTHS[:j]) for j in range(len(LENGTHS) + 1)]


def inputs(num_queries, num_keys, *, dtype=torch.bfloat16, g=4, i=128, integer=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    index_query = torch.randn(num_queries, g, i, generator=generator, device="cuda")
    index_key = torch.randn(num_keys, i, generator=generator, device="cuda")
    if integer:
        index_query, index_key = (0.6 * index_query).round(), (0.6 * index_key).round()
    return index_query.to(dtype), index_key.to(dtype)


def run(index_query, index_key, segments, *, block_size=128, k=16, init_blocks=0, backend="triton"):
    return select_blocks(
        index_query,
        index_key,
        segments,
        block_size=block_size,
        num_selected_blocks=k,
        init_blocks=init_blocks,
        backend=backend,
    )


def assert_lse_close(actual, expected):
    """Measured at most 2e-6 (fp32 sums of 2,048 terms in another order)."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=6e-6)


def assert_differ_at_the_cut_only(index_query, index_key, ours, theirs, block_size):
    """One document: a block that only one kept lies within 2 i 2^-24 sum|products| of the cut; under 1 row of 1,000."""
    rows, groups = (ours != theirs).any(2).nonzero(as_tuple=True)
    assert len(rows) <= ours.shape[0] * ours.shape[1] / 1000
    for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
        query = index_query[row, group].double()
        keys = index_key[: row + 1].double()
        scores, bounds = keys @ query, keys.abs() @ query.abs()
        padding = -(row + 1) % block_size
        pooled = torch.nn.functional.pad(scores, (0, padding), value=-math.inf).unflatten(0, (-1, block_size)).amax(1)
        mine, other = (set(ids[row, group].tolist()) - {-1} for ids in (ours, theirs))
        cut = min(pooled[block] for block in other - {row // block_size})
        for block in mine ^ other:
            assert abs(pooled[block] - cut) <= 2 * query.numel() * 2.0**-24 * bounds.max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "g, i, block_size, k, init_blocks",
    [(4, 128, 128, 16, 0), (8, 128, 128, 16, 1), (4, 64, 64, 5, 0), (1, 128, 64, 32, 3), (2, 64, 128, 1, 0)],
)
def test_packed_integer_inputs_equal_the_reference(dtype, g, i, block_size, k, init_blocks):
    segments = Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 9)
    x = inputs(segments.num_queries, segments.num_keys, dtype=dtype, g=g, i=i, integer=True)
    ours = run(*x, segments, block_size=block_size, k=k, init_blocks=init_blocks)
    theirs = run(*x, segments, block_size=block_size, k=k, init_blocks=init_blocks, backend="reference")
    assert torch.equal(ours[0], theirs[0])
    assert_lse_close(ours[1], theirs[1])
    raise_if_not_finite()


@pytest.mark.parametrize(
    "length, g, dtype", [(4096, 8, torch.bfloat16), (16384, 4, torch.bfloat16), (8192, 4, torch.float16)]
)
def test_real_inputs_differ_at_the_cut_only(length, g, dtype):
    x = inputs(length, length, dtype=dtype, g=g)
    segments = Segments.from_cu_seqlens([0, length])
    ours, theirs = run(*x, segments), run(*x, segments, backend="reference")
    assert_differ_at_the_cut_only(*x, ours[0], theirs[0], 128)
    assert_lse_close(ours[1], theirs[1])


def test_the_last_rows_of_64k_tokens():
    """As a fragment, which is bit-equal to the whole document, and against the reference."""
    index_query, index_key = inputs(65536, 65536)
    whole = run(index_query, index_key, Segments.from_cu_seqlens([0, 65536]))
    fragment = Segments(((0, 300, 0, 65536),), 300, 65536)
    part = run(index_query[-300:], index_key, fragment)
    assert torch.equal(whole[0][-300:], part[0]) and torch.equal(whole[1][-300:], part[1])
    theirs = run(index_query[-300:], index_key, fragment, backend="reference")
    assert (part[0] != theirs[0]).any(2).sum() <= 1
    assert_lse_close(part[1], theirs[1])


def test_packing_changes_no_bit():
    index_query, index_key = inputs(BORDERS[-1], BORDERS[-1])
    packed = run(index_query, index_key, Segments.from_cu_seqlens(BORDERS))
    for start, length in zip(BORDERS, LENGTHS, strict=False):
        rows = slice(start, start + length)
        solo = run(index_query[rows], index_key[rows], Segments.from_cu_seqlens([0, length]))
        assert torch.equal(packed[0][rows], solo[0]) and torch.equal(packed[1][rows], solo[1])


def test_score_chunks_change_no_bit(monkeypatch):
    from msa_pretrain.kernels.block_selection import launch

    x = inputs(8192, 8192)
    whole = run(*x, Segments.from_cu_seqlens([0, 3000, 8192]))
    monkeypatch.setattr(launch, "SCORE_BUFFER", 10**5)
    chunked = run(*x, Segments.from_cu_seqlens([0, 3000, 8192]))
    assert torch.equal(whole[0], chunked[0]) and torch.equal(whole[1], chunked[1])


def test_20_repeats_are_bit_equal():
    x = inputs(8192, 8192)
    segments = Segments.from_cu_seqlens([0, 1000, 8192])
    first = run(*x, segments)
    for _ in range(20):
        again = run(*x, segments)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_offsets_past_2_31():
    """A view of a 4 GiB buffer whose last rows start past 2^31 elements equals the same rows copied out."""
    buffer = torch.randn(2**31 + 2**21, device="cuda", dtype=torch.bfloat16)
    stride = 2**20
    rows = buffer.numel() // stride
    view = buffer.as_strided((rows, 1, 128), (stride, 128, 1))
    assert (rows - 1) * stride >= 2**31
    segments = Segments.from_cu_seqlens([0, rows])
    far, near = run(view, view[:, 0], segments), run(view.clone(), view[:, 0].clone(), segments)
    assert torch.equal(far[0], near[0]) and torch.equal(far[1], near[1])


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poison_in_padding_changes_nothing(poison):
    index_query, index_key = inputs(BORDERS[-1] + 300, BORDERS[-1] + 300)
    segments = Segments.from_cu_seqlens(BORDERS, BORDERS[-1] + 300)
    clean = run(index_query, index_key, segments)
    index_query[BORDERS[-1] :], index_key[BORDERS[-1] :] = poison, poison
    poisoned = run(index_query, index_key, segments)
    assert torch.equal(clean[0], poisoned[0]) and torch.equal(clean[1], poisoned[1])
    raise_if_not_finite()


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_non_finite_scores_are_reported_without_waiting(value):
    index_query, index_key = inputs(2048, 2048)
    index_key[1000], index_query[1500] = value, abs(value)
    segments = Segments.from_cu_seqlens([0, 2048])
    ids, _ = run(index_query, index_key, segments)
    assert (ids[:, :, 0] >= 0).all()
    with pytest.raises(ValueError, match=r"row \d+ is not finite"):
        raise_if_not_finite()
    run(index_query[:900], index_key[:900], Segments.from_cu_seqlens([0, 900]))
    raise_if_not_finite()
    run(index_query, index_key, segments)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="is not finite"):
        run(index_query[:900], index_key[:900], Segments.from_cu_seqlens([0, 900]))


def test_a_call_does_not_synchronise():
    x = inputs(4096, 4096)
    segments = Segments.from_cu_seqlens([0, 4096])
    run(*x, segments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*x, segments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_equals_the_full_forward(n, g, dtype):
    length, lengths = 4200, torch.tensor([1, 127, 128, 129, 2048, 2049, 4096, 4097, 4200])
    draw = lambda *shape: torch.randn(shape, device="cuda").to(dtype)  # noqa: E731
    query, key, value = draw(length, n, 128), draw(length, g, 128), draw(length, g, 128)
    index_query, index_key = inputs(length, length, dtype=dtype, g=g, integer=True)
    segments = Segments.from_cu_seqlens([0, length])
    ids, _ = run(index_query, index_key, segments)
    rows = lengths.cuda() - 1
    part = Segments(tuple((j, 1, 0, size) for j, size in enumerate(lengths.tolist())), len(lengths), length)
    truth, lse = sparse_attention(query[rows].double(), key.double(), value.double(), ids[rows], part, block_size=128)
    peer, _ = sparse_attention(query[rows], key, value, ids[rows], part, block_size=128)
    expand = lambda x: x.expand(len(lengths), *x.shape)  # noqa: E731
    output, decode_lse, decode_ids = decode_attention(
        query[rows], expand(key), expand(value), index_query[rows], expand(index_key), lengths.cuda(),
        block_size=128, num_selected_blocks=16, backend="triton",
    )  # fmt: skip
    assert torch.equal(decode_ids, ids[rows])
    assert (output - truth).abs().max() <= 2 * (peer - truth).abs().max() + 1e-6
    torch.testing.assert_close(decode_lse.double(), lse, rtol=0, atol=4e-6)


def test_decode_in_a_cuda_graph_serves_other_lengths():
    capacity = 8192
    draw = lambda *shape: torch.randn(shape, device="cuda").bfloat16()  # noqa: E731
    x = (
        draw(2, 64, 128),
        draw(2, capacity, 4, 128),
        draw(2, capacity, 4, 128),
        draw(2, 4, 128),
        draw(2, capacity, 128),
    )
    lengths = torch.tensor([100, 8192], device="cuda", dtype=torch.int32)
    call = lambda: decode_attention(*x, lengths, block_size=128, num_selected_blocks=16, backend="triton")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for values in ([1, 5000], [8192, 0], [129, 128]):
        lengths.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(captured, call(), strict=True))
