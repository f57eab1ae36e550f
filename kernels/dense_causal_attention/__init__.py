"""Dense causal attention, the main branch of the dense and warm-up phases."""

from .op import dense_attention

__all__ = ["dense_attention"]
