"""Process groups: torch.distributed, then Megatron's parallel state."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

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
    parallel_state.initialize_model_parallel(**_sizes(parallel))
    try:
        torch.manual_seed(seed)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def fake_rank(parallel: ParallelConfig, rank: int, world_size: int) -> Iterator[None]:
    """Rank `rank` of `world_size` without any other process, GPU or message: for building on the meta device.

    Collectives return at once and compute nothing. Not inside `distributed`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's own tests; no part of a training run

    with megatron_on_cpu():
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(**_sizes(parallel), create_gloo_process_groups=False)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _sizes(parallel: ParallelConfig) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )


def data_group() -> dist.ProcessGroup:
    """The ranks that read different tokens and hold the same dense weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def token_group() -> dist.ProcessGroup:
    """The ranks that route different tokens: those of `data_group`, times the tensor-parallel ones (which share a
    sample's tokens, since MoE layers run under sequence parallelism)."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def model_group() -> dist.ProcessGroup:
    """The ranks that hold different parts of one copy of the model: tensor- and pipeline-parallel."""
    return parallel_state.get_model_parallel_group()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
