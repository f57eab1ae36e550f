"""sparse_indexer_kl and dense_indexer_kl against the loop oracle, and the decided details by value."""

import math

import pytest
import torch

from msa_pretrain.kernels import (
    Segments,
    dense_attention,
    dense_indexer_kl,
    select_blocks,
    sparse_attention,
    sparse_indexer_kl,
    tiling,
)


@pytest.fixture(params=["sparse", "dense"])
def kind(request):
    return request.param


def ids_of(x, segments, block_size, k):
    return select_blocks(x.index_query, x.index_key, segments, block_size=block_size, num_selected_blocks=k)[0]


def kl_of(kind, x, segments, ids, block_size, scale=None):
    """The KL with the lse of the matching attention op."""
    inputs = (x.index_query, x.index_key, x.query, x.key)
    if kind == "dense":
        _, lse = dense_attention(x.query, x.key, x.value, segments, softmax_scale=scale)
        return dense_indexer_kl(*inputs, lse, segments, softmax_scale=scale)
    _, lse = sparse_attention(x.query, x.key, x.value, ids, segments, block_size=block_size, softmax_scale=scale)
    return sparse_indexer_kl(*inputs, lse, ids, segments, block_size=block_size, softmax_scale=scale)


def with_gradients(function, x):
    """kl and the index gradients under fixed random row weights."""
    kl = function(x)
    weights = torch.rand(kl.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(kl, (x.index_query, x.index_key), weights.to(kl.dtype))
    return dict(zip(("kl", "d_index_query", "d_index_key"), (kl.detach(), *gradients), strict=True))


def assert_close(actual, expected, atol):
    for name, tensor in expected.items():
        one, other = actual[name].double(), tensor.double()
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# Measured: 2e-15 and 5.4e-7.
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.8])
def test_equals_oracle(oracle, make_inputs, layout, kind, dtype, atol, scale):
    fragments, num_queries, num_keys = layout
    segments = Segments(*layout)
    x = make_inputs(num_queries, num_keys, dtype=dtype, requires_grad=True)
    truth = make_inputs(num_queries, num_keys, requires_grad=True)
    ids = ids_of(x, segments, 3, 4)
    inputs = (truth.index_query, truth.index_key, truth.query, truth.key)
    oracle_ids = ids if kind == "sparse" else None
    actual = with_gradients(lambda x: kl_of(kind, x, segments, ids, 3, scale), x)
    expected = with_gradients(
        lambda x: oracle.indexer_kl(*inputs, oracle_ids, fragments, block_size=3, scale=scale), truth
    )
    assert actual["kl"].dtype == dtype and actual["kl"].shape == (num_queries, 2)
    assert_close(actual, expected, atol)


def test_gradient_is_student_minus_teacher(make_inputs):
    """dS = weight (P_idx - P), written out for one document, one head, everything visible to the last row."""
    x = make_inputs(6, 6, n=1, g=1, requires_grad=True)
    kl = kl_of("dense", x, Segments.from_cu_seqlens([0, 6]), None, 1)
    d_query, d_key = torch.autograd.grad(0.3 * kl[5, 0], (x.index_query, x.index_key))
    teacher = (x.query[5, 0] @ x.key[:, 0].T / math.sqrt(7)).softmax(0)
    student = (x.index_query[5, 0] @ x.index_key.T / math.sqrt(6)).softmax(0)
    d_score = 0.3 * (student - teacher)
    torch.testing.assert_close(d_query[5, 0], d_score @ x.index_key / math.sqrt(6), rtol=0, atol=1e-14)
    torch.testing.assert_close(d_key, d_score[:, None] * x.index_query[5, 0] / math.sqrt(6), rtol=0, atol=1e-14)
    assert (d_query[:5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_hot_teacher_and_flat_index(dtype):
    query, key = torch.ones(4, 1, 1, dtype=dtype), torch.zeros(4, 1, 1, dtype=dtype)
    key[0] = 200
    index_query = torch.zeros(4, 1, 3, dtype=dtype, requires_grad=True)
    index_key = torch.ones(4, 3, dtype=dtype, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 4])
    _, lse = dense_attention(query, key, key, segments)
    kl = dense_indexer_kl(index_query, index_key, query, key, lse, segments)
    expected = torch.tensor([0.0, math.log(2), math.log(3), math.log(4)], dtype=dtype)
    torch.testing.assert_close(kl[:, 0], expected, rtol=0, atol=1e-6)
    assert kl[0, 0] == 0
    assert kl.mean().item() == pytest.approx(0.794513, abs=1e-6)
    for gradient in torch.autograd.grad(kl.sum(), (index_query, index_key)):
        assert gradient.isfinite().all()


def test_only_the_index_inputs_get_gradients(make_inputs, kind):
    x = make_inputs(9, 9, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 9])
    kl = kl_of(kind, x, segments, ids_of(x, segments, 3, 2), 3)
    gradients = torch.autograd.grad(kl.sum(), (x.query, x.key, x.value, x.index_query, x.index_key), allow_unused=True)
    assert gradients[:3] == (None, None, None)
    assert all((gradient != 0).any() for gradient in gradients[3:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_with_one_token_and_rows_in_no_document_are_exactly_zero(make_inputs, kind, dtype):
    """Documents of 1, 1 and 7 tokens and 2 padding rows; with one block of 3 kept, positions 3 and 6 see one token."""
    x = make_inputs(11, 11, dtype=dtype, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 1, 2, 9], 11)
    ids = ids_of(x, segments, 3, 1)
    result = with_gradients(lambda x: kl_of(kind, x, segments, ids, 3), x)
    zero_rows = [0, 1, 2, 5, 8, 9, 10] if kind == "sparse" else [0, 1, 2, 9, 10]
    for name in ("kl", "d_index_query"):
        is_zero = (result[name] == 0).flatten(1)
        assert is_zero[zero_rows].all() and not is_zero.all(1)[[3, 4, 6, 7]].any(), name
    assert (result["d_index_key"][[0, 1, 9, 10]] == 0).all()
    assert all(tensor.isfinite().all() for tensor in result.values())


def test_a_row_without_ids_has_no_loss(make_inputs):
    x = make_inputs(8, 8, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 8])
    ids = ids_of(x, segments, 3, 2).clone()
    ids[7, 1] = -1
    result = with_gradients(lambda x: kl_of("sparse", x, segments, ids, 3), x)
    assert result["kl"][7, 1] == 0 and result["kl"][7, 0] > 0
    assert (result["d_index_query"][7, 1] == 0).all()
    assert all(tensor.isfinite().all() for tensor in result.values())


def test_a_batch_of_padding_alone_has_zero_gradients(make_inputs, kind):
    x = make_inputs(4, 4, requires_grad=True)
    ids = torch.full((4, 2, 3), -1, dtype=torch.int32)
    result = with_gradients(lambda x: kl_of(kind, x, Segments.from_cu_seqlens([0], 4), ids, 3), x)
    assert all((tensor == 0).all() for tensor in result.values())


def test_future_scores_far_above_the_lse_stay_out(make_inputs, kind):
    """exp(score - lse) of a hidden token overflows; neither value nor gradient may notice."""
    x = make_inputs(8, 8, dtype=torch.float32)
    segments = Segments.from_cu_seqlens([0, 8])
    ids = ids_of(x, segments, 3, 2)
    results = []
    for size in (1.0, 1e6):
        x.index_query.requires_grad_()
        x.key[7] = size * x.query[6, 0]
        x.index_key = x.index_key.detach().clone()
        x.index_key[7] *= size
        kl = kl_of(kind, x, segments, ids, 3)
        (gradient,) = torch.autograd.grad(kl[:7].sum(), x.index_query)
        results.append((kl[:7].detach(), gradient))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poisoned_padding_changes_nothing(make_inputs, kind, poison):
    segments = Segments.from_cu_seqlens([0, 1, 14, 14, 23], 26)
    x = make_inputs(26, 26, dtype=torch.float32)
    ids = ids_of(x, segments, 3, 4)
    results = []
    for fill in (0.0, poison):
        for name in vars(x):
            tensor = getattr(x, name).detach().clone()
            tensor[23:] = fill
            setattr(x, name, tensor.requires_grad_())
        results.append(with_gradients(lambda x: kl_of(kind, x, segments, ids, 3), x))
    for name, clean in results[0].items():
        assert torch.equal(results[1][name], clean), name
        assert (clean[23:] == 0).all()


def test_packing_changes_no_bit(make_inputs, kind):
    lengths = [1, 31, 32, 33, 3, 0, 16]
    borders = [sum(lengths[:j]) for j in range(len(lengths) + 1)]
    x = make_inputs(borders[-1], borders[-1], dtype=torch.float32, n=4, i=24, requires_grad=True)
    packed = Segments.from_cu_seqlens(borders)
    ids = ids_of(x, packed, 8, 3)
    kl = kl_of(kind, x, packed, ids, 8)
    gradients = torch.autograd.grad(kl.square().sum(), (x.index_query, x.index_key))
    for start, length in zip(borders, lengths, strict=False):
        rows = slice(start, start + length)
        own = type(x)(**{name: tensor[rows].detach().requires_grad_() for name, tensor in vars(x).items()})
        own_kl = kl_of(kind, own, Segments.from_cu_seqlens([0, length]), ids[rows], 8)
        assert torch.equal(own_kl, kl[rows])
        own_gradients = torch.autograd.grad(own_kl.square().sum(), (own.index_query, own.index_key))
        for own_gradient, gradient in zip(own_gradients, gradients, strict=True):
            assert torch.equal(own_gradient, gradient[rows])


def test_two_nested_ranges_of_one_document_equal_the_whole(make_inputs, kind):
    x = make_inputs(17, 17, requires_grad=True)
    whole = Segments.from_cu_seqlens([0, 17])
    local = Segments(rows=((0, 4, 0, 7), (4, 5, 0, 17)), num_queries=9, num_keys=17)
    rows = [3, 4, 5, 6, 12, 13, 14, 15, 16]
    ids = ids_of(x, whole, 3, 4)

    def from_fragments(x):
        part = type(x)(**vars(x))
        part.query, part.index_query = x.query[rows], x.index_query[rows]
        return kl_of(kind, part, local, ids[rows], 3)

    expected = with_gradients(lambda x: kl_of(kind, x, whole, ids, 3)[rows], x)
    assert_close(with_gradients(from_fragments, x), expected, 1e-13)


def test_all_blocks_selected_equals_the_full_sequence(make_inputs):
    x = make_inputs(17, 17, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 17])
    ids = ids_of(x, segments, 4, 5)
    sparse = with_gradients(lambda x: kl_of("sparse", x, segments, ids, 4), x)
    dense = with_gradients(lambda x: kl_of("dense", x, segments, ids, 4), x)
    assert_close(sparse, dense, 1e-13)


@pytest.mark.parametrize("checkpoint_pairs", [0, 2**20])
def test_tile_size_changes_nothing(make_inputs, monkeypatch, layout, kind, checkpoint_pairs):
    segments = Segments(*layout)
    x = make_inputs(*layout[1:], requires_grad=True)
    ids = ids_of(x, segments, 3, 4)
    whole = with_gradients(lambda x: kl_of(kind, x, segments, ids, 3), x)
    monkeypatch.setattr(tiling, "QUERY_TILE", 2)
    monkeypatch.setattr(tiling, "CHECKPOINT_PAIRS", checkpoint_pairs)
    assert_close(with_gradients(lambda x: kl_of(kind, x, segments, ids, 3), x), whole, 1e-13)


def test_expanded_output_gradient_and_strided_inputs(make_inputs, kind):
    x = make_inputs(13, 13, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 13])
    ids = ids_of(x, segments, 3, 2)
    plain = torch.autograd.grad(
        kl_of(kind, x, segments, ids, 3), (x.index_query, x.index_key), torch.ones(13, 2).double()
    )
    inputs = (x.index_query, x.index_key)
    x.index_query = x.index_query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    x.index_key = x.index_key.T.contiguous().T
    expanded = torch.autograd.grad(kl_of(kind, x, segments, ids, 3).sum(), inputs)
    for one, other in zip(expanded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_gradcheck(make_inputs, kind):
    x = make_inputs(7, 8, n=4, d=3, i=5, requires_grad=True)
    segments = Segments(rows=((4, 2, 5, 3), (0, 3, 0, 5)), num_queries=7, num_keys=8)
    ids = ids_of(x, segments, 2, 2)

    def loss(index_query, index_key):
        x.index_query, x.index_key = index_query, index_key
        return kl_of(kind, x, segments, ids, 2)

    assert torch.autograd.gradcheck(loss, (x.index_query, x.index_key))


def test_index_in_fp32_beside_a_bf16_main_branch(make_inputs, kind):
    x = make_inputs(13, 13, dtype=torch.float32)
    segments = Segments.from_cu_seqlens([0, 13])
    ids = ids_of(x, segments, 3, 2)
    for name in ("query", "key", "value"):
        setattr(x, name, getattr(x, name).bfloat16())
    mixed = kl_of(kind, x, segments, ids, 3)
    for name in ("query", "key", "value"):
        setattr(x, name, getattr(x, name).float())
    assert mixed.dtype == torch.float32 and torch.equal(mixed, kl_of(kind, x, segments, ids, 3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"backend": "pallas"}, r"backend 'pallas' does not exist for this op\. Use one of: reference"),
        ({"index_key": torch.zeros(6, 5).half()}, r"index_key is torch.float16 but index_query is torch.float32"),
        ({"key": torch.zeros(6, 2, 8).half()}, r"key is torch.float16 but query is torch.float32"),
        ({"lse": torch.zeros(6, 4, device="meta")}, r"lse is on meta but index_query is on cpu"),
        ({"index_query": torch.zeros(6, 2, 3)}, r"index_query must be .* got \(6, 2, 3\) and \(6, 5\)"),
        ({"key": torch.zeros(6, 4, 8)}, r"index_query has 2 groups but key has 4\. There is one index query head"),
        ({"key": torch.zeros(6, 3, 8)}, r"KV groups g \(3\) must divide the query heads n \(4\)"),
        ({"lse": torch.zeros(6, 2)}, r"lse must be .*\(6, 4\); got torch.float32 \(6, 2\)"),
        ({"lse": torch.zeros(6, 4).half()}, r"lse must be float32 or float64.* got torch.float16"),
        ({"softmax_scale": -1.0}, r"softmax_scale \(-1.0\) must be positive and finite"),
    ],
)
def test_refusals(kind, change, message):
    with pytest.raises(ValueError, match=message):
        call(kind, change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 0}, r"block_size \(0\) must be at least 1"),
        ({"block_indices": torch.full((6, 2, 1), 3).int()}, r"block_indices\[0, 0\] is \[3\]"),
        ({"block_indices": torch.zeros(6, 2, 1, device="meta").int()}, r"block_indices is on meta but index_query"),
    ],
)
def test_refusals_of_blocks(change, message):
    with pytest.raises(ValueError, match=message):
        call("sparse", change)


def call(kind, change):
    """The op with small valid inputs, some of them changed."""
    arguments = {
        "index_query": torch.zeros(6, 2, 5),
        "index_key": torch.zeros(6, 5),
        "query": torch.zeros(6, 4, 8),
        "key": torch.zeros(6, 2, 8),
        "lse": torch.zeros(6, 4),
        "segments": Segments.from_cu_seqlens([0, 6]),
    }
    if kind == "dense":
        return dense_indexer_kl(**(arguments | change))
    arguments |= {"block_indices": torch.zeros(6, 2, 1, dtype=torch.int32), "block_size": 4}
    return sparse_indexer_kl(**(arguments | change))
