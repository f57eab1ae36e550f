"""Block-sparse attention, the main branch of the sparse phase."""

from .op import sparse_attention

__all__ = ["sparse_attention"]
