"""What the launches of the Hopper kernels share. Gluon is imported only where one runs."""

from typing import Any

import torch
from torch import Tensor

SWIZZLE_BYTES = 128
ALIGNMENT = 16
"""Bytes that TMA asks of addresses and strides."""


def takes_hopper(*tensors: Tensor) -> bool:
    """Whether these tensors are such as the kernels take: in 16 bits, on a GPU of compute capability 9.0."""
    return all(
        tensor.is_cuda
        and tensor.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(tensor.device) == (9, 0)
        for tensor in tensors
    )


def describe(tensor: Tensor, box: list[int]) -> Any:
    """TMA descriptor of a 16-bit tensor for copies of `box` elements; what TMA cannot read is copied first."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    places = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    if tensor.stride(-1) != 1 or any(place % ALIGNMENT for place in places):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(tensor, box, NVMMASharedLayout(SWIZZLE_BYTES, 16, len(box)))
