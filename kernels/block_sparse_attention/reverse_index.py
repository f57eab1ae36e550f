"""Which queries chose each block: the order in which the keys-outer kernels work.

A *pair* is one kept block of one (query, group): number `(query * g + group) * k + slot`, which is also where the
kernels put its partial results. A *row* is all pairs of one (query chunk, group, block). Rows are cut into *items* of
at most `item_queries` pairs, one program each, so that a block that every query keeps does not become one long program.

Example: l=4, one document of 9 tokens, g=1, k=2, ids of queries 0..8: [0,-1] x4, [0,1] x4, [0,2]. Row of block 0: pairs
0, 2, 4, 6 (its own queries, which need the causal mask), then 8, 10, 12, 14, 16; row of block 1: 9, 11, 13, 15; row of
block 2: 17. With items of 4 pairs: three items for block 0, one each for blocks 1 and 2.

One stable sort; nothing is read back to the host, so grids are upper bounds and spare programs leave at once.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..segments import Segments


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
    """[upper bound of items]: the row of each item."""
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
    if max(num_pairs, 2 * num_rows + 1) >= 2**31:
        raise ValueError(
            f"reverse index: {num_pairs} kept blocks in {num_rows} rows do not fit in 32-bit numbers. "
            "Attend to fewer queries in one call."
        )
    # [t_q, g]: first row of the query's document
    chunk = torch.arange(num_queries, device=device, dtype=torch.int32) // query_chunk
    group = torch.arange(num_groups, device=device, dtype=torch.int32)
    first_row = (chunk[:, None] * num_groups + group) * num_blocks + query_table[:, :1]
    position = query_table[:, 1, None, None]
    first_token = block_indices * block_size
    visible = (block_indices >= 0) & (first_token <= position)
    is_past = first_token + block_size <= position
    key = torch.where(visible, 2 * (first_row[:, :, None] + block_indices) + is_past, 2 * num_rows)
    key, pairs = key.flatten().sort(stable=True)
    borders = torch.searchsorted(key, torch.arange(2 * num_rows + 1, device=device, dtype=torch.int32), out_int32=True)
    row_start = borders[::2].contiguous()
    num_items = (row_start.diff() + (item_queries - 1)) // item_queries
    item_end = num_items.cumsum(0, dtype=torch.int32)
    slot_end = torch.where(num_items > 1, num_items, 0).view(num_chunks, rows_per_chunk).cumsum(1, dtype=torch.int32)
    row_slot = slot_end.flatten() - num_items
    zero = item_end.new_zeros(1)
    row_item = torch.cat([zero, item_end])
    max_items = min(num_rows, num_pairs) + num_pairs // item_queries
    item_number = torch.arange(max_items, device=device, dtype=torch.int32)
    chunk_pairs = min(query_chunk, num_queries) * num_groups * num_selected
    return ReverseIndex(
        pairs=pairs.to(torch.int32),
        row_start=row_start,
        local_end=borders[1::2].contiguous(),
        row_item=row_item,
        row_slot=row_slot,
        item_row=torch.searchsorted(item_end, item_number, right=True, out_int32=True),
        chunk_item=row_item[::rows_per_chunk].contiguous(),
        query_chunk=query_chunk,
        item_queries=item_queries,
        max_items=min(rows_per_chunk, chunk_pairs) + chunk_pairs // item_queries,
        # A row of c > item_queries pairs has at most 2 c / item_queries items.
        max_slots=max(1, 2 * chunk_pairs // item_queries),
    )
