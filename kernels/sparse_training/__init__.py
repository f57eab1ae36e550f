from .op import sparse_attention_with_kl

__all__ = ["sparse_attention_with_kl"]
