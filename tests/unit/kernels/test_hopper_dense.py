"""The items of the Hopper kernel of the full-sequence KL cover what the rows see once, and end together."""

import pytest
import torch

from msa_pretrain.kernels import Segments
from msa_pretrain.kernels.indexer_loss import hopper_dense_launch
from msa_pretrain.kernels.indexer_loss.dense_gradient import chunk_rows
from msa_pretrain.kernels.indexer_loss.hopper_dense_launch import (
    KEYS,
    build_items,
    makespan,
    takes_hopper_dense,
)

HEADS = 16


def covered(segments, num_groups, windows):
    """How often each (query row, key row) lies in a tile, and the tiles of each item."""
    count = torch.zeros(segments.num_queries, segments.num_keys + KEYS, dtype=torch.int64)
    tiles = []
    for first_key, num_keys in windows:
        for row, rows, position, key, first, size in build_items(
            segments, num_groups, HEADS + 1, first_key, num_keys
        ).tolist():
            assert position == segments.positions("cpu")[row]
            assert first_key <= first * KEYS and (first + size) * KEYS <= first_key + num_keys
            count[row : row + rows, key + first * KEYS : key + (first + size) * KEYS] += 1
            tiles.append(size)
    return count, tiles


@pytest.mark.parametrize("windows", [[(0, 1024)], [(0, 256), (256, 512), (768, 256)]], ids=["one", "three"])
@pytest.mark.parametrize("num_groups", [1, 400])
def test_every_visible_key_is_made_once(num_groups, windows):
    segments = Segments(((700, 500, 3, 900), (0, 700, 903, 700), (1201, 1, 100, 1)), 1210, 1610)
    count, _ = covered(segments, num_groups, windows)
    assert count.max() == 1
    for q_start, q_len, k_start, k_len in segments.rows:
        for query in range(q_len):
            assert (count[q_start + query, k_start : k_start + k_len - q_len + query + 1] == 1).all()
    assert (count[[1200, 1205]] == 0).all()


@pytest.mark.parametrize("tokens, num_groups, largest", [(1024, 4, 2), (2048, 4, 5), (2048, 8, 8), (8192, 4, 8)])
def test_items_as_large_as_lets_all_end_together(tokens, num_groups, largest):
    """The spans of the least makespan, by trying all; largest first."""
    items = build_items(Segments.from_cu_seqlens([0, tokens]), num_groups, HEADS + 1, 0, 8192)
    sizes = items[:, 5].tolist()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == largest
    assert sum(sizes) == sum(-(-(row + 64) // KEYS) for row in range(0, tokens, 64))


def test_a_makespan():
    """133 programs of 2 tiles on 132 multiprocessors: two after one another, 4 products to start and 3 a tile each."""
    assert makespan([2] * 133, 1, 3) == makespan([2] * 19, 7, 3) == 2 * (4 + 2 * 3)


@pytest.mark.parametrize("is_hopper", [True, False])
def test_a_hopper_takes_it(monkeypatch, is_hopper):
    query, index_query = (torch.zeros(4, heads, 128, dtype=torch.bfloat16) for heads in (64, 4))
    if is_hopper:
        monkeypatch.setattr(hopper_dense_launch, "takes_hopper", lambda *_: True)
    assert takes_hopper_dense(query, index_query) == is_hopper
    assert not takes_hopper_dense(query[:, :, :64], index_query) and not takes_hopper_dense(query.half(), index_query)


@pytest.mark.parametrize("groups, keys, rows", [(4, 16384, 8192), (8, 2**20, 128), (1, 256, 2**21)])
def test_rows_of_a_chunk(groups, keys, rows):
    """1 GiB in 16 bits, or 128 rows."""
    assert chunk_rows(groups, keys, 2) == rows
