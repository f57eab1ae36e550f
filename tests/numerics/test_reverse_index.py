"""The reverse index (kernels interpreted on the CPU) against a literal oracle, every number of it."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments
from msa_pretrain.kernels.block_sparse_attention import reverse_index
from msa_pretrain.kernels.block_sparse_attention.reverse_index import build_reverse_index, document_tables
from msa_pretrain.kernels.tuning import TileConfig

CPU = torch.device("cpu")


def literal_index(ids, segments, block_size, query_chunk, item_queries):
    """Lists of the fields of `ReverseIndex`, by loops over queries, groups and slots."""
    num_queries, num_groups, num_selected = ids.shape
    documents = {}
    for _, q_len, k_start, k_len in segments.rows:
        if q_len:
            documents[k_start] = max(documents.get(k_start, 0), math.ceil(k_len / block_size))
    num_blocks = sum(documents.values())
    first_block, count = {}, 0
    for k_start, blocks in documents.items():
        first_block[k_start], count = count, count + blocks
    num_chunks = math.ceil(num_queries / query_chunk)
    rows = [([], []) for _ in range(num_chunks * num_groups * num_blocks)]
    places = {}
    for q_start, q_len, k_start, k_len in segments.rows:
        places |= {q_start + i: (k_len - q_len + i, first_block[k_start]) for i in range(q_len)}
    for query in sorted(places):
        position, first = places[query]
        for group in range(num_groups):
            for slot, block in enumerate(ids[query, group].tolist()):
                if 0 <= block <= position // block_size:
                    row = (query // query_chunk * num_groups + group) * num_blocks + first + block
                    is_past = block < position // block_size
                    rows[row][is_past].append((query * num_groups + group) * num_selected + slot)
    names = ("pairs", "row_start", "local_end", "row_item", "row_slot", "item_row", "chunk_item")
    index = {name: [] for name in names}
    slots = 0
    for number, (own, past) in enumerate(rows):
        if number % (num_groups * num_blocks) == 0:
            index["chunk_item"].append(len(index["item_row"]))
            slots = 0
        index["row_start"].append(len(index["pairs"]))
        index["pairs"] += own
        index["local_end"].append(len(index["pairs"]))
        index["pairs"] += past
        items = math.ceil(len(own + past) / item_queries)
        index["row_item"].append(len(index["item_row"]))
        index["item_row"] += [number] * items
        slots += items if items > 1 else 0
        index["row_slot"].append(slots - items)
    index["row_start"].append(len(index["pairs"]))
    index["row_item"].append(len(index["item_row"]))
    index["chunk_item"].append(len(index["item_row"]))
    return index


def random_ids(segments, num_groups, block_size, k):
    """Ascending ids in random number, some past the query, and the first block in most rows."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = math.ceil(segments.max_k_len / block_size)
    score = torch.rand(segments.num_queries, num_groups, num_blocks + k, generator=generator)
    score[:, :, 0] += 0.7
    ids = score.topk(k, dim=2).indices.sort(dim=2).values
    return ids.masked_fill(ids >= num_blocks, -1).to(torch.int32)


LAYOUTS = {
    # Documents of 1, 40, 0, 16 and 90 tokens and padding.
    "packed": Segments.from_cu_seqlens([0, 1, 41, 41, 57, 147], 150),
    # The later of two nested ranges of one document comes first, so query order is not the order of positions.
    "fragments": Segments(((0, 25, 3, 98), (30, 17, 101, 17), (50, 40, 3, 60)), 93, 118),
    "one": Segments.from_cu_seqlens([0, 130]),
}


@pytest.mark.parametrize(
    "layout, query_chunk, item_queries, max_short_key",
    [("packed", 60, 4, 2**15), ("packed", 1000, 7, 0), ("fragments", 40, 4, 0), ("one", 1000, 512, 2**15)],
)
def test_every_number_is_that_of_the_definition(layout, query_chunk, item_queries, max_short_key, monkeypatch):
    """Several programs a chunk, keys of 16 and of 32 bits."""
    monkeypatch.setattr(reverse_index, "tile_config", lambda *_, **__: TileConfig(8, 256, num_warps=4, num_stages=1))
    monkeypatch.setattr(reverse_index, "SUMMED_TILES", 4)
    monkeypatch.setattr(reverse_index, "MAX_SHORT_KEY", max_short_key)
    segments = LAYOUTS[layout]
    ids = random_ids(segments, 2, 16, 3)
    query_table, block_table = document_tables(segments, 16, CPU)
    # Every third of the columns: strides are free.
    wide = torch.full((*ids.shape[:2], 9), 5, dtype=torch.int32)
    wide[:, :, ::3] = ids
    sizes = {"block_size": 16, "query_chunk": query_chunk, "item_queries": item_queries}
    index = build_reverse_index(wide[:, :, ::3], query_table, len(block_table), **sizes)
    for name, expected in literal_index(ids, segments, **sizes).items():
        tensor = getattr(index, name)
        assert tensor.dtype == torch.int32
        assert tensor[: len(expected)].tolist() == expected, name
        assert len(tensor) == len(expected) or name in ("pairs", "item_row"), name
    assert index.chunk_item.diff().max() <= index.max_items and index.num_chunks == math.ceil(len(ids) / query_chunk)
    per_row = index.row_item.diff().view(index.num_chunks, -1)
    assert torch.where(per_row > 1, per_row, 0).sum(1).max() <= index.max_slots


def test_more_pairs_than_32_bits_count_is_refused():
    ids = torch.empty(1, dtype=torch.int32).expand(2**27, 1, 16)
    with pytest.raises(ValueError, match="reverse index: 2147483648 kept blocks in 1 rows do not fit"):
        build_reverse_index(ids, ids, 1, block_size=16, query_chunk=2**27, item_queries=4)


def test_reverse_index_of_the_example():
    """The docstring's example: l=4, 9 tokens, k=2."""
    segments = Segments.from_cu_seqlens([0, 9])
    ids = torch.tensor([[0, -1]] * 4 + [[0, 1]] * 4 + [[0, 2]], dtype=torch.int32)[:, None]
    query_table, block_table = document_tables(segments, 4, torch.device("cpu"))
    assert block_table.tolist() == [[0, 4, 8], [4, 4, 8], [8, 1, 8]]
    assert query_table[:, 1].tolist() == query_table[:, 2].tolist() == list(range(9))
    index = build_reverse_index(ids, query_table, 3, block_size=4, query_chunk=100, item_queries=4)
    assert index.pairs[:14].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 9, 11, 13, 15, 17]
    assert index.row_start.tolist() == [0, 9, 13, 14] and index.local_end.tolist() == [4, 13, 14]
    assert index.row_item.tolist() == [0, 3, 4, 5] and index.chunk_item.tolist() == [0, 5]
    assert index.item_row[:5].tolist() == [0, 0, 0, 1, 2] and index.max_items >= 5
    assert index.row_slot[0] == 0 and index.max_slots >= 3
