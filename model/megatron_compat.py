"""Megatron-core 0.16.1 on a machine without CUDA, and the start-up check of tested versions.

Megatron names CUDA devices, streams and RNG states even where nothing needs a GPU. `megatron_on_cpu` replaces those
names so that the real model, DDP, distributed optimizer, pipeline schedules and checkpoints run on gloo. It does
nothing where CUDA is available. Each entry of `SHIMS` (for 0.16.1, 2026-11) says what it replaces, why, and when it can
go.
"""

import contextlib
import functools
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

# Tested pairs; constraints.txt pins the first of each for CI.
TESTED_VERSIONS = {
    "megatron-core": ("0.16.1",),
    "torch": ("2.13", "2.11"),
    "hydra-core": ("1.3",),
    "omegaconf": ("2.3",),
}


def warn_untested_versions() -> list[str]:
    """Warn for each package whose version nobody has run this project with; returns the warnings' texts."""
    notes = []
    for package, tested in TESTED_VERSIONS.items():
        version = importlib.metadata.version(package)
        if not any(version == known or version.startswith(f"{known}.") for known in tested):
            notes.append(f"{package} {version} is untested with msa-pretrain; tested: {', '.join(tested)}.")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return notes


class _Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def record_event(self, *args: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


class _CpuRngTracker:
    """Megatron's CUDA RNG tracker; the model draws nothing at random after its initialisation, so a fork is empty."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        yield


class CudaMeansCpu(TorchFunctionMode):
    """Turns `device="cuda"` into cpu. Per thread, and about 1 us for each torch call."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs and "cuda" in str(kwargs.get("device", "")):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


def _devices_and_streams() -> None:
    """`torch.cuda.current_device()` is used as a device argument; streams and events order nothing on a CPU.

    Goes when Megatron asks `torch.accelerator` instead.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()


def _tensor_cuda() -> None:
    """`tensor.cuda()` in the embedding's set-up and in checkpoint loading. Goes with `.to(device)` there."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _tensor_type() -> None:
    """The optimizer sorts parameters by `tensor.type()`, comparing with 'torch.cuda.FloatTensor' and its like.

    Goes when it compares `tensor.dtype`.
    """
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not isinstance(result, str) or result.startswith("torch.cuda."):  # under a mode the call comes here twice
            return result
        return result.replace("torch.", "torch.cuda.")

    tensor: Any = torch.Tensor
    tensor.type = tensor_type


def _rng() -> None:
    """Full recompute saves and restores the CUDA RNG; the tracker forks it. Goes with device-generic RNG helpers."""
    from megatron.core.tensor_parallel import random

    module: Any = random
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module._CUDA_RNG_STATE_TRACKER = _CpuRngTracker()
    module._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def _alltoall_splits() -> None:
    """The all-to-all dispatcher turns its split sizes into numpy only when they come from a GPU.

    Goes when `maybe_move_tensor_to_cpu` honours `as_numpy` for CPU tensors.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module: Any = token_dispatcher
    module.maybe_move_tensor_to_cpu = to_cpu


SHIMS = (_devices_and_streams, _tensor_cuda, _tensor_type, _rng, _alltoall_splits)


@functools.cache
def _install_shims() -> None:
    for shim in SHIMS:
        shim()
    logger.info("no CUDA: megatron-core runs on the CPU through %d shims", len(SHIMS) + 1)


def megatron_on_cpu() -> contextlib.AbstractContextManager:
    """Install the shims for good, once in a process; the context turns `device="cuda"` into cpu in this thread.

    Does nothing where CUDA is available.
    """
    if torch.cuda.is_available():
        return contextlib.nullcontext()
    _install_shims()
    return CudaMeansCpu()
