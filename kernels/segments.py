"""Packed documents and query fragments: which query rows see which key rows.

Legend of all kernels: `t_q` query rows, `t_k` key rows (packed tokens), `n` query heads, `g` KV groups, `d` head dim,
`i` index head dim, `m` KV blocks, `l` block length, `k` blocks kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


# Not to be changed, but not frozen either: torch.compile (2.11) looks into frozen dataclasses that pass by, and would
# compile again for every number of documents.
@dataclass(unsafe_hash=True)
class Segments:
    """The query fragments of one packed batch.

    Each row is `(q_start, q_len, k_start, k_len)` in host integers: the queries `[q_start, q_start + q_len)` are the
    last `q_len` positions of the document prefix whose keys are `[k_start, k_start + k_len)` (bottom-right alignment).
    Query `i` of the fragment has position `k_len - q_len + i` and sees the keys of positions 0 to its own. Key ranges
    start at the first token of their document and may overlap (two nested prefixes of one document); query ranges may
    not. Rows in no range are padding: nothing reads them, and every op returns zeros (lse: -inf, ids: -1) there.

    Example: one document of 6 tokens whose tokens 2, 3 and 5 are the local queries, stored as rows 0, 1, 2:
    `Segments(rows=((0, 2, 0, 4), (2, 1, 0, 6)), num_queries=3, num_keys=6)` has positions [2, 3, 5].
    """

    rows: tuple[tuple[int, int, int, int], ...]
    num_queries: int
    num_keys: int
    _cache: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _parts: dict[int, tuple["Segments", "Segments"]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _chunks: dict[int, tuple["Segments", ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        if self.num_queries < 0 or self.num_keys < 0:
            raise ValueError(
                f"Segments: num_queries ({self.num_queries}) and num_keys ({self.num_keys}) must not be negative. "
                "Pass the number of rows of the query and key tensors."
            )
        for number, row in enumerate(self.rows):
            if len(row) != 4:
                raise ValueError(
                    f"Segments: fragment {number} is {row}. Give four integers: (q_start, q_len, k_start, k_len)."
                )
            q_start, q_len, k_start, k_len = row
            if min(row) < 0:
                raise ValueError(
                    f"Segments: fragment {number} {row} has a negative number. Starts and lengths are >= 0."
                )
            if q_len > k_len:
                raise ValueError(
                    f"Segments: fragment {number} {row} has q_len ({q_len}) > k_len ({k_len}). The queries are the "
                    "last q_len positions of the key range, so the key range must hold at least as many tokens."
                )
            if q_start + q_len > self.num_queries:
                raise ValueError(
                    f"Segments: fragment {number} {row} ends at query row {q_start + q_len}, past num_queries "
                    f"({self.num_queries}). Shorten the range or pass the tensor's real number of rows."
                )
            if k_start + k_len > self.num_keys:
                raise ValueError(
                    f"Segments: fragment {number} {row} ends at key row {k_start + k_len}, past num_keys "
                    f"({self.num_keys}). Shorten the range or pass the tensor's real number of rows."
                )
        end, owner = 0, -1
        for q_start, q_len, number in sorted(
            (row[0], row[1], number) for number, row in enumerate(self.rows) if row[1]
        ):
            if q_start < end:
                raise ValueError(
                    f"Segments: the query ranges of fragments {owner} {self.rows[owner]} and {number} "
                    f"{self.rows[number]} overlap. Each query row belongs to one fragment at most."
                )
            end, owner = q_start + q_len, number

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int], num_tokens: int | None = None) -> "Segments":
        """Whole documents `[cu_seqlens[j], cu_seqlens[j + 1])`, queries and keys being the same packed tokens.

        Zero-length documents are allowed. Tokens from the last border to `num_tokens` are padding in no document.
        """
        borders = [int(border) for border in cu_seqlens]
        if not borders or borders[0] != 0:
            raise ValueError(f"Segments: cu_seqlens must start with 0; got {borders[:8]}. Prepend the first border.")
        for number, (start, end) in enumerate(pairwise(borders)):
            if end < start:
                raise ValueError(
                    f"Segments: cu_seqlens decreases from {start} to {end} at document {number}. "
                    "Borders are cumulative lengths."
                )
        num_tokens = borders[-1] if num_tokens is None else num_tokens
        if borders[-1] > num_tokens:
            raise ValueError(
                f"Segments: the last border of cu_seqlens ({borders[-1]}) is past num_tokens ({num_tokens}). "
                "Pass the number of packed tokens, padding included."
            )
        rows = tuple((start, end - start, start, end - start) for start, end in pairwise(borders))
        return cls(rows=rows, num_queries=num_tokens, num_keys=num_tokens)

    @property
    def num_segments(self) -> int:
        return len(self.rows)

    @property
    def num_valid_rows(self) -> int:
        """Query rows that lie in a document."""
        return sum(row[1] for row in self.rows)

    @property
    def max_q_len(self) -> int:
        return max((row[1] for row in self.rows), default=0)

    @property
    def max_k_len(self) -> int:
        return max((row[3] for row in self.rows), default=0)

    def split_at(self, num_keys: int) -> tuple["Segments", "Segments"]:
        """(fragments of at most `num_keys` keys, longer ones) of the same tensors; each sees the other's as padding."""
        if num_keys not in self._parts:
            short = tuple(row for row in self.rows if row[3] <= num_keys)
            long = tuple(row for row in self.rows if row[3] > num_keys)
            self._parts[num_keys] = (
                Segments(short, self.num_queries, self.num_keys),
                Segments(long, self.num_queries, self.num_keys),
            )
        return self._parts[num_keys]

    def chunks(self, num_rows: int) -> tuple["Segments", ...]:
        """The fragments `num_rows` query rows at a time, each with the keys that its last query sees; none is empty.

        Example: one document of 6 tokens by 4 rows: its first 4 tokens, and queries 4 and 5 with all 6 keys.
        """
        if num_rows not in self._chunks:
            parts = []
            for first in range(0, self.num_queries, num_rows):
                rows = []
                for q_start, q_len, k_start, k_len in self.rows:
                    start, end = max(q_start, first), min(q_start + q_len, first + num_rows)
                    if start < end:
                        rows.append((start, end - start, k_start, k_len - (q_start + q_len - end)))
                if rows:
                    parts.append(Segments(tuple(rows), self.num_queries, self.num_keys))
            self._chunks[num_rows] = tuple(parts)
        return self._chunks[num_rows]

    def table(self, device: torch.device | str) -> Tensor:
        """`rows` as int64 [num_segments, 4] on `device`, built once for a device."""
        return self.cached("table", device, self._build_table)

    def positions(self, device: torch.device | str) -> Tensor:
        """int64 [t_q]: position in the document of each query row; 0 for padding rows."""
        return self.cached("positions", device, self._build_positions)

    def query_mask(self, device: torch.device | str) -> Tensor:
        """bool [t_q]: whether the query row lies in a document."""
        return self.cached("query_mask", device, self._build_query_mask)

    def cached(self, name: str, device: torch.device | str, build: Callable[[], Tensor]) -> Tensor:
        """The tensor that `build` makes on the CPU, on `device`: built and copied once for a name and device.

        The copy to a GPU does not wait for it.
        """
        place = torch.device(device)
        if (name, place) not in self._cache:
            tensor = build()
            if place.type == "cuda":
                tensor = tensor.pin_memory().to(place, non_blocking=True)
            self._cache[name, place] = tensor
        return self._cache[name, place]

    def _build_table(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int64).reshape(-1, 4)

    def _build_positions(self) -> Tensor:
        positions = torch.zeros(self.num_queries, dtype=torch.int64)
        for q_start, q_len, _, k_len in self.rows:
            positions[q_start : q_start + q_len] = torch.arange(k_len - q_len, k_len)
        return positions

    def _build_query_mask(self) -> Tensor:
        mask = torch.zeros(self.num_queries, dtype=torch.bool)
        for q_start, q_len, _, _ in self.rows:
            mask[q_start : q_start + q_len] = True
        return mask
