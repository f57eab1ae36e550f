"""The KL loss that trains the indexer."""

from .op import dense_indexer_kl, sparse_indexer_kl

__all__ = ["dense_indexer_kl", "sparse_indexer_kl"]
