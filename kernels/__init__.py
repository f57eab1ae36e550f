"""The ops of MSA. Each folder holds one: README.md, reference.py (the definition), op.py (the contract).

`torch.compile` of a surrounding model breaks its graph at each op: `Segments` are host integers that change with every
batch, and a graph that looked into them would be compiled again for each.
"""

from .block_selection import block_scores, raise_if_not_finite, select_blocks
from .block_sparse_attention import sparse_attention
from .decoding import decode_attention
from .dense_causal_attention import dense_attention
from .dense_training import attach_dense_kl
from .indexer_loss import dense_indexer_kl, sparse_indexer_kl
from .segments import Segments
from .selection_recall import SelectionQuality, selection_quality, skill
from .sparse_training import sparse_attention_with_kl

__all__ = [
    "Segments",
    "SelectionQuality",
    "attach_dense_kl",
    "block_scores",
    "decode_attention",
    "dense_attention",
    "dense_indexer_kl",
    "raise_if_not_finite",
    "select_blocks",
    "selection_quality",
    "skill",
    "sparse_attention",
    "sparse_attention_with_kl",
    "sparse_indexer_kl",
]
