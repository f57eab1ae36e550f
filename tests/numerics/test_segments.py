"""Segments: fragments, positions, and every refusal."""

import pytest
import torch

from msa_pretrain.kernels import Segments


def test_cu_seqlens_with_an_empty_document_and_padding():
    segments = Segments.from_cu_seqlens([0, 3, 3, 5], num_tokens=7)
    assert segments.rows == ((0, 3, 0, 3), (3, 0, 3, 0), (3, 2, 3, 2))
    assert (segments.num_queries, segments.num_keys, segments.num_valid_rows) == (7, 7, 5)
    assert (segments.max_q_len, segments.max_k_len, segments.num_segments) == (3, 3, 3)
    assert segments.positions("cpu").tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert segments.query_mask("cpu").tolist() == [True] * 5 + [False] * 2


def test_fragments_are_the_causal_suffix_of_their_keys():
    segments = Segments(rows=((2, 2, 1, 6), (0, 1, 1, 4)), num_queries=5, num_keys=8)
    assert segments.positions("cpu").tolist() == [3, 0, 4, 5, 0]
    assert segments.query_mask("cpu").tolist() == [True, False, True, True, False]
    assert (segments.max_q_len, segments.max_k_len, segments.num_valid_rows) == (2, 6, 3)


def test_device_table_is_built_once():
    segments = Segments.from_cu_seqlens([0, 4, 9])
    assert segments.table("cpu").tolist() == [[0, 4, 0, 4], [4, 5, 4, 5]]
    assert segments.table("cpu").dtype == torch.int64
    assert segments.table("cpu") is segments.table(torch.device("cpu"))


def test_equal_segments_compare_equal_whatever_they_have_cached():
    one, two = Segments.from_cu_seqlens([0, 4]), Segments.from_cu_seqlens([0, 4])
    one.positions("cpu")
    assert one == two and hash(one) == hash(two)


def test_no_document_at_all():
    segments = Segments.from_cu_seqlens([0], num_tokens=3)
    assert segments.table("cpu").shape == (0, 4)
    assert (segments.max_q_len, segments.max_k_len, segments.num_valid_rows) == (0, 0, 0)
    assert segments.query_mask("cpu").tolist() == [False] * 3


@pytest.mark.parametrize(
    "rows, message",
    [
        (((0, 2, 0),), r"fragment 0 is \(0, 2, 0\)\. Give four integers"),
        (((0, 2, 0, 2), (2, -1, 2, 3)), r"fragment 1 \(2, -1, 2, 3\) has a negative number"),
        (((0, 4, 0, 3),), r"q_len \(4\) > k_len \(3\).*must hold at least as many tokens"),
        (((4, 3, 0, 5),), r"ends at query row 7, past num_queries \(6\)"),
        (((0, 3, 7, 5),), r"ends at key row 12, past num_keys \(9\)"),
        (((2, 3, 0, 5), (0, 3, 0, 4)), r"query ranges of fragments 1 \(0, 3, 0, 4\) and 0 \(2, 3, 0, 5\) overlap"),
    ],
)
def test_refuses_fragments(rows, message):
    with pytest.raises(ValueError, match=message):
        Segments(rows=rows, num_queries=6, num_keys=9)


def test_refuses_negative_sizes():
    with pytest.raises(ValueError, match=r"num_queries \(-1\) and num_keys \(4\) must not be negative"):
        Segments(rows=(), num_queries=-1, num_keys=4)


@pytest.mark.parametrize(
    "cu_seqlens, num_tokens, message",
    [
        ([], None, r"must start with 0; got \[\]"),
        ([2, 4], None, r"must start with 0; got \[2, 4\]"),
        ([0, 5, 3], None, r"decreases from 5 to 3 at document 1"),
        ([0, 5], 4, r"last border of cu_seqlens \(5\) is past num_tokens \(4\)"),
    ],
)
def test_refuses_cu_seqlens(cu_seqlens, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_cu_seqlens(cu_seqlens, num_tokens)
