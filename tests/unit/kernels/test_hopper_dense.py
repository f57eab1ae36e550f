"""The items of the Hopper kernel of the full-sequence KL's teacher cover what the rows see once."""

import pytest
import torch

from msa_pretrain.kernels import Segments
from msa_pretrain.kernels.indexer_loss.dense_gradient import chunk_rows
from msa_pretrain.kernels.indexer_loss.hopper_teacher_launch import (
    KEYS,
    PROGRAMS,
    build_items,
    takes_hopper_teacher,
)


def covered(segments, num_groups):
    """How often each (query row, key row) lies in a tile, and the tiles of each item."""
    count = torch.zeros(segments.num_queries, segments.num_keys + KEYS, dtype=torch.int64)
    items = build_items(segments, num_groups)
    for row, rows, key, first, tiles in items.tolist():
        count[row : row + rows, key + first * KEYS : key + (first + tiles) * KEYS] += 1
    return count, items[:, 4]


@pytest.mark.parametrize("num_groups", [1, 400])
def test_every_visible_key_is_made_once(num_groups):
    segments = Segments(((700, 500, 3, 900), (0, 700, 903, 700), (1201, 1, 100, 1)), 1210, 1610)
    count, tiles = covered(segments, num_groups)
    assert count.max() == 1 and (len(tiles) * num_groups >= PROGRAMS or tiles.max() == 1)
    for q_start, q_len, k_start, k_len in segments.rows:
        for query in range(q_len):
            assert (count[q_start + query, k_start : k_start + k_len - q_len + query + 1] == 1).all()
    assert (count[[1200, 1205]] == 0).all()


def test_large_items_where_there_are_many():
    _, one = covered(Segments.from_cu_seqlens([0, 4096]), 1)
    _, many = covered(Segments.from_cu_seqlens([0, 4096]), 100)
    assert one.max() == 1 and many.max() == 8


def test_nothing_but_a_hopper_takes_it():
    assert not takes_hopper_teacher(*(torch.zeros(4, heads, 128, dtype=torch.bfloat16) for heads in (64, 4)))


@pytest.mark.parametrize("groups, keys, rows", [(4, 32768, 4096), (8, 2**20, 128), (1, 256, 2**21)])
def test_rows_of_a_chunk(groups, keys, rows):
    """2 GiB of P, or 128 rows."""
    assert chunk_rows(groups, keys) == rows
