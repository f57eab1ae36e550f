"""Which queries chose each block: the order in which the keys-outer kernels work.

A *pair* is one kept block of one (query, group): number `(query * g + group) * k + slot`, which is also where the
kernels put its partial results. A *row* is all pairs of one (query chunk, group, block). Rows are cut into *items* of
at most `item_queries` pairs, one program each, so that a block that every query keeps does not become one long program.

Example: l=4, one document of 9 tokens, g=1, k=2, ids of queries 0..8: [0,-1] x4, [0,1] x4, [0,2]. Row of block 0: pairs
0, 2, 4, 6 (its own queries, which need the causal mask), then 8, 10, 12, 14, 16; row of block 1: 9, 11, 13, 15; row of
block 2: 17. With items of 4 pairs: three items for block 0, one each for blocks 1 and 2.

One stable library sort and three kernels (reverse_index_kernel.py). Nothing is read back to the host: grids are upper
bounds and spare programs leave at once, so the index can be built inside a CUDA graph.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
from torch import Tensor

from ..segments import Segments
from ..tuning import tile_config
from .reverse_index_kernel import _find_rows_kernel, _number_items_kernel, _pair_keys_kernel

MAX_SHORT_KEY = 2**15 - 1
"""Keys up to this have 16 bits (64K tokens of 4 groups): the sort takes a step for each byte."""

SUMMED_TILES = 1024
"""Tiles of rows whose numbers of items are added in one step."""


@dataclass(frozen=True)
class ReverseIndex:
    """Device tensors are int32. Rows are numbered (chunk * g + group) * num_blocks + block."""

    pairs: Tensor
    """[t_q * g * k], sorted by row; in a row first the pairs whose query lies in the block, then by query row."""
    row_start: Tensor
    """[rows + 1]: the pairs of a row are `pairs[row_start[row] : row_start[row + 1]]`."""
    local_end: Tensor
    """[rows]: where the pairs that need the causal mask end."""
    row_item: Tensor
    """[rows + 1]: number of the row's first item."""
    row_slot: Tensor
    """[rows]: first gradient slot of a row of several items, counted from 0 in every chunk."""
    item_row: Tensor
    """[upper bound of items]: the row of each item; not written past the last one."""
    chunk_item: Tensor
    """[chunks + 1]: number of each chunk's first item."""
    query_chunk: int
    item_queries: int
    max_items: int
    """Most items that a chunk can have."""
    max_slots: int
    """Most gradient slots that a chunk can need."""

    @property
    def num_chunks(self) -> int:
        return self.chunk_item.shape[0] - 1


def document_tables(segments: Segments, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where queries and blocks lie, int32 on `device`, built once for the segments.

    query_table [t_q, 3]: number of the document's first block, position (-1 for padding), the query's own key row.
    block_table [blocks, 3]: first key row, number of keys, the document's last query row. Fragments with one k_start
    are one document, whose blocks are those of the longest range.
    """
    return (
        segments.cached(f"query_table_{block_size}", device, lambda: _tables(segments, block_size)[0]),
        segments.cached(f"block_table_{block_size}", device, lambda: _tables(segments, block_size)[1]),
    )


def _tables(segments: Segments, block_size: int) -> tuple[Tensor, Tensor]:
    lengths: dict[int, int] = {}
    last_query: dict[int, int] = {}
    for q_start, q_len, k_start, k_len in segments.rows:
        if q_len and k_len > lengths.get(k_start, 0):
            lengths[k_start], last_query[k_start] = k_len, q_start + q_len - 1
    counts = [-(-length // block_size) for length in lengths.values()]
    first_block = dict(zip(lengths, accumulate(counts, initial=0), strict=False))
    blocks = []
    for k_start, length in lengths.items():
        starts = torch.arange(0, length, block_size)
        num_keys = (length - starts).clamp(max=block_size)
        blocks.append(torch.stack([k_start + starts, num_keys, 0 * starts + last_query[k_start]], dim=1))
    block_table = torch.cat(blocks) if blocks else torch.empty(0, 3)
    query_table = torch.zeros(segments.num_queries, 3, dtype=torch.int32)
    query_table[:, 1] = -1
    for q_start, q_len, k_start, k_len in segments.rows:
        if q_len:
            rows = query_table[q_start : q_start + q_len]
            rows[:, 0] = first_block[k_start]
            rows[:, 1] = torch.arange(k_len - q_len, k_len)
            rows[:, 2] = rows[:, 1] + k_start
    return query_table, block_table.to(torch.int32)


def build_reverse_index(
    block_indices: Tensor,
    query_table: Tensor,
    num_blocks: int,
    *,
    block_size: int,
    query_chunk: int,
    item_queries: int,
) -> ReverseIndex:
    """Ids that are not visible to their query enter no row."""
    num_queries, num_groups, num_selected = block_indices.shape
    device = block_indices.device
    num_chunks = -(-num_queries // query_chunk)
    rows_per_chunk = num_groups * num_blocks
    num_rows = num_chunks * rows_per_chunk
    num_pairs = block_indices.numel()
    tile = tile_config("reverse_index", device, head_dim=0, itemsize=4)
    if max(num_pairs + tile.columns, 2 * (num_rows + tile.rows)) >= 2**31:
        raise ValueError(
            f"reverse index: {num_pairs} kept blocks in {num_rows} rows do not fit in 32-bit numbers. "
            "Attend to fewer queries in one call."
        )

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    key = torch.empty(num_pairs, dtype=torch.int16 if 2 * num_rows <= MAX_SHORT_KEY else torch.int32, device=device)
    copies = triton.cdiv(num_pairs, tile.columns)
    _pair_keys_kernel[(copies,)](
        block_indices, query_table, key, num_pairs, num_blocks, num_rows, query_chunk, *block_indices.stride(),
        NUM_GROUPS=num_groups, NUM_SELECTED=num_selected, BLOCK_SIZE=block_size, PAIRS=tile.columns,
        num_warps=tile.num_warps,
    )  # fmt: skip
    key, order = key.sort(stable=True)
    num_tiles = num_chunks * triton.cdiv(rows_per_chunk, tile.rows)
    pairs, row_start, local_end = new(num_pairs), new(num_rows + 1), new(num_rows)
    tile_totals = new(num_tiles, 2)
    _find_rows_kernel[(num_tiles + copies,)](
        key, order, pairs, row_start, local_end, tile_totals,
        num_pairs, num_pairs.bit_length(), num_rows, rows_per_chunk, num_tiles,
        ITEM=item_queries, ROWS=tile.rows, PAIRS=tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip
    row_item, row_slot, chunk_item = new(num_rows + 1), new(num_rows), new(num_chunks + 1)
    item_row = new(min(num_rows, num_pairs) + num_pairs // item_queries)
    _number_items_kernel[(num_tiles,)](
        row_start, tile_totals, row_item, row_slot, item_row, chunk_item, num_rows, rows_per_chunk,
        ITEM=item_queries, ROWS=tile.rows, TILES=SUMMED_TILES, num_warps=tile.num_warps,
    )  # fmt: skip
    chunk_pairs = min(query_chunk, num_queries) * num_groups * num_selected
    return ReverseIndex(
        pairs=pairs,
        row_start=row_start,
        local_end=local_end,
        row_item=row_item,
        row_slot=row_slot,
        item_row=item_row,
        chunk_item=chunk_item,
        query_chunk=query_chunk,
        item_queries=item_queries,
        max_items=min(rows_per_chunk, chunk_pairs) + chunk_pairs // item_queries,
        # A row of c > item_queries pairs has at most 2 c / item_queries items.
        max_slots=max(1, 2 * chunk_pairs // item_queries),
    )
