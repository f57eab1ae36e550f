"""Which rows a Triton program works on: tables made from the host integers of `Segments`, copied once for a batch."""

import torch
from torch import Tensor

from .segments import Segments


def _spans(total: int, step: int) -> tuple[Tensor, Tensor]:
    """Firsts and lengths of the pieces of `range(total)` cut every `step`."""
    firsts = torch.arange(0, total, step, dtype=torch.int64)
    return firsts, (total - firsts).clamp(max=step)


def _build_query_tiles(segments: Segments, rows: int) -> Tensor:
    pieces = [torch.empty(0, 4, dtype=torch.int64)]
    for q_start, q_len, k_start, k_len in segments.rows:
        firsts, counts = _spans(q_len, rows)
        pieces.append(torch.stack([q_start + firsts, counts, k_len - q_len + firsts, k_start + 0 * firsts], dim=1))
    tiles = torch.cat(pieces)
    # Tiles that see the most keys start first, so that none of them is left over at the end.
    return tiles[(tiles[:, 1] + tiles[:, 2]).argsort(descending=True, stable=True)]


def query_tiles(segments: Segments, device: torch.device | str, *, rows: int) -> Tensor:
    """int64 [tiles, 4]: first query row, number of rows, position of the first row, key row of position 0.

    Example: one document of 5 tokens at key row 7 with its last 3 queries at rows 0..2, `rows=2`:
    [[0, 2, 2, 7], [2, 1, 4, 7]] before the longest come first.
    """
    return segments.cached(f"query_tiles_{rows}", device, lambda: _build_query_tiles(segments, rows))


def _build_key_tiles(segments: Segments, rows: int) -> Tensor:
    pieces = [torch.empty(0, 6, dtype=torch.int64)]
    for q_start, q_len, k_start, k_len in segments.rows:
        if q_len:
            firsts, counts = _spans(k_len, rows)
            same = 0 * firsts
            pieces.append(
                torch.stack([k_start + firsts, counts, firsts, same + q_start, same + q_len, same + k_len], dim=1)
            )
    return torch.cat(pieces)


def key_tiles(segments: Segments, device: torch.device | str, *, rows: int) -> Tensor:
    """int64 [tiles, 6]: first key row, number of rows, position of the first row, q_start, q_len, k_len.

    In fragment order; fragments without queries have none. With `rows` the block size, a tile is a KV block.
    """
    return segments.cached(f"key_tiles_{rows}", device, lambda: _build_key_tiles(segments, rows))
