"""sparse_attention in Triton (interpreted on the CPU) against the reference, and the properties of its contract."""

import math
from types import SimpleNamespace

import pytest
import torch

from msa_pretrain.kernels import Segments, dense_attention, sparse_attention
from msa_pretrain.kernels.block_sparse_attention import launch
from msa_pretrain.kernels.block_sparse_attention.launch import sparse_attention_triton
from msa_pretrain.kernels.block_sparse_attention.reverse_index import document_tables
from msa_pretrain.kernels.dense_causal_attention.library import dense_tables

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKED = Segments.from_cu_seqlens([0, 1, 16, 16, 33, 73], 76)
# Two nested ranges of one document whose keys start at row 3, a padding row between, another document.
FRAGMENTS = Segments(((40, 17, 101, 17), (0, 30, 3, 60), (31, 9, 3, 98)), 57, 118)
LENGTHS = Segments.from_cu_seqlens([0, 1, 16, 32, 49, 176, 304, 433])


def random_ids(segments, num_groups, block_size, k, seed=0):
    """The local block and random others, as select_blocks gives them."""
    generator = torch.Generator().manual_seed(seed)
    local = torch.where(segments.query_mask("cpu"), segments.positions("cpu") // block_size, -1)[:, None, None]
    num_blocks = max(1, -(-segments.max_k_len // block_size))
    block = torch.arange(num_blocks)
    score = torch.rand(segments.num_queries, num_groups, num_blocks, generator=generator)
    score = score.masked_fill(block > local, -1.0).masked_fill(block == local, 2.0)
    best = score.topk(min(k, num_blocks), dim=2)
    ids = best.indices.masked_fill(best.values < 0, num_blocks).sort(dim=2).values
    ids = torch.nn.functional.pad(ids, (0, k - ids.shape[2]), value=num_blocks)
    return ids.masked_fill(ids == num_blocks, -1).to(torch.int32)


def inputs(segments, *, n, g, d, dtype, kind="random", block_size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(segments.num_queries, n, d, generator=generator)
    key, value = (torch.randn(segments.num_keys, g, d, generator=generator) for _ in range(2))
    grad = torch.randn(segments.num_queries, n, d, generator=generator)
    if kind == "offset":  # every key has mean 3 sigma
        key += 3.0 * torch.randn(1, g, d, generator=generator).sign()
    elif kind == "blocks":  # keys and values of a block resemble each other
        for tensor in (key, value):
            block = torch.randn(1 + segments.num_keys // block_size, g, d, generator=generator)
            tensor += 2.0 * block.repeat_interleave(block_size, 0)[: segments.num_keys]
    tensors = {"query": query, "key": key, "value": value}
    x = SimpleNamespace(**{name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()})
    x.grad = grad.to(dtype)
    return x


def run(function, x):
    output, lse = function(x.query, x.key, x.value)
    assert not lse.requires_grad
    gradients = torch.autograd.grad(output, (x.query, x.key, x.value), x.grad)
    return dict(zip(("output", "lse", "d_query", "d_key", "d_value"), (output.detach(), lse, *gradients), strict=True))


QUERY_TILES = 10**6
"""A limit that no document is past: all take the query tiles in forward."""


def triton_op(ids, segments, block_size, query_chunk=16384, scale=None, dense_up_to=0, query_tile_up_to=0):
    def attend(query, key, value):
        return sparse_attention_triton(
            query, key, value, ids, segments, block_size=block_size, dense_up_to=dense_up_to,
            softmax_scale=scale or query.shape[2] ** -0.5, query_chunk=query_chunk, query_tile_up_to=query_tile_up_to,
        )  # fmt: skip

    return attend


def reference_op(ids, segments, block_size, scale=None):
    return lambda *qkv: sparse_attention(*qkv, ids, segments, block_size=block_size, softmax_scale=scale)


def eager_op(ids, segments, block_size):
    """Plain PyTorch in the dtype of the inputs, one fragment at a time: scores, softmax, product."""

    def attend(query, key, value):
        heads = query.shape[1] // key.shape[1]
        output = torch.zeros_like(query)
        for q_start, q_len, k_start, k_len in segments.rows:
            q = query[q_start : q_start + q_len]
            k, v = (x[k_start : k_start + k_len].repeat_interleave(heads, dim=1) for x in (key, value))
            position = torch.arange(k_len - q_len, k_len)[:, None]
            token = torch.arange(k_len)
            kept = (ids[q_start : q_start + q_len, :, :, None] == token // block_size).any(dim=2)
            kept = (kept & (token <= position)[:, None]).repeat_interleave(heads, dim=1).transpose(0, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * query.shape[2] ** -0.5
            probs = scores.masked_fill(~kept, -math.inf).softmax(dim=2)
            output = torch.cat([output[:q_start], torch.einsum("hqk,khd->qhd", probs, v), output[q_start + q_len :]])
        return output, reference_op(ids, segments, block_size)(query, key, value)[1]

    return attend


def as_double(x):
    tensors = {name: tensor.detach().double() for name, tensor in vars(x).items()}
    for name in ("query", "key", "value"):
        tensors[name].requires_grad_()
    return SimpleNamespace(**tensors)


def assert_within_rule(actual, same, truth, floor):
    """At most twice the error of PyTorch on the same inputs, plus `floor` of the largest number."""
    for name, exact in truth.items():
        kept = exact.isfinite()
        assert torch.equal(actual[name].isfinite(), kept), name
        size = exact[kept].abs().max().clamp(min=1e-3)
        for norm in (math.inf, 2):
            error, allowed = (
                torch.linalg.vector_norm(result[name][kept].double() - exact[kept], norm) for result in (actual, same)
            )
            count = 1 if norm == math.inf else exact[kept].numel() ** 0.5
            assert error <= 2 * allowed + floor * size * count, f"{name}: {error:.2e} > 2 x {allowed:.2e} (norm {norm})"


def assert_same_bits(actual, expected):
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


# g, n/g, d, block size, k, queries a chunk: n/g and k below, at and between powers of two; every size once.
SHAPES = {
    "heads16": (1, 16, 16, 16, 4, 16384),
    "heads6": (2, 6, 16, 16, 3, 29),
    "heads1": (3, 1, 32, 16, 1, 16384),
    "heads5": (1, 5, 64, 32, 2, 33),
    "wide": (1, 2, 128, 64, 2, 16384),
}


# The floor, of the largest number, is a few roundings of fp32: the lse and fp32 sums go in another order.
@pytest.mark.parametrize(
    "shape, kind, layout, dtype, query_tile_up_to",
    [
        ("heads16", "random", PACKED, torch.float16, 0),
        ("heads6", "offset", FRAGMENTS, torch.float16, 0),
        ("heads6", "blocks", FRAGMENTS, torch.float32, 0),
        ("heads1", "blocks", FRAGMENTS, torch.float16, 0),
        ("heads5", "offset", PACKED, torch.float32, 0),
        ("wide", "random", PACKED, torch.float16, 0),
        ("heads16", "random", FRAGMENTS, torch.float16, QUERY_TILES),
        ("heads6", "blocks", FRAGMENTS, torch.float32, QUERY_TILES),
        ("heads6", "offset", PACKED, torch.float16, QUERY_TILES),
        ("heads1", "blocks", PACKED, torch.float16, QUERY_TILES),
        ("wide", "random", PACKED, torch.float32, QUERY_TILES),
    ],
    ids=lambda value: "" if isinstance(value, Segments) else str(value),
)
def test_error_is_at_most_twice_that_of_plain_pytorch(shape, kind, layout, dtype, query_tile_up_to):
    g, heads, d, block_size, k, query_chunk = SHAPES[shape]
    x = inputs(layout, n=g * heads, g=g, d=d, dtype=dtype, kind=kind, block_size=block_size)
    ids = random_ids(layout, g, block_size, k)
    actual = run(triton_op(ids, layout, block_size, query_chunk, query_tile_up_to=query_tile_up_to), x)
    same = run(eager_op(ids, layout, block_size), x)
    truth = run(reference_op(ids, layout, block_size), as_double(x))
    assert actual["output"].dtype == dtype and actual["lse"].dtype == torch.float32
    assert_within_rule(actual, same, truth, floor=4e-7)


def test_lengths_around_a_block_of_128():
    """Documents of 1, 15, 16, 17, 127, 128 and 129 tokens; rows of a block cut in items of 64."""
    x = inputs(LENGTHS, n=2, g=1, d=16, dtype=torch.float32)
    ids = random_ids(LENGTHS, 1, 128, 2)
    actual = run(triton_op(ids, LENGTHS, 128, scale=0.3), x)
    same = run(reference_op(ids, LENGTHS, 128, scale=0.3), x)
    assert_within_rule(actual, same, run(reference_op(ids, LENGTHS, 128, scale=0.3), as_double(x)), 4e-7)


def test_all_blocks_equal_dense_and_one_block_is_block_diagonal():
    segments = Segments.from_cu_seqlens([0, 56])
    diagonal = Segments.from_cu_seqlens([0, 16, 32, 48, 56])
    x = inputs(segments, n=3, g=1, d=16, dtype=torch.float32)
    for k, documents in ((4, segments), (1, diagonal)):
        ids = random_ids(segments, 1, 16, k)
        sparse = run(triton_op(ids, segments, 16), x)
        dense = run(lambda *qkv, documents=documents: dense_attention(*qkv, documents), x)
        for name, expected in dense.items():
            torch.testing.assert_close(sparse[name], expected, rtol=0, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", ["documents", "nested ranges"])
def test_a_route_changes_no_result(layout):
    """Documents on both sides of k * l = 32 and of 64 tokens, padding; nested ranges of one document on all routes."""
    segments = Segments.from_cu_seqlens([0, 31, 63, 63, 96, 97, 161, 226], 228)
    if layout == "nested ranges":
        segments = Segments(((20, 20, 2, 70), (41, 12, 2, 50), (0, 18, 2, 30), (53, 5, 80, 5)), 59, 90)
    x = inputs(segments, n=6, g=2, d=16, dtype=torch.float32)
    ids = random_ids(segments, 2, 16, 2)

    def routed(dense_up_to, query_tile_up_to):
        return run(triton_op(ids, segments, 16, dense_up_to=dense_up_to, query_tile_up_to=query_tile_up_to), x)

    sparse = routed(0, 0)
    for limits in ((32, 0), (0, 64), (32, 64), (0, QUERY_TILES)):
        mixed = routed(*limits)
        for name, expected in sparse.items():
            torch.testing.assert_close(
                mixed[name], expected, rtol=0, atol=5e-6, msg=lambda m, at=(limits, name): f"{at}: {m}"
            )
        if layout == "documents":
            # Nested ranges share tiles, and in the interpreter a product depends on a row's place in its tile.
            long = segments.split_at(max(limits))[1].query_mask("cpu")
            for name in ("output", "lse"):
                assert torch.equal(mixed[name][long], sparse[name][long]), name
            long = segments.split_at(limits[0])[1].query_mask("cpu")
            assert limits[1] or torch.equal(mixed["d_query"][long], sparse["d_query"][long])
        if all(limits):
            assert_same_bits(routed(*limits), mixed)


def test_documents_of_a_route_that_is_not_taken_cost_nothing(monkeypatch):
    """Each document goes through one forward: a route without documents launches nothing."""
    taken = []
    for name in ("_sparse_forward", "query_tile_forward"):
        function = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *a, f=function, n=name, **k: (taken.append(n), f(*a, **k)))
    segments = Segments.from_cu_seqlens([0, 40, 60])
    x = inputs(segments, n=2, g=1, d=16, dtype=torch.float32)
    ids = random_ids(segments, 1, 16, 2)
    expected = {0: ["_sparse_forward"], 20: ["_sparse_forward", "query_tile_forward"], 40: ["query_tile_forward"]}
    for limit, names in expected.items():
        taken.clear()
        triton_op(ids, segments, 16, query_tile_up_to=limit)(x.query, x.key, x.value)
        assert taken == names, limit


def test_a_batch_of_one_short_document_is_dense_attention():
    segments = Segments.from_cu_seqlens([0, 30])
    x = inputs(segments, n=6, g=2, d=16, dtype=torch.float32)
    ids = random_ids(segments, 2, 16, 2)
    sparse = run(triton_op(ids, segments, 16, dense_up_to=32), x)
    for name, expected in run(lambda *qkv: dense_attention(*qkv, segments), x).items():
        assert sparse[name].is_contiguous()
        # autograd sums the gradients of the reference in another order
        tolerance = 3e-6 if name.startswith("d_") else 0.0
        torch.testing.assert_close(sparse[name], expected, rtol=0, atol=tolerance)


def test_dense_route_longer_than_the_kept_blocks_is_refused():
    segments = Segments.from_cu_seqlens([0, 40])
    x = inputs(segments, n=2, g=1, d=16, dtype=torch.float32)
    ids = random_ids(segments, 1, 16, 2)
    with pytest.raises(ValueError, match=r"dense_up_to \(33\) must be at least 0 and at most k x block_size \(32\)"):
        sparse_attention(x.query, x.key, x.value, ids, segments, block_size=16, dense_up_to=33)


@pytest.mark.parametrize("query_tile_up_to", [0, QUERY_TILES])
def test_views_strides_and_expanded_gradients_change_no_bit(query_tile_up_to):
    """Slices of one fused tensor, a transposed query, a gradient with stride 0; three runs, so also determinism."""
    segments = Segments.from_cu_seqlens([0, 37])
    ids = random_ids(segments, 2, 16, 2)
    fused = torch.randn(37, 3, 4, 16, generator=torch.Generator().manual_seed(1))
    attend = triton_op(ids, segments, 16, 20, query_tile_up_to=query_tile_up_to)

    def results(query, key, value, grad):
        x = SimpleNamespace(query=query, key=key, value=value, grad=grad)
        for name in ("query", "key", "value"):
            setattr(x, name, getattr(x, name).detach().requires_grad_())
        return run(attend, x)

    query, key, value = fused[:, 0], fused[:, 1, ::2], fused[:, 2, 1:3]
    plain = results(query.contiguous(), key.contiguous(), value.contiguous(), torch.full((37, 4, 16), 0.5))
    views = results(query, key, value, torch.full((1, 1, 1), 0.5).expand(37, 4, 16))
    column = query.permute(0, 2, 1).contiguous().permute(0, 2, 1)  # last dimension not dense
    strided = results(column, key, value, torch.full((37, 4, 32), 0.5)[:, :, ::2])
    assert_same_bits(views, plain)
    assert_same_bits(strided, plain)


@pytest.mark.parametrize("poison, query_tile_up_to", [(math.nan, 0), (1e30, 0), (math.nan, 20), (1e30, QUERY_TILES)])
def test_padding_and_blocks_that_nobody_kept_are_never_read(poison, query_tile_up_to):
    segments = Segments(((0, 40, 2, 40), (41, 8, 60, 8)), 52, 70)
    ids = random_ids(segments, 1, 16, 2)
    ids[:40][ids[:40] == 1] = -1
    ids = torch.where(ids < 0, 99, ids).sort(dim=2).values.to(torch.int32)
    ids = ids.masked_fill(ids == 99, -1)
    clean = inputs(segments, n=3, g=1, d=16, dtype=torch.float32)
    dirty = inputs(segments, n=3, g=1, d=16, dtype=torch.float32)
    rows = [*range(2), *range(18, 34), *range(42, 60), *range(68, 70)]
    with torch.no_grad():
        for x, fill in ((clean, 0.0), (dirty, poison)):
            x.key[rows] = x.value[rows] = fill
            for padding in (slice(40, 41), slice(49, 52)):
                x.query[padding] = x.grad[padding] = fill
    attend = triton_op(ids, segments, 16, 24, query_tile_up_to=query_tile_up_to)
    expected, actual = run(attend, clean), run(attend, dirty)
    assert_same_bits(actual, expected)
    assert (actual["d_key"][rows] == 0).all() and (actual["lse"][40] == -math.inf).all()
    for name in ("output", "d_query"):
        assert (actual[name][[40, 49, 50, 51]] == 0).all() and actual[name].isfinite().all(), name
    # Queries 16 to 31 kept only block 0 (some) or nothing (rows that had only their own block).
    nothing = (ids[:, 0] < 0).all(dim=1)
    assert (actual["output"][nothing] == 0).all() and (actual["lse"][nothing] == -math.inf).all()


def test_a_batch_without_documents():
    segments = Segments.from_cu_seqlens([0], 4)
    x = inputs(segments, n=2, g=1, d=16, dtype=torch.float32)
    ids = torch.full((4, 1, 3), -1, dtype=torch.int32)
    result = run(lambda *qkv: sparse_attention(*qkv, ids, segments, block_size=16, backend="triton"), x)
    assert (result.pop("lse") == -math.inf).all()
    assert all((tensor == 0).all() for tensor in result.values())


def test_opcheck():
    segments = Segments.from_cu_seqlens([0, 20, 32], 33)
    x = inputs(segments, n=2, g=1, d=16, dtype=torch.float32)
    ids = random_ids(segments, 1, 16, 2)
    short, long = segments.split_at(16)
    cpu = torch.device("cpu")
    tables = (*document_tables(long, 16, cpu), *dense_tables(short, cpu))
    forward_tables = (*document_tables(long, 16, cpu), torch.empty(0, 4, dtype=torch.int64))
    arguments = (x.query, x.key, x.value, ids, *tables, *forward_tables, 16, 0.25, 16384, 0, False)
    torch.library.opcheck(torch.ops.msa_pretrain.sparse_attention.default, arguments)


REFUSALS = [
    ({"block_size": 24}, "supports block_size 16, 32, 64, 128; got 24"),
    ({"d": 80}, "supports head dim 16, 32, 64, 128; got 80"),
    ({"n": 17}, "supports query heads per KV group 1, .*; got 17"),
    ({"k": 33}, "supports number of kept blocks 1, .*; got 33"),
    ({"dtype": torch.float64}, "supports float16, bfloat16 and float32; got torch.float64"),
    ({"dtype": torch.bfloat16}, "bfloat16 on the CPU"),
]


@pytest.mark.parametrize("change, message", REFUSALS, ids=[next(iter(change)) for change, _ in REFUSALS])
def test_refusals_name_what_is_supported(change, message):
    size = {"n": 2, "d": 16, "block_size": 16, "k": 2, "dtype": torch.float32} | change
    segments = Segments.from_cu_seqlens([0, 5])
    x = inputs(segments, n=size["n"], g=1, d=size["d"], dtype=size["dtype"])
    ids = random_ids(segments, 1, size["block_size"], size["k"])
    with pytest.raises(ValueError, match=message):
        sparse_attention(x.query, x.key, x.value, ids, segments, block_size=size["block_size"], backend="triton")
