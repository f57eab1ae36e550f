"""What every Triton path checks before a launch, and the few things launches share."""

import os

import torch
from torch import Tensor

BACKENDS = ("reference", "triton")


def check_triton(op: str, *tensors: Tensor) -> None:
    """The tensors are on a GPU, or Triton's interpreter was asked for; fp16, bf16 (GPU only) or fp32."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(
                f"{op}: backend 'triton' supports float16, bfloat16 and float32; got {tensor.dtype}. "
                "Use backend='reference'."
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{op}: backend 'triton' supports CUDA tensors; got {tensor.device}. Use backend='reference'."
            )
        if tensor.device.type == "cpu":
            if os.environ.get("TRITON_INTERPRET") != "1":
                raise ValueError(
                    f"{op}: backend 'triton' got CPU tensors. Move them to a GPU, use backend='reference', or set "
                    "TRITON_INTERPRET=1 before the first import of Triton to interpret the kernels (slow)."
                )
            if tensor.dtype == torch.bfloat16:
                raise ValueError(
                    f"{op}: backend 'triton' got bfloat16 on the CPU, which Triton's interpreter computes wrongly. "
                    "Use float16 or float32 there."
                )


def check_choice(op: str, name: str, value: int, supported: tuple[int, ...]) -> None:
    if value not in supported:
        raise ValueError(
            f"{op}: backend 'triton' supports {name} {', '.join(map(str, supported))}; got {value}. "
            "Use a supported size or backend='reference'."
        )


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products in full: Triton's default, TF32, keeps 10 bits. It changes nothing for 16-bit operands."""
    return "ieee" if dtype == torch.float32 else "tf32"


def next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is dense, else a contiguous copy: kernels take all other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
