"""Process groups: torch.distributed, then Megatron's parallel state."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from .config import ParallelConfig
from .megatron_compat import megatron_on_cpu


@contextlib.contextmanager
def distributed() -> Iterator[None]:
    """Join the job torchrun started, or make a world of one. gloo without CUDA, else NCCL."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if on_gpu else "gloo"
    with megatron_on_cpu():
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def model_parallel(parallel: ParallelConfig, seed: int) -> Iterator[None]:
    """Megatron's process groups of one layout, inside `distributed`; and this rank's random states."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )
    try:
        torch.manual_seed(seed)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


def data_group() -> dist.ProcessGroup:
    """The ranks that read different tokens and hold the same dense weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
