"""select_blocks and block_scores against the loop oracle, and the decided details by value."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, block_scores, select_blocks, tiling


def select(index_query, index_key, segments, block_size, k, **kwargs):
    return select_blocks(index_query, index_key, segments, block_size=block_size, num_selected_blocks=k, **kwargs)


def one_group(scores, *, query_row, dtype=torch.float32):
    """Index inputs of one document in which the query at `query_row` scores each key as listed (raw dot products)."""
    index_query = torch.zeros(len(scores), 1, 2, dtype=dtype)
    index_query[query_row, 0, 0] = 1
    index_key = torch.zeros(len(scores), 2, dtype=dtype)
    index_key[:, 0] = torch.tensor(scores, dtype=dtype)
    return index_query, index_key, Segments.from_cu_seqlens([0, len(scores)])


@pytest.mark.parametrize("init_blocks", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_oracle(oracle, make_inputs, layout, init_blocks, dtype):
    fragments, num_queries, num_keys = layout
    x = make_inputs(num_queries, num_keys, dtype=dtype)
    ids, lse = select(x.index_query, x.index_key, Segments(*layout), 3, 4, init_blocks=init_blocks)
    expected_ids, expected_lse = oracle.select(
        x.index_query, x.index_key, fragments, block_size=3, num_selected=4, init_blocks=init_blocks
    )
    assert ids.dtype == torch.int32 and ids.tolist() == expected_ids
    assert lse.dtype == dtype
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_ties_on_small_integers_equal_oracle(oracle, make_inputs, layout, dtype, seed):
    fragments, num_queries, num_keys = layout
    x = make_inputs(num_queries, num_keys, seed=seed)
    index_query, index_key = (x.index_query * 0.8).round().to(dtype), (x.index_key * 0.8).round().to(dtype)
    ids, _ = select(index_query, index_key, Segments(*layout), 2, 3, init_blocks=seed)
    expected, _ = oracle.select(index_query, index_key, fragments, block_size=2, num_selected=3, init_blocks=seed)
    assert ids.tolist() == expected


def test_half_filled_block_takes_no_padding():
    scores = [1.0, 1.0, 1.0, 1.0, -3.0, -2.0]
    pooled = block_scores(*one_group(scores, query_row=5), block_size=4)
    assert pooled[5, 0].tolist() == [1.0, -2.0]
    assert pooled[3, 0].tolist() == [0.0, -math.inf]


def test_all_scores_equal_keeps_lowest_ids():
    index_query, index_key, segments = one_group([0.0] * 32, query_row=31)
    for _ in range(3):
        ids, _ = select(index_query, index_key, segments, 4, 3)
        assert ids[31, 0].tolist() == [0, 1, 7]


def test_negative_zero_equals_positive_zero():
    index_query, index_key, segments = one_group([-0.0, 0.0, -0.0, 0.0, 0.0], query_row=4)
    ids, _ = select(index_query, index_key, segments, 1, 3)
    assert ids[4, 0].tolist() == [0, 1, 4]
    assert not torch.signbit(block_scores(index_query, index_key, segments, block_size=1)[4]).any()


def test_scores_closer_than_bf16_are_told_apart():
    scores = [10.01, 10.01, 10.02, 10.02, 10.03, 10.03, 10.04, 10.04, 0.0, 0.0]
    index_query, index_key, segments = one_group(scores, query_row=9)
    ids, _ = select(index_query, index_key, segments, 2, 3)
    assert ids[9, 0].tolist() == [2, 3, 4]
    ids, _ = select(index_query.bfloat16(), index_key.bfloat16(), segments, 2, 3)
    assert ids[9, 0].tolist() == [0, 3, 4]


def test_short_document_pads_with_minus_one():
    index_query, index_key, segments = one_group([1.0, 2.0, 3.0], query_row=2)
    ids, lse = select(index_query, index_key, segments, 128, 16)
    assert ids[:, 0].tolist() == [[0] + [-1] * 15] * 3
    assert lse[2, 0].item() == pytest.approx(math.log(sum(math.exp(s / math.sqrt(2)) for s in (1, 2, 3))), abs=1e-6)


def test_local_block_with_the_top_score_is_counted_once():
    index_query, index_key, segments = one_group([3.0, 3, 1, 1, 2, 2, 9, 9], query_row=7)
    ids, _ = select(index_query, index_key, segments, 2, 3)
    assert ids[7, 0].tolist() == [0, 2, 3]


def test_init_blocks_come_after_the_local_block_and_before_the_scores():
    index_query, index_key, segments = one_group([-9.0, -8, 5, 7, 6, 0], query_row=5)
    assert select(index_query, index_key, segments, 1, 3)[0][5, 0].tolist() == [3, 4, 5]
    assert select(index_query, index_key, segments, 1, 3, init_blocks=1)[0][5, 0].tolist() == [0, 3, 5]
    assert select(index_query, index_key, segments, 1, 3, init_blocks=2)[0][5, 0].tolist() == [0, 1, 5]
    assert select(index_query, index_key, segments, 1, 3, init_blocks=2)[0][:3, 0].tolist() == [
        [0, -1, -1],
        [0, 1, -1],
        [0, 1, 2],
    ]


def test_one_block_means_the_local_block(make_inputs):
    x = make_inputs(11, 11)
    ids, _ = select(x.index_query, x.index_key, Segments.from_cu_seqlens([0, 11]), 3, 1)
    assert ids[:, :, 0].T.tolist() == [[t // 3 for t in range(11)]] * 2


def test_rows_in_no_document(make_inputs):
    x = make_inputs(9, 9)
    ids, lse = select(x.index_query, x.index_key, Segments.from_cu_seqlens([0, 7], 9), 3, 4)
    assert (ids[7:] == -1).all() and (ids[:7, :, 0] >= 0).all()
    assert (lse[7:] == -math.inf).all() and lse[:7].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_packing_and_fragments_change_no_bit(make_inputs, dtype):
    lengths = [1, 127, 128, 129, 3, 0, 64]
    borders = [sum(lengths[:j]) for j in range(len(lengths) + 1)]
    x = make_inputs(borders[-1], borders[-1], dtype=dtype, i=24)
    ids, lse = select(x.index_query, x.index_key, Segments.from_cu_seqlens(borders), 16, 5)
    for start, length in zip(borders, lengths, strict=False):
        rows = slice(start, start + length)
        alone = select(x.index_query[rows], x.index_key[rows], Segments.from_cu_seqlens([0, length]), 16, 5)
        assert torch.equal(alone[0], ids[rows]) and torch.equal(alone[1], lse[rows])
        # The last third as a fragment, and inside a longer key range a first half.
        cut = 2 * length // 3
        if 0 < cut < length:
            fragment = Segments(
                rows=((0, length - cut, start, length),), num_queries=length - cut, num_keys=borders[-1]
            )
            part = select(x.index_query[start + cut : start + length], x.index_key, fragment, 16, 5)
            assert torch.equal(part[0], ids[start + cut : start + length])
            prefix = Segments(rows=((0, cut, start, cut),), num_queries=cut, num_keys=borders[-1])
            part = select(x.index_query[start : start + cut], x.index_key, prefix, 16, 5)
            assert torch.equal(part[0], ids[start : start + cut])


def test_future_tokens_change_no_past_selection(make_inputs):
    x = make_inputs(20, 20)
    segments = Segments.from_cu_seqlens([0, 20])
    ids, lse = select(x.index_query, x.index_key, segments, 3, 2)
    index_key = x.index_key.clone()
    index_key[13] *= 50
    changed_ids, changed_lse = select(x.index_query, index_key, segments, 3, 2)
    assert torch.equal(ids[:13], changed_ids[:13]) and torch.equal(lse[:13], changed_lse[:13])
    assert not torch.equal(lse[13:], changed_lse[13:])


@pytest.mark.parametrize("poison", [math.nan, 1e30])
def test_poisoned_padding_changes_nothing(make_inputs, poison):
    x = make_inputs(26, 26, dtype=torch.float32)
    segments = Segments.from_cu_seqlens([0, 1, 14, 14, 23], 26)
    clean = select(x.index_query, x.index_key, segments, 3, 4)
    x.index_query[23:], x.index_key[23:] = poison, poison
    poisoned = select(x.index_query, x.index_key, segments, 3, 4)
    assert torch.equal(clean[0], poisoned[0]) and torch.equal(clean[1], poisoned[1])


def test_tile_size_changes_nothing(make_inputs, monkeypatch):
    x = make_inputs(15, 27)
    segments = Segments(((8, 6, 19, 6), (0, 4, 2, 9), (4, 3, 2, 17)), 15, 27)
    whole = select(x.index_query, x.index_key, segments, 3, 4)
    scores = block_scores(x.index_query, x.index_key, segments, block_size=3)
    monkeypatch.setattr(tiling, "QUERY_TILE", 2)
    tiled = select(x.index_query, x.index_key, segments, 3, 4)
    assert torch.equal(whole[0], tiled[0])
    torch.testing.assert_close(whole[1], tiled[1], rtol=0, atol=1e-13)
    again = block_scores(x.index_query, x.index_key, segments, block_size=3)
    torch.testing.assert_close(scores, again, rtol=0, atol=1e-13)


def test_block_scores_equal_loops(make_inputs, oracle, layout):
    fragments, num_queries, num_keys = layout
    x = make_inputs(num_queries, num_keys)
    scores = block_scores(x.index_query, x.index_key, Segments(*layout), block_size=3)
    expected = torch.full_like(scores, -math.inf)
    assert scores.shape == (num_queries, 2, -(-max(row[3] for row in fragments) // 3))
    for row, position, k_start in oracle.rows(fragments):
        for group in range(2):
            for j in range(position + 1):
                dot = (x.index_query[row, group] * x.index_key[k_start + j]).sum()
                expected[row, group, j // 3] = max(expected[row, group, j // 3], dot)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-13)


def test_strided_inputs(make_inputs):
    x = make_inputs(12, 12)
    segments = Segments.from_cu_seqlens([0, 12])
    fused = torch.cat([x.index_query, x.index_key[:, None]], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
    strided = select(fused[:, :2], fused[:, 2], segments, 3, 2)
    plain = select(x.index_query, x.index_key, segments, 3, 2)
    assert torch.equal(strided[0], plain[0]) and torch.equal(strided[1], plain[1])


def test_not_differentiable_and_untouched_by_autocast(make_inputs):
    x = make_inputs(12, 12, dtype=torch.float32, requires_grad=True)
    segments = Segments.from_cu_seqlens([0, 12])
    ids, lse = select(x.index_query, x.index_key, segments, 3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_ids, cast_lse = select(x.index_query, x.index_key, segments, 3, 2)
    assert not lse.requires_grad
    assert torch.equal(ids, cast_ids) and torch.equal(lse, cast_lse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_visible_score_is_reported(value):
    index_query, index_key, _ = one_group([0.0] * 9, query_row=7)
    index_query[:, 0, 0] = 1
    index_key[6, 0] = value
    segments = Segments.from_cu_seqlens([0, 4, 9])
    message = (
        r"index score of query row 6 \(document 1, position 2, group 0\) against the key at position 2 is -?(nan|inf)"
    )
    with pytest.raises(ValueError, match=message):
        select(index_query, index_key, segments, 2, 2)


def test_non_finite_future_score_is_not_ranked():
    index_query, index_key, _ = one_group([1.0, 2.0, 3.0, 4.0], query_row=1)
    index_key[3] = math.nan
    fragment = Segments(rows=((0, 3, 0, 3),), num_queries=4, num_keys=4)
    assert select(index_query, index_key, fragment, 1, 2)[0][:, 0].tolist() == [[0, -1], [0, 1], [0, 2], [-1, -1]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"backend": "pallas"}, r"backend 'pallas' does not exist for this op\. Use one of: reference, triton"),
        ({"backend": "cuda"}, r"backend 'cuda' does not exist"),
        ({"index_query": torch.zeros(6, 2, 4, dtype=torch.int32)}, r"index_query has dtype torch.int32\. Use one of"),
        ({"index_key": torch.zeros(6, 4).half()}, r"index_key is torch.float16 but index_query is torch.float32"),
        ({"index_key": torch.zeros(6, 4, device="meta")}, r"index_key is on meta but index_query is on cpu"),
        ({"index_key": torch.zeros(6, 5)}, r"index_query must be .* got \(6, 2, 4\) and \(6, 5\)"),
        ({"index_query": torch.zeros(5, 2, 4)}, r"index_query has 5 rows but segments.num_queries is 6"),
        ({"index_key": torch.zeros(7, 4)}, r"index_key has 7 rows but segments.num_keys is 6"),
        ({"block_size": 0}, r"block_size \(0\) must be at least 1"),
        ({"num_selected_blocks": 0}, r"num_selected_blocks \(0\) must be at least 1: the local block is always kept"),
        ({"init_blocks": 3}, r"init_blocks \(3\) must lie in 0\.\.2"),
        ({"init_blocks": -1}, r"init_blocks \(-1\) must lie in 0\.\.2"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "index_query": torch.zeros(6, 2, 4),
        "index_key": torch.zeros(6, 4),
        "segments": Segments.from_cu_seqlens([0, 6]),
        "block_size": 2,
        "num_selected_blocks": 3,
    } | change
    with pytest.raises(ValueError, match=message):
        select_blocks(**arguments)
