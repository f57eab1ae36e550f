"""Stand-in for Transformer Engine 2.11 on machines without CUDA: what this project and megatron-core 0.16.1 use of it.

Names, signatures and refusals are those of 2.11.0; values come from torch. megatron-core takes torch's own for whatever
is not here (its optimizers, for instance).
"""

from . import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.11.0"
