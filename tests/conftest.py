"""Without a GPU, kernels run in Triton's interpreter (set before any kernel import) and GPU tests say why they skip."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("multigpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs, found {gpus}"))
        elif item.get_closest_marker("gpu") and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: bf16 is wrong in Triton's CPU interpreter"))
