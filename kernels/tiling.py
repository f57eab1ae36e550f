"""What the reference ops share: tiles of query rows, their token masks, and putting row results back together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .segments import Segments

QUERY_TILE = 128
"""Query rows handled at once: a score tensor holds at most heads x QUERY_TILE x (visible keys) numbers."""

CHECKPOINT_PAIRS = 2**20
"""A fragment with more (query, key) pairs than this is computed again in backward instead of kept by autograd."""


@dataclass(frozen=True)
class QueryTile:
    """Query rows `[q_start, q_end)` of one fragment and the key rows `[k_start, k_end)` that the last of them sees."""

    segment: int
    q_start: int
    q_end: int
    k_start: int
    k_end: int
    first_position: int

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_end)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_end)

    @property
    def num_keys(self) -> int:
        return self.k_end - self.k_start

    def positions(self, device: torch.device) -> Tensor:
        """int64 [rows]: position in the document of each query row."""
        return torch.arange(self.first_position, self.num_keys, device=device)

    def visible_tokens(self, device: torch.device) -> Tensor:
        """bool [rows, keys]: key position <= query position."""
        return torch.arange(self.num_keys, device=device) <= self.positions(device)[:, None]


def query_tiles(segments: Segments) -> Iterator[tuple[QueryTile, bool]]:
    """The tiles of all fragments in fragment order, each with whether autograd may not keep its scores."""
    for number, (q_start, q_len, k_start, k_len) in enumerate(segments.rows):
        for first in range(0, q_len, QUERY_TILE):
            last = min(first + QUERY_TILE, q_len)
            position = k_len - q_len + first
            tile = QueryTile(
                segment=number,
                q_start=q_start + first,
                q_end=q_start + last,
                k_start=k_start,
                k_end=k_start + position + last - first,
                first_position=position,
            )
            yield tile, q_len * k_len > CHECKPOINT_PAIRS


def kept_tokens(block_indices: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """bool [g, rows, keys]: the visible tokens of the kept blocks; block_indices [rows, g, k], visible [rows, keys]."""
    num_rows, num_groups, _ = block_indices.shape
    num_keys = visible.shape[1]
    num_blocks = -(-num_keys // block_size)
    # One spare column takes the -1 padding.
    kept = torch.zeros(num_rows, num_groups, num_blocks + 1, dtype=torch.bool, device=visible.device)
    kept.scatter_(2, torch.where(block_indices < 0, num_blocks, block_indices).long(), True)
    # [g, rows, m]
    kept = kept[:, :, :num_blocks].transpose(0, 1)
    return kept.repeat_interleave(block_size, dim=2)[:, :, :num_keys] & visible


def token_mask(tile: QueryTile, block_indices: Tensor | None, block_size: int, device: torch.device) -> Tensor:
    """bool [g, rows, keys]: what each row attends to. Without ids all visible tokens, [1, rows, keys]."""
    visible = tile.visible_tokens(device)
    if block_indices is None:
        return visible[None]
    return kept_tokens(block_indices, visible, block_size)


def mask_floor(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: 0 in the mask, a huge negative number outside.

    The number is finite, so that a row without tokens meets no inf - inf, in forward or in backward.
    """
    return mask.to(dtype).sub_(1).mul_(torch.finfo(dtype).max / 2)


def masked_softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [..., keys] within the mask, exactly 0 outside, and lse [...], not differentiable.

    The mask broadcasts against the scores. A row without tokens has lse -inf and meaningless (finite) probabilities:
    the caller zeroes what it makes of them.
    """
    scores = scores + mask_floor(mask, scores.dtype)
    probs = scores.softmax(dim=-1)
    with torch.no_grad():
        # The largest probability is exp(largest score - lse); this spares a second pass of exponentials.
        largest = scores.amax(dim=-1)
        lse = largest - probs.amax(dim=-1).log()
        lse = lse.masked_fill(largest < torch.finfo(scores.dtype).min / 4, -torch.inf)
    return probs, lse


def run_tile(function: Callable[..., Any], *args: Any, bounded: bool) -> Any:
    """Call `function`; with `bounded`, autograd keeps only the arguments and computes the rest again in backward."""
    if bounded and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


def split_rows(tensor: Tensor, tiles: Sequence[QueryTile]) -> list[Tensor]:
    """The query rows of each tile, cut at once: backward then joins them instead of adding one full tensor a tile."""
    order = sorted(range(len(tiles)), key=lambda number: tiles[number].q_start)
    sizes: list[int] = []
    end = 0
    for number in order:
        tile = tiles[number]
        sizes += [tile.q_start - end, tile.q_end - tile.q_start]
        end = tile.q_end
    sizes.append(tensor.shape[0] - end)
    # Gaps and tiles alternate.
    pieces = tensor.split(sizes)[1::2]
    return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda item: item[0])]


def join_rows(pieces: Sequence[tuple[int, Tensor]], like: Tensor, fill: float) -> Tensor:
    """Row pieces `(first row, [rows, ...])` as one tensor shaped like `like`, with `fill` in the rows of no piece."""
    parts: list[Tensor] = []
    end = 0
    for start, piece in sorted(pieces, key=lambda item: item[0]):
        if start > end:
            parts.append(like.new_full((start - end, *like.shape[1:]), fill))
        parts.append(piece)
        end = start + piece.shape[0]
    if end < like.shape[0] or not parts:
        parts.append(like.new_full((like.shape[0] - end, *like.shape[1:]), fill))
    return torch.cat(parts)


def zero_of(*inputs: Tensor) -> Tensor:
    """A zero that depends on `inputs` without reading them, so that a batch of padding alone has zero gradients."""
    return torch.stack([tensor[:0].sum() for tensor in inputs]).sum()


def group_heads(query: Tensor, num_groups: int) -> Tensor:
    """[rows, n, d] to [g, n/g, rows, d]; head h belongs to group h // (n/g)."""
    num_rows, num_heads, head_dim = query.shape
    return query.reshape(num_rows, num_groups, num_heads // num_groups, head_dim).permute(1, 2, 0, 3)


def grouped_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale * <query, key> as [g, n/g, rows, keys]; query [rows, n, d], key [keys, g, d]."""
    num_groups = key.shape[1]
    # [g, n/g, rows, d]
    grouped = group_heads(query * scale, num_groups)
    heads_per_group, num_rows = grouped.shape[1:3]
    scores = grouped.reshape(num_groups, heads_per_group * num_rows, -1) @ key.permute(1, 2, 0)
    return scores.view(num_groups, heads_per_group, num_rows, key.shape[0])
