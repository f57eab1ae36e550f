"""Block selection in plain PyTorch: score every visible token, pool by block, rank, keep."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..segments import Segments
from ..tiling import QueryTile, join_rows, kept_tokens, masked_softmax, query_tiles


def index_dots(index_query: Tensor, index_key: Tensor) -> Tensor:
    """Raw dot products [g, rows, keys] in fp32 (fp64 for fp64 inputs); index_query [rows, g, i], index_key [keys, i].

    Summed in fp64 and rounded once: the bits then do not hang on how a matmul library tiles a given shape, so a
    fragment keeps the same blocks as the whole document.
    """
    dots = index_query.transpose(0, 1).double() @ index_key.double().T
    return dots if index_query.dtype == torch.float64 else dots.float()


def pool_blocks(dots: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """Maximum over each block's visible tokens [g, rows, m]; -inf where a block has none. -0 becomes +0."""
    masked = dots.masked_fill(~visible, -torch.inf)
    masked = F.pad(masked, (0, -masked.shape[2] % block_size), value=-torch.inf)
    return masked.unflatten(2, (-1, block_size)).amax(dim=3) + 0.0


def rank_blocks(scores: Tensor, positions: Tensor, *, block_size: int, num_selected: int, init_blocks: int) -> Tensor:
    """Kept ids int32 [rows, g, k] from block scores [g, rows, m]: ascending, -1 at the end.

    Example: l=4, position 9 (local block 2), scores [5, 7, 1], k=2: rank is 2 (local), 1, 0, so the ids are [1, 2].
    """
    num_blocks = scores.shape[2]
    block = torch.arange(num_blocks, device=scores.device)
    local = (positions // block_size)[:, None]
    # [rows, m]: 0 the local block, 1 the forced first blocks, 2 the other visible ones, 3 not visible.
    rank_class = torch.where(block < init_blocks, 1, 2).expand(len(positions), -1)
    rank_class = rank_class.masked_fill(block == local, 0).masked_fill(block > local, 3)
    # Stable sorts: equal scores keep their order, so the lower id wins; then the classes go first to last.
    order = scores.sort(dim=2, descending=True, stable=True).indices
    ranked_class, by_class = rank_class.expand_as(order).gather(2, order).sort(dim=2, stable=True)
    kept = order.gather(2, by_class)[:, :, :num_selected]
    # Ids of no visible block sort to the end, then become -1.
    kept = kept.masked_fill(ranked_class[:, :, :num_selected] == 3, num_blocks).sort(dim=2).values
    kept = F.pad(kept, (0, num_selected - kept.shape[2]), value=num_blocks)
    return kept.masked_fill(kept == num_blocks, -1).to(torch.int32).transpose(0, 1)


def check_finite(dots: Tensor, visible: Tensor, tile: QueryTile) -> None:
    # One non-finite number makes the sum non-finite; the exact look comes only then.
    if bool(dots.sum().isfinite()):
        return
    bad = ~dots.isfinite() & visible
    if bool(bad.any()):
        group, row, token = bad.nonzero()[0].tolist()
        raise ValueError(
            f"select_blocks: the index score of query row {tile.q_start + row} (document {tile.segment}, position "
            f"{tile.first_position + row}, group {group}) against the key at position {token} is "
            f"{dots[group, row, token].item()}. A non-finite score cannot be ranked: look for NaN or overflow in the "
            "index queries and keys."
        )


@torch.no_grad()
def block_scores(index_query: Tensor, index_key: Tensor, segments: Segments, *, block_size: int) -> Tensor:
    """Block scores as ranked (raw dot products) [t_q, g, m], m = blocks of the longest key range; -inf: no token."""
    num_rows, num_groups, _ = index_query.shape
    num_blocks = -(-segments.max_k_len // block_size)
    dtype = torch.promote_types(index_query.dtype, torch.float32)
    pieces = []
    for tile, _ in query_tiles(segments):
        visible = tile.visible_tokens(index_query.device)
        scores = pool_blocks(index_dots(index_query[tile.queries], index_key[tile.keys]), visible, block_size)
        scores = F.pad(scores, (0, num_blocks - scores.shape[2]), value=-torch.inf)
        pieces.append((tile.q_start, scores.transpose(0, 1)))
    like = index_query.new_empty((num_rows, num_groups, num_blocks), dtype=dtype)
    return join_rows(pieces, like, -torch.inf)


@torch.no_grad()
def select_blocks_reference(
    index_query: Tensor,
    index_key: Tensor,
    segments: Segments,
    *,
    block_size: int,
    num_selected_blocks: int,
    init_blocks: int,
) -> tuple[Tensor, Tensor]:
    """See `select_blocks`."""
    num_rows, num_groups, index_dim = index_query.shape
    id_pieces, lse_pieces = [], []
    for tile, _ in query_tiles(segments):
        device = index_query.device
        visible = tile.visible_tokens(device)
        # [g, rows, keys]
        dots = index_dots(index_query[tile.queries], index_key[tile.keys])
        check_finite(dots, visible, tile)
        ids = rank_blocks(
            pool_blocks(dots, visible, block_size),
            tile.positions(device),
            block_size=block_size,
            num_selected=num_selected_blocks,
            init_blocks=init_blocks,
        )
        support = kept_tokens(ids, visible, block_size)
        # A score that is not visible may be NaN or infinite.
        _, lse = masked_softmax((dots / math.sqrt(index_dim)).masked_fill(~support, 0.0), support)
        id_pieces.append((tile.q_start, ids))
        lse_pieces.append((tile.q_start, lse.transpose(0, 1)))
    ids_like = index_query.new_empty((num_rows, num_groups, num_selected_blocks), dtype=torch.int32)
    lse_like = index_query.new_empty(
        (num_rows, num_groups), dtype=torch.promote_types(index_query.dtype, torch.float32)
    )
    return join_rows(id_pieces, ids_like, -1), join_rows(lse_pieces, lse_like, -torch.inf)
