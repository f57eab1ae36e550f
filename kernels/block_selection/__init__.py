"""Block selection: which KV blocks each query keeps."""

from .op import select_blocks
from .reference import block_scores

__all__ = ["block_scores", "select_blocks"]
