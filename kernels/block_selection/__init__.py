"""Block selection: which KV blocks each query keeps."""

from .op import select_blocks
from .reference import block_scores
from .report import raise_if_not_finite

__all__ = ["block_scores", "raise_if_not_finite", "select_blocks"]
