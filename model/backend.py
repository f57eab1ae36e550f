"""`model.backend`: which library the norms and products of the layers come from.

Keys, shapes and marks of the parameters are the same under both, so a checkpoint of one loads in the other. Torch's
under both: norms of heads and index projections, whose weights pass through a tensor-parallel function first, the
router's product in fp32, embedding and head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .config import LayerBackend
from .grouped_product import TorchGroupedProduct
from .norm import RMSNorm


@dataclass(frozen=True)
class LayerModules:
    """What the layer specs name; `grouped_product` makes the products of the experts (`TorchGroupedProduct`)."""

    norm: type
    column_linear: type
    row_linear: type
    grouped_product: Callable[..., Any]


def layer_modules(backend: LayerBackend) -> LayerModules:
    """Imports Transformer Engine where it is asked for, and only there."""
    if backend is LayerBackend.torch:
        return LayerModules(RMSNorm, ColumnParallelLinear, RowParallelLinear, TorchGroupedProduct)
    from .te_grouped_product import TEGroupedProduct
    from .te_layers import TEColumnLinear, TERMSNorm, TERowLinear

    return LayerModules(TERMSNorm, TEColumnLinear, TERowLinear, TEGroupedProduct)
