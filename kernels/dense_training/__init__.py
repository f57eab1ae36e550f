from .op import attach_dense_kl

__all__ = ["attach_dense_kl"]
