"""Tile sizes of the Triton kernels, by table: nothing is timed at run time, so every rank runs the same code."""

from dataclasses import dataclass

import torch

INTERPRETER = "interpreter"
"""The architecture of CPU tensors: Triton's interpreter."""


@dataclass(frozen=True)
class TileConfig:
    """`rows` x `columns` of a score tile, query rows x keys unless the table says otherwise, and the launch options."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# (op, architecture, head dim, n/g, bytes of an element); 0 stands for every value. The first match of
# `lookup_order` counts. Ops without heads, such as the index ones, have the index dim as head dim and n/g 0.
TABLE: dict[tuple[str, str, int, int, int], TileConfig] = {
    # Index scores: a key block serves 256 queries, and a third stage hides its reads.
    ("block_scores", "sm90", 0, 0, 2): TileConfig(256, 128, num_warps=16, num_stages=3),
    ("block_scores", "any", 0, 0, 2): TileConfig(128, 128, num_warps=8, num_stages=2),
    ("block_scores", "any", 0, 0, 4): TileConfig(64, 128, num_warps=8, num_stages=1),
    ("block_scores", INTERPRETER, 0, 0, 0): TileConfig(128, 128, num_warps=4, num_stages=1),
    # Documents that keep all their blocks; columns: a block.
    ("select_all", "any", 0, 0, 2): TileConfig(64, 0, num_warps=4, num_stages=3),
    ("select_all", "any", 0, 0, 4): TileConfig(32, 0, num_warps=4, num_stages=1),
    ("select_all", INTERPRETER, 0, 0, 0): TileConfig(128, 0, num_warps=4, num_stages=1),
    # Rows ranked by one program, block scores looked at in one step; more than one warp is 4 times slower.
    ("rank_blocks", "any", 0, 0, 0): TileConfig(8, 32, num_warps=1, num_stages=1),
    ("rank_blocks", INTERPRETER, 0, 0, 0): TileConfig(128, 64, num_warps=4, num_stages=1),
    # Rows gathered at once; columns: rows of one work item.
    ("kept_lse", "any", 0, 0, 2): TileConfig(128, 512, num_warps=4, num_stages=3),
    ("kept_lse", "any", 0, 0, 4): TileConfig(32, 512, num_warps=4, num_stages=1),
    ("kept_lse", INTERPRETER, 0, 0, 0): TileConfig(64, 128, num_warps=4, num_stages=1),
    # Decoding: columns are blocks of one program in the scan of the index keys and in the ranking; then keys of a step.
    ("decode_scan", "any", 0, 0, 0): TileConfig(16, 8, num_warps=4, num_stages=3),
    ("decode_scan", INTERPRETER, 0, 0, 0): TileConfig(16, 4, num_warps=4, num_stages=1),
    ("decode_rank", "any", 0, 0, 0): TileConfig(1, 128, num_warps=1, num_stages=1),
    ("decode_rank", INTERPRETER, 0, 0, 0): TileConfig(1, 64, num_warps=1, num_stages=1),
    ("decode_merge", "any", 0, 0, 0): TileConfig(1, 1024, num_warps=4, num_stages=1),
    ("decode_merge", INTERPRETER, 0, 0, 0): TileConfig(1, 64, num_warps=4, num_stages=1),
    # Full-sequence KL; the backward's columns are keys of one program.
    ("dense_kl_fwd", "sm90", 0, 0, 2): TileConfig(128, 128, num_warps=8, num_stages=3),
    ("dense_kl_fwd", "any", 0, 0, 2): TileConfig(64, 64, num_warps=4, num_stages=2),
    ("dense_kl_fwd", "any", 0, 0, 4): TileConfig(32, 32, num_warps=4, num_stages=1),
    ("dense_kl_fwd", INTERPRETER, 0, 0, 0): TileConfig(128, 128, num_warps=4, num_stages=1),
    ("dense_kl_bwd", "sm90", 0, 0, 2): TileConfig(128, 128, num_warps=8, num_stages=3),
    ("dense_kl_bwd", "any", 0, 0, 2): TileConfig(64, 64, num_warps=4, num_stages=2),
    ("dense_kl_bwd", "any", 0, 0, 4): TileConfig(32, 32, num_warps=4, num_stages=1),
    ("dense_kl_bwd", INTERPRETER, 0, 0, 0): TileConfig(128, 128, num_warps=4, num_stages=1),
    # The same on Hopper: the student's lse, then the products with the score gradient.
    ("dense_student", "sm90", 0, 0, 2): TileConfig(128, 128, num_warps=8, num_stages=2),
    ("dense_student", INTERPRETER, 0, 0, 0): TileConfig(128, 128, num_warps=4, num_stages=1),
    ("dense_kl_products", "sm90", 0, 0, 2): TileConfig(128, 128, num_warps=8, num_stages=3),
    ("dense_kl_products", INTERPRETER, 0, 0, 0): TileConfig(128, 128, num_warps=4, num_stages=1),
    # Rows: queries x heads of a tile; columns: queries of one work item.
    ("sparse_attention_fwd", "sm90", 0, 0, 2): TileConfig(64, 512, num_warps=4, num_stages=1),
    ("sparse_attention_fwd", "any", 0, 0, 2): TileConfig(64, 512, num_warps=4, num_stages=1),
    ("sparse_attention_fwd", "any", 0, 0, 4): TileConfig(16, 512, num_warps=8, num_stages=1),
    ("sparse_attention_fwd", INTERPRETER, 0, 0, 0): TileConfig(64, 64, num_warps=4, num_stages=1),
    ("sparse_attention_bwd", "sm90", 0, 0, 2): TileConfig(64, 1024, num_warps=8, num_stages=3),
    ("sparse_attention_bwd", "any", 0, 0, 2): TileConfig(64, 512, num_warps=8, num_stages=1),
    ("sparse_attention_bwd", "any", 0, 0, 4): TileConfig(16, 512, num_warps=8, num_stages=1),
    ("sparse_attention_bwd", INTERPRETER, 0, 0, 0): TileConfig(64, 64, num_warps=4, num_stages=1),
    # Queries outer. Rows: queries x heads of a tile; columns: keys of one step, at most a block.
    ("query_tile_fwd", "sm90", 0, 0, 2): TileConfig(64, 64, num_warps=4, num_stages=3),
    ("query_tile_fwd", "any", 0, 0, 2): TileConfig(64, 64, num_warps=4, num_stages=2),
    ("query_tile_fwd", "any", 0, 0, 4): TileConfig(16, 64, num_warps=4, num_stages=1),
    ("query_tile_fwd", INTERPRETER, 0, 0, 0): TileConfig(128, 64, num_warps=4, num_stages=1),
    # Rows: rows of the reverse index in one program; columns: pairs in one program.
    ("reverse_index", "any", 0, 0, 0): TileConfig(128, 1024, num_warps=4, num_stages=1),
    ("reverse_index", INTERPRETER, 0, 0, 0): TileConfig(64, 8192, num_warps=4, num_stages=1),
    # Rows: (query, head) rows of one program.
    ("combine_slots", "any", 0, 0, 0): TileConfig(16, 0, num_warps=4, num_stages=1),
    ("combine_slots", INTERPRETER, 0, 0, 0): TileConfig(256, 0, num_warps=4, num_stages=1),
    # Sparse KL. Rows: queries of a tile; columns: queries of one work item.
    ("sparse_kl_fwd", "sm90", 0, 0, 2): TileConfig(64, 512, num_warps=4, num_stages=3),
    ("sparse_kl_fwd", "any", 0, 0, 2): TileConfig(64, 512, num_warps=4, num_stages=1),
    ("sparse_kl_fwd", "any", 0, 0, 4): TileConfig(16, 512, num_warps=8, num_stages=1),
    ("sparse_kl_fwd", INTERPRETER, 0, 0, 0): TileConfig(64, 64, num_warps=4, num_stages=1),
    ("sparse_kl_bwd", "sm90", 0, 0, 2): TileConfig(64, 128, num_warps=8, num_stages=3),
    ("sparse_kl_bwd", "any", 0, 0, 2): TileConfig(64, 512, num_warps=8, num_stages=1),
    ("sparse_kl_bwd", "any", 0, 0, 4): TileConfig(16, 512, num_warps=8, num_stages=1),
    ("sparse_kl_bwd", INTERPRETER, 0, 0, 0): TileConfig(64, 64, num_warps=4, num_stages=1),
    # Sparse KL with the teacher read from memory. Rows: queries of a tile; the items are the attention's.
    ("sparse_kl_read", "sm90", 0, 0, 2): TileConfig(64, 0, num_warps=8, num_stages=2),
    ("sparse_kl_read", "any", 0, 0, 2): TileConfig(64, 0, num_warps=8, num_stages=1),
    ("sparse_kl_read", "any", 0, 0, 4): TileConfig(16, 0, num_warps=8, num_stages=1),
    ("sparse_kl_read", INTERPRETER, 0, 0, 0): TileConfig(64, 0, num_warps=4, num_stages=1),
    # (query, group) rows of one program.
    ("group_rows", "any", 0, 0, 0): TileConfig(32, 0, num_warps=4, num_stages=1),
    ("group_rows", INTERPRETER, 0, 0, 0): TileConfig(256, 0, num_warps=4, num_stages=1),
}

# (architecture, n/g, bytes of an element): documents of up to so many keys are faster by query tiles than keys outer in
# the forward of block-sparse attention. What is not here always goes keys outer.
QUERY_TILE_UP_TO: dict[tuple[str, int, int], int] = {
    ("sm90", 16, 2): 5120,
    ("sm90", 6, 2): 6144,
}


def architecture(device: torch.device) -> str:
    """`sm90` and the like; `interpreter` for the CPU."""
    if device.type == "cpu":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def lookup_order(
    op: str, arch: str, head_dim: int, heads_per_group: int, itemsize: int
) -> list[tuple[str, str, int, int, int]]:
    """The table keys that fit, from the most special to the most general."""
    archs = [arch] if arch == INTERPRETER else [arch, "any"]
    return [
        (op, place, dim, heads, size)
        for place in archs
        for dim in (head_dim, 0)
        for heads in (heads_per_group, 0)
        for size in (itemsize, 0)
    ]


def tile_config(op: str, device: torch.device, *, head_dim: int, heads_per_group: int = 0, itemsize: int) -> TileConfig:
    """The table's entry for this op; KeyError when the table has none (an internal error: every op has an entry)."""
    keys = lookup_order(op, architecture(device), head_dim, heads_per_group, itemsize)
    for key in keys:
        if key in TABLE:
            return TABLE[key]
    raise KeyError(f"tuning.TABLE has no entry for {keys[0]}")


def longest_query_tile_document(device: torch.device, *, heads_per_group: int, itemsize: int) -> int:
    """Keys of the longest document that block-sparse attention takes by query tiles; 0 for none."""
    return QUERY_TILE_UP_TO.get((architecture(device), heads_per_group, itemsize), 0)
