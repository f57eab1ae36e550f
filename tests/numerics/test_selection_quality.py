"""selection_quality against the loop oracle (random draws enumerated), by value, and as sums."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from msa_pretrain.kernels import Segments, SelectionQuality, select_blocks, selection_quality, skill, tiling


def measure(x, segments, ids, rows, block_size, **kwargs):
    inputs = (x.query, x.key, x.index_query, x.index_key)
    return selection_quality(*inputs, ids, segments, torch.tensor(rows), block_size=block_size, **kwargs)


def ids_of(x, segments, block_size, k):
    return select_blocks(x.index_query, x.index_key, segments, block_size=block_size, num_selected_blocks=k)[0]


def assert_equal_sums(actual, expected, atol):
    for field in dataclasses.fields(SelectionQuality):
        one, other = getattr(actual, field.name), expected[field.name]
        if isinstance(one, int):
            assert one == other, field.name
        else:
            other = torch.as_tensor(other, dtype=torch.float64)
            torch.testing.assert_close(one, other, rtol=0, atol=atol, msg=lambda m, n=field.name: f"{n}: {m}")


@pytest.mark.parametrize("support", ["kept", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_oracle(oracle, make_inputs, layout, support, dtype):
    fragments, num_queries, num_keys = layout
    x = make_inputs(num_queries, num_keys, dtype=dtype)
    segments = Segments(*layout)
    ids = ids_of(x, segments, 2, 4)
    rows = [row for row in range(num_queries) if row % 4 != 1]
    exact = (tensor.double() for tensor in (x.query, x.key, x.index_query, x.index_key))
    expected = oracle.quality(*exact, ids, fragments, rows, block_size=2, support=support)
    assert expected["num_long_rows"] > 0
    assert_equal_sums(measure(x, segments, ids, rows, 2, support=support), expected, 1e-12)


def by_hand(block_mass, index_mass, k):
    """One document with one token a block; the last row has the given main and index probabilities."""
    length = len(block_mass)
    x = SimpleNamespace(
        query=torch.ones(length, 1, 1, dtype=torch.float64),
        key=torch.tensor(block_mass, dtype=torch.float64).log().reshape(-1, 1, 1),
        index_query=torch.ones(length, 1, 1, dtype=torch.float64),
        index_key=torch.tensor(index_mass, dtype=torch.float64).log().reshape(-1, 1),
    )
    segments = Segments.from_cu_seqlens([0, length])
    return x, segments, ids_of(x, segments, 1, k)


def test_measures_by_hand():
    """I* = {0, 2}, I = {2, 4} (the local block 4 is forced, then the index's favourite 2)."""
    x, segments, ids = by_hand([0.4, 0.1, 0.3, 0.15, 0.05], [0.1, 0.1, 0.5, 0.2, 0.1], 2)
    assert ids[4, 0].tolist() == [2, 4]
    quality = measure(x, segments, ids, [4], 1)
    assert (quality.num_rows, quality.num_long_rows) == (1, 1)
    kept_main, kept_index = [0.3 / 0.35, 0.05 / 0.35], [0.5 / 0.6, 0.1 / 0.6]
    expected = {
        "block_recall": 1 / 2,
        "score_recall": 0.3 / 0.7,
        "captured_mass": 0.35,
        # One of the four others is drawn.
        "random_block_recall": (1 / 4 + 1 / 4) / 2,
        "random_score_recall": 1 / 4,
        "kl": sum(p * math.log(p / s) for p, s in zip(kept_main, kept_index, strict=True)),
        "kl_uniform": sum(p * math.log(2 * p) for p in kept_main),
        "entropy": -sum(s * math.log(s) for s in kept_index),
        "local_fraction": 0.1 / 0.6,
        "sink_fraction": 0.0,
    }
    for name, value in expected.items():
        assert getattr(quality, name).tolist() == pytest.approx([value], abs=1e-12), name
    assert quality.block_skill.item() == pytest.approx((1 / 2 - 1 / 4) / (3 / 4))
    assert quality.score_skill.item() == pytest.approx((3 / 7 - 1 / 4) / (3 / 4))
    full = measure(x, segments, ids, [4], 1, support="full")
    assert full.sink_fraction.item() == pytest.approx(0.1) and full.local_fraction.item() == pytest.approx(0.1)
    main, index = [0.4, 0.1, 0.3, 0.15, 0.05], [0.1, 0.1, 0.5, 0.2, 0.1]
    assert full.kl.item() == pytest.approx(sum(p * math.log(p / s) for p, s in zip(main, index, strict=True)))


def test_perfect_and_equal_masses():
    """Equal masses: I* takes the lowest ids; it does not force the local block."""
    x, segments, ids = by_hand([0.2] * 5, [0.2] * 5, 3)
    quality = measure(x, segments, ids, [4], 1)
    assert ids[4, 0].tolist() == [0, 1, 4]
    assert quality.block_recall.item() == pytest.approx(2 / 3)
    assert quality.kl.item() == pytest.approx(0, abs=1e-15)
    x, segments, ids = by_hand([0.1, 0.1, 0.3, 0.1, 0.4], [0.1, 0.1, 0.3, 0.1, 0.4], 2)
    quality = measure(x, segments, ids, [4], 1)
    assert quality.block_recall.item() == 1 and quality.block_skill.item() == 1
    assert quality.score_recall.item() == pytest.approx(1) and quality.captured_mass.item() == pytest.approx(0.7)


def test_short_rows_count_in_kl_but_not_in_recall():
    x, segments, ids = by_hand([0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4], 3)
    quality = measure(x, segments, ids, [0, 1, 2], 1)
    assert (quality.num_rows, quality.num_long_rows) == (3, 0)
    assert quality.block_recall.item() == 0 and quality.captured_mass.item() == 0 and quality.kl.item() > 0
    assert quality.block_skill.isnan().all()


def test_sums_add_up_over_rows_ranks_and_vectors(make_inputs):
    x = make_inputs(26, 26)
    segments = Segments.from_cu_seqlens([0, 1, 14, 14, 23], 26)
    ids = ids_of(x, segments, 2, 3)
    rows = [22, 3, 13, 0, 25, 9, 17]
    whole = measure(x, segments, ids, rows, 2)
    parts = measure(x, segments, ids, rows[:3], 2) + measure(x, segments, ids, rows[3:], 2)
    assert whole.num_rows == 6
    assert_equal_sums(parts, vars(whole), 1e-13)
    back = SelectionQuality.from_vector(whole.to_vector())
    assert_equal_sums(back, vars(whole), 0)
    assert_equal_sums(whole + SelectionQuality.zeros(2), vars(whole), 0)
    summed = SelectionQuality.from_vector(whole.to_vector() * 2)
    assert (summed.num_rows, summed.num_long_rows) == (12, 2 * whole.num_long_rows)
    assert torch.equal(summed.kl, whole.kl * 2)


def test_no_rows_is_zero(make_inputs):
    x = make_inputs(5, 5)
    segments = Segments.from_cu_seqlens([0, 4], 5)
    quality = selection_quality(
        x.query,
        x.key,
        x.index_query,
        x.index_key,
        ids_of(x, segments, 2, 1),
        segments,
        torch.tensor([4]),
        block_size=2,
    )
    assert_equal_sums(quality, vars(SelectionQuality.zeros(2)), 0)


def test_layout_and_tiles_change_nothing(make_inputs, monkeypatch):
    """The same rows through fragments, in tiles of 2, with poisoned padding."""
    x = make_inputs(19, 19)
    segments = Segments.from_cu_seqlens([0, 17], 19)
    ids = ids_of(x, segments, 2, 3)
    whole = measure(x, segments, ids, [4, 6, 13, 14, 16], 2)
    for name in vars(x):
        getattr(x, name)[17:] = math.nan
    local = [3, 4, 5, 6, 12, 13, 14, 15, 16]
    x.query, x.index_query = x.query[local], x.index_query[local]
    fragments = Segments(rows=((0, 4, 0, 7), (4, 5, 0, 17)), num_queries=9, num_keys=19)
    monkeypatch.setattr(tiling, "QUERY_TILE", 2)
    parts = measure(x, fragments, ids[local], [1, 3, 5, 6, 8], 2)
    assert_equal_sums(parts, vars(whole), 1e-13)


def test_skill():
    recall, random = torch.tensor([0.6, 0.2, 1.0]), torch.tensor([0.2, 0.2, 0.5])
    torch.testing.assert_close(skill(recall, random), torch.tensor([0.5, 0.0, 1.0]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rows": torch.tensor([0, 6])}, r"rows reach from 0 to 6 but the query rows are 0\.\.5"),
        ({"rows": torch.tensor([-1])}, r"rows reach from -1 to -1 but the query rows are 0\.\.5"),
        ({"rows": torch.tensor([1.0])}, r"rows must be int64 .* got torch.float32 \(1,\)"),
        ({"support": "all"}, r"unknown support 'all'\. Use one of: kept, full"),
        ({"key": torch.zeros(6, 4, 8)}, r"index_query has 2 groups but key has 4"),
        ({"block_size": 0}, r"block_size \(0\) must be at least 1"),
        ({"block_indices": torch.full((6, 2, 1), 5).int()}, r"block_indices\[0, 0\] is \[5\]"),
        ({"index_key": torch.zeros(6, 4)}, r"index_query must be .* got \(6, 2, 5\) and \(6, 4\)"),
        ({"softmax_scale": 0.0}, r"softmax_scale \(0.0\) must be positive"),
    ],
)
def test_refusals(change, message):
    arguments = {
        "query": torch.zeros(6, 4, 8),
        "key": torch.zeros(6, 2, 8),
        "index_query": torch.zeros(6, 2, 5),
        "index_key": torch.zeros(6, 5),
        "block_indices": torch.zeros(6, 2, 1, dtype=torch.int32),
        "segments": Segments.from_cu_seqlens([0, 6]),
        "rows": torch.tensor([0, 5]),
        "block_size": 4,
    }
    with pytest.raises(ValueError, match=message):
        selection_quality(**(arguments | change))


@pytest.mark.parametrize("vector", [torch.zeros(2), torch.zeros(13), torch.zeros(2, 12)])
def test_refuses_a_vector_of_another_size(vector):
    with pytest.raises(ValueError, match=r"the vector must be \[2 \+ 10 g\]; got"):
        SelectionQuality.from_vector(vector)
