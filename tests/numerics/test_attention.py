"""sparse_attention and dense_attention against the loop oracle, torch's own attention, and each other."""

import math

import pytest
import torch
import torch.nn.functional as F

from msa_pretrain.kernels import Segments, dense_attention, select_blocks, sparse_attention, tiling


def attend(kind, x, segments, ids, block_size, **kwargs):
    if kind == "dense":
        return dense_attention(x.query, x.key, x.value, segments, **kwargs)
    return sparse_attention(x.query, x.key, x.value, ids, segments, block_size=block_size, **kwargs)


def ids_of(x, segments, block_size, k):
    return select_blocks(x.index_query, x.index_key, segments, block_size=block_size, num_selected_blocks=k)[0]


def with_gradients(function, x):
    """output, lse, and the gradients of query, key and value under a fixed random output gradient."""
    output, lse = function(x)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(output, (x.query, x.key, x.value), grad_output.to(output.dtype))
    return dict(zip(("output", "lse", "d_query", "d_key", "d_value"), (output.detach(), lse, *gradients), strict=True))


def assert_close(actual, expected, atol):
    for name, tensor in expected.items():
        one, other = actual[name].double(), tensor.double()
        torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_bits(actual, expected):
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(params=["sparse", "dense"])
def kind(request):
    return request.param


# Measured: 7e-15 and 3.9e-6 (fp32, scale 0.8).
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.8])
def test_equals_oracle(oracle, make_inputs, layout, kind, dtype, atol, scale):
    fragments, num_queries, num_keys = layout
    segments = Segments(*layout)
    x = make_inputs(num_queries, num_keys, dtype=dtype, requires_grad=True)
    truth = make_inputs(num_queries, num_keys, requires_grad=True)
    ids = ids_of(x, segments, 3, 4)
    oracle_ids = ids if kind == "sparse" else None
    actual = with_gradients(lambda x: attend(kind, x, segments, ids, 3, softmax_scale=scale), x)
    expected = with_gradients(
        lambda x: oracle.attention(x.query, x.key, x.value, oracle_ids, fragments, block_size=3, scale=scale), truth
    )
    assert actual["output"].dtype == dtype and actual["lse"].dtype == dtype
    assert_close(actual, expected, atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_inputs_are_computed_in_fp32(make_inputs, layout, kind, dtype):
    segments = Segments(*layout)
    x = make_inputs(*layout[1:], dtype=dtype)
    ids = ids_of(x, segments, 3, 4)
    output, lse = attend(kind, x, segments, ids, 3)
    for name in ("query", "key", "value"):
        setattr(x, name, getattr(x, name).float())
    full_output, full_lse = attend(kind, x, segments, ids, 3)
    assert output.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(output, full_output.to(dtype)) and torch.equal(lse, full_lse)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 507, 1021])
def test_lengths(oracle, make_inputs, length):
    """The whole loop oracle on the last 3 rows and on rows around a block border; other rows get no gradient."""
    n, g, block_size, k = 2, 1, 16, 4
    x = make_inputs(length, length, n=n, g=g, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, length])
    ids = ids_of(x, segments, block_size, k)
    rows = sorted(
        {row for row in (0, 15, 16, 129, length // 2, length - 3, length - 2, length - 1) if 0 <= row < length}
    )
    fragments = [(row, 1, 0, row + 1) for row in rows]

    def ours(x):
        output, lse = sparse_attention(x.query, x.key, x.value, ids, segments, block_size=block_size)
        return output[rows], lse[rows]

    def loops(x):
        output, lse = oracle.attention(x.query, x.key, x.value, ids, fragments, block_size=block_size)
        return output[rows], lse[rows]

    assert_close(with_gradients(ours, x), with_gradients(loops, x), 1e-13)


def test_all_blocks_selected_equals_dense_and_torch():
    """N=37, blocks of 8, all 5 kept, 6 heads, 2 groups, d=16, fp32."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(37, 6, 16, generator=generator, requires_grad=True)
    key, value = (torch.randn(37, 2, 16, generator=generator, requires_grad=True) for _ in range(2))
    grad_output = torch.randn(37, 6, 16, generator=generator)
    segments = Segments.from_cu_seqlens([0, 37])
    index = torch.randn(37, 2, 5, generator=generator)
    ids, _ = select_blocks(index, index[:, 0], segments, block_size=8, num_selected_blocks=5)
    sparse, sparse_lse = sparse_attention(query, key, value, ids, segments, block_size=8)
    dense, dense_lse = dense_attention(query, key, value, segments)
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    torchs = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    assert torch.equal(sparse, dense) and torch.equal(sparse_lse, dense_lse)
    torch.testing.assert_close(sparse, torchs, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(out, (query, key, value), grad_output) for out in (sparse, dense, torchs)]
    for ours, same, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_documents_shorter_than_a_block_equal_dense(make_inputs):
    x = make_inputs(3, 3)
    segments = Segments.from_cu_seqlens([0, 3])
    ids = ids_of(x, segments, 128, 16)
    for ours, dense in zip(
        attend("sparse", x, segments, ids, 128), attend("dense", x, segments, ids, 128), strict=True
    ):
        assert torch.equal(ours, dense)


def test_one_block_is_block_diagonal_causal(make_inputs):
    x = make_inputs(14, 14, requires_grad=True)
    whole, blocks = Segments.from_cu_seqlens([0, 14]), Segments.from_cu_seqlens([0, 4, 8, 12, 14])
    ids = ids_of(x, whole, 4, 1)
    sparse = with_gradients(lambda x: attend("sparse", x, whole, ids, 4), x)
    diagonal = with_gradients(lambda x: attend("dense", x, blocks, None, 4), x)
    assert_close(sparse, diagonal, 1e-13)


def test_dims_that_all_differ(oracle, make_inputs):
    """Two documents of 5 tokens, 6 heads, 3 groups, d=8, index dim 4, blocks of 7."""
    x = make_inputs(10, 10, n=6, g=3, d=8, i=4, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 5, 10])
    ids = ids_of(x, segments, 7, 2)
    actual = with_gradients(lambda x: attend("sparse", x, segments, ids, 7), x)
    loops = with_gradients(lambda x: oracle.attention(x.query, x.key, x.value, ids, segments.rows, block_size=7), x)
    assert_close(actual, loops, 1e-13)


def test_rows_in_no_document_are_dead(make_inputs, kind):
    x = make_inputs(9, 9, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 7], 9)
    result = with_gradients(lambda x: attend(kind, x, segments, ids_of(x, segments, 3, 4), 3), x)
    assert (result.pop("lse")[7:] == -math.inf).all()
    for name, tensor in result.items():
        assert (tensor[7:] == 0).all() and tensor.isfinite().all() and (tensor[1:7] != 0).all(), name


def test_a_row_without_ids_attends_to_nothing(make_inputs):
    x = make_inputs(8, 8, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 8])
    ids = ids_of(x, segments, 3, 2)
    full = with_gradients(lambda x: attend("sparse", x, segments, ids, 3), x)
    ids = ids.clone()
    ids[5, 1] = -1
    empty = with_gradients(lambda x: attend("sparse", x, segments, ids, 3), x)
    assert (empty["output"][5, 5:] == 0).all() and (empty["lse"][5, 5:] == -math.inf).all()
    assert (empty["d_query"][5, 5:] == 0).all() and (empty["d_query"][5, :5] == full["d_query"][5, :5]).all()
    assert all(empty[name].isfinite().all() for name in ("output", "d_query", "d_key", "d_value"))


def test_a_batch_of_padding_alone_has_zero_gradients(make_inputs, kind):
    x = make_inputs(4, 4, requires_grad=True)
    segments = Segments.from_cu_seqlens([0], 4)
    ids = torch.full((4, 2, 3), -1, dtype=torch.int32)
    result = with_gradients(lambda x: attend(kind, x, segments, ids, 3), x)
    assert (result.pop("lse") == -math.inf).all()
    assert all((tensor == 0).all() for tensor in result.values())


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poisoned_padding_changes_nothing(make_inputs, kind, poison):
    segments = Segments.from_cu_seqlens([0, 1, 14, 14, 23], 26)
    x = make_inputs(26, 26, dtype=torch.float32)
    ids = ids_of(x, segments, 3, 4)
    results = []
    for fill in (0.0, poison):
        for name in ("query", "key", "value"):
            tensor = getattr(x, name).detach().clone()
            tensor[23:] = fill
            setattr(x, name, tensor.requires_grad_())
        results.append(with_gradients(lambda x: attend(kind, x, segments, ids, 3), x))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_packing_changes_no_bit(make_inputs, kind, dtype):
    lengths = [1, 127, 128, 129, 3, 0, 64]
    borders = [sum(lengths[:j]) for j in range(len(lengths) + 1)]
    x = make_inputs(borders[-1], borders[-1], dtype=dtype, n=4, d=24, requires_grad=True)
    packed = Segments.from_cu_seqlens(borders)
    ids = ids_of(x, packed, 16, 3)
    grad_output = torch.randn(borders[-1], 4, 24, dtype=dtype)
    output, lse = attend(kind, x, packed, ids, 16)
    gradients = torch.autograd.grad(output, (x.query, x.key, x.value), grad_output)
    for start, length in zip(borders, lengths, strict=False):
        rows = slice(start, start + length)
        alone = Segments.from_cu_seqlens([0, length])
        own = [tensor[rows].detach().requires_grad_() for tensor in (x.query, x.key, x.value)]
        if kind == "sparse":
            own_output, own_lse = sparse_attention(*own, ids[rows], alone, block_size=16)
        else:
            own_output, own_lse = dense_attention(*own, alone)
        assert torch.equal(own_output, output[rows]) and torch.equal(own_lse, lse[rows])
        own_gradients = torch.autograd.grad(own_output, own, grad_output[rows])
        for own_gradient, gradient in zip(own_gradients, gradients, strict=True):
            assert torch.equal(own_gradient, gradient[rows])


def test_two_nested_ranges_of_one_document_equal_the_whole(make_inputs, kind):
    """Queries 3..6 and 12..16 of a 17-token document as two fragments; key gradients add up."""
    x = make_inputs(17, 17, requires_grad=True)
    whole = Segments.from_cu_seqlens([0, 17])
    local = Segments(rows=((0, 4, 0, 7), (4, 5, 0, 17)), num_queries=9, num_keys=17)
    rows = [3, 4, 5, 6, 12, 13, 14, 15, 16]
    ids = ids_of(x, whole, 3, 4)
    part_ids, _ = select_blocks(x.index_query[rows], x.index_key, local, block_size=3, num_selected_blocks=4)
    assert torch.equal(part_ids, ids[rows])

    def from_whole(x):
        output, lse = attend(kind, x, whole, ids, 3)
        return output[rows], lse[rows]

    def from_fragments(x):
        query = x.query[rows]
        if kind == "dense":
            return dense_attention(query, x.key, x.value, local)
        return sparse_attention(query, x.key, x.value, part_ids, local, block_size=3)

    assert_close(with_gradients(from_fragments, x), with_gradients(from_whole, x), 1e-13)


def test_future_tokens_change_nothing_past(make_inputs, kind):
    x = make_inputs(20, 20)
    segments = Segments.from_cu_seqlens([0, 20])
    ids = ids_of(x, segments, 3, 4)
    before = attend(kind, x, segments, ids, 3)
    x.key[13] *= 40
    x.value[13] += 3
    x.query[13] *= 2
    after = attend(kind, x, segments, ids, 3)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:13], new[:13])
        assert not torch.equal(old[13:], new[13:])


@pytest.mark.parametrize("checkpoint_pairs", [0, 2**20])
def test_tile_size_changes_nothing(make_inputs, monkeypatch, layout, kind, checkpoint_pairs):
    segments = Segments(*layout)
    x = make_inputs(*layout[1:], requires_grad=True)
    ids = ids_of(x, segments, 3, 4)
    whole = with_gradients(lambda x: attend(kind, x, segments, ids, 3), x)
    monkeypatch.setattr(tiling, "QUERY_TILE", 2)
    monkeypatch.setattr(tiling, "CHECKPOINT_PAIRS", checkpoint_pairs)
    assert_close(with_gradients(lambda x: attend(kind, x, segments, ids, 3), x), whole, 1e-13)


def test_large_fragments_keep_no_scores_for_backward(make_inputs, monkeypatch, kind):
    x = make_inputs(60, 60, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 60])
    ids = ids_of(x, segments, 3, 4)
    monkeypatch.setattr(tiling, "QUERY_TILE", 10)

    def saved_elements(checkpoint_pairs):
        monkeypatch.setattr(tiling, "CHECKPOINT_PAIRS", checkpoint_pairs)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            attend(kind, x, segments, ids, 3)
        # Views of the inputs are free.
        own = {tensor.untyped_storage().data_ptr() for tensor in (x.query, x.key, x.value)}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 8 for t in saved}
        return sum(size for place, size in storages.items() if place not in own)

    all_scores = 10 * 10 * (10 + 20 + 30 + 40 + 50 + 60)
    assert saved_elements(60 * 60) >= all_scores
    assert saved_elements(60 * 60 - 1) < all_scores / 20


def test_expanded_output_gradient(make_inputs, kind):
    """sum().backward() hands over a gradient of stride 0."""
    x = make_inputs(13, 13, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 13])
    ids = ids_of(x, segments, 3, 2)
    inputs = (x.query, x.key, x.value)
    expanded = torch.autograd.grad(attend(kind, x, segments, ids, 3)[0].sum(), inputs)
    plain = torch.autograd.grad(attend(kind, x, segments, ids, 3)[0], inputs, torch.ones(13, 10, 7).double())
    for one, other in zip(expanded, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_views_of_one_fused_projection(make_inputs, kind):
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(13, 3, 2, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    x = make_inputs(13, 13, n=2, g=2)
    segments = Segments.from_cu_seqlens([0, 13])
    ids = ids_of(x, segments, 3, 2)
    x.query, x.key, x.value = fused.unbind(1)
    strided, _ = attend(kind, x, segments, ids, 3)
    (strided_gradient,) = torch.autograd.grad(strided.square().sum(), fused)
    x.query, x.key, x.value = (part.detach().contiguous().requires_grad_() for part in fused.unbind(1))
    plain, _ = attend(kind, x, segments, ids, 3)
    plain_gradient = torch.stack(torch.autograd.grad(plain.square().sum(), (x.query, x.key, x.value)), dim=1)
    torch.testing.assert_close(strided, plain, rtol=0, atol=1e-14)
    torch.testing.assert_close(strided_gradient, plain_gradient, rtol=0, atol=1e-13)


def test_gradcheck(make_inputs, kind):
    x = make_inputs(7, 8, n=4, d=3, requires_grad=True)
    segments = Segments(rows=((4, 2, 5, 3), (0, 3, 0, 5)), num_queries=7, num_keys=8)
    ids = ids_of(x, segments, 2, 2)

    def output(query, key, value):
        x.query, x.key, x.value = query, key, value
        return attend(kind, x, segments, ids, 2)[0]

    assert torch.autograd.gradcheck(output, (x.query, x.key, x.value))


def test_lse_is_not_differentiable_and_autocast_changes_nothing(make_inputs, kind):
    x = make_inputs(9, 9, dtype=torch.float32, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 9])
    ids = ids_of(x, segments, 3, 2)
    output, lse = attend(kind, x, segments, ids, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_output, cast_lse = attend(kind, x, segments, ids, 3)
    assert output.requires_grad and not lse.requires_grad
    assert torch.equal(output, cast_output) and torch.equal(lse, cast_lse)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"backend": "pallas"}, r"backend 'pallas' does not exist for this op\. Use one of: reference"),
        ({"query": torch.zeros(6, 4, 8).long()}, r"query has dtype torch.int64\. Use one of"),
        ({"value": torch.zeros(6, 2, 8).half()}, r"value is torch.float16 but query is torch.float32"),
        ({"key": torch.zeros(6, 2, 8, device="meta")}, r"key is on meta but query is on cpu"),
        ({"key": torch.zeros(6, 2, 7)}, r"query must be \[t_q, n, d\].* got \(6, 4, 8\) and \(6, 2, 7\)"),
        ({"key": torch.zeros(6, 3, 8)}, r"KV groups g \(3\) must divide the query heads n \(4\)"),
        ({"value": torch.zeros(6, 2, 5)}, r"value must have the shape of key .* got \(6, 2, 5\) and \(6, 2, 8\)"),
        ({"query": torch.zeros(5, 4, 8)}, r"query has 5 rows but segments.num_queries is 6"),
        ({"key": torch.zeros(7, 2, 8), "value": torch.zeros(7, 2, 8)}, r"key has 7 rows but segments.num_keys is 6"),
        ({"softmax_scale": 0.0}, r"softmax_scale \(0.0\) must be positive and finite"),
        ({"softmax_scale": math.inf}, r"softmax_scale \(inf\) must be positive and finite"),
    ],
)
def test_refusals(kind, change, message):
    arguments = {
        "query": torch.zeros(6, 4, 8),
        "key": torch.zeros(6, 2, 8),
        "value": torch.zeros(6, 2, 8),
        "segments": Segments.from_cu_seqlens([0, 6]),
    }
    function = dense_attention
    if kind == "sparse":
        function = sparse_attention
        arguments |= {"block_indices": torch.zeros(6, 2, 1, dtype=torch.int32), "block_size": 4}
    with pytest.raises(ValueError, match=message):
        function(**(arguments | change))


def ids_with(row):
    ids = torch.tensor([0, -1, -1], dtype=torch.int32).expand(6, 2, 3).clone()
    ids[5, 1] = torch.tensor(row)
    return ids


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 0}, r"block_size \(0\) must be at least 1"),
        ({"block_indices": torch.zeros(6, 3, 1).int()}, r"block_indices must be .*\[6, 2, k >= 1\]; got \(6, 3, 1\)"),
        ({"block_indices": torch.zeros(6, 2, 0).int()}, r"block_indices must be .*got \(6, 2, 0\)"),
        ({"block_indices": torch.zeros(6, 2, 1).long()}, r"block_indices must be int32 .* got torch.int64"),
        ({"block_indices": torch.zeros(6, 2, 1, device="meta").int()}, r"block_indices is on meta but query is on cpu"),
        ({"block_indices": ids_with([0, 2, 3])}, r"block_indices\[5, 1\] is \[0, 2, 3\].* lie in 0\.\.2"),
        ({"block_indices": ids_with([1, 1, -1])}, r"block_indices\[5, 1\] is \[1, 1, -1\], but ids must ascend"),
        ({"block_indices": ids_with([2, 1, -1])}, r"block_indices\[5, 1\] is \[2, 1, -1\], but ids must ascend"),
        ({"block_indices": ids_with([-1, 1, 2])}, r"block_indices\[5, 1\] is \[-1, 1, 2\].* end in -1 padding"),
        ({"block_indices": ids_with([-2, -1, -1])}, r"block_indices\[5, 1\] is \[-2, -1, -1\]"),
        ({"segments": Segments.from_cu_seqlens([0, 5], 6)}, r"block_indices\[5, 0\] is \[0, -1, -1\].*lie in 0\.\.-1"),
    ],
)
def test_refusals_of_ids(change, message):
    arguments = {
        "query": torch.zeros(6, 4, 8),
        "key": torch.zeros(6, 2, 8),
        "value": torch.zeros(6, 2, 8),
        "segments": Segments.from_cu_seqlens([0, 6]),
        "block_indices": ids_with([0, 1, 2]),
        "block_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(arguments | change))
