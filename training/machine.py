"""What a config asks of the machine it runs on: checked at launch, and said by a dry run on another machine."""

import importlib
import importlib.metadata
from collections.abc import Iterator

import torch

from ..model.config import AttentionBackend, LayerBackend
from .config import TrainConfig

# 2.10 has another signature of the function behind the grouped GEMM (model/te_grouped_product.py), megatron-core 0.16.1
# allows no 2.12.
TE_VERSION = "2.11"
TE_REMEDY = f"Install Transformer Engine {TE_VERSION} (pip install --no-build-isolation -e '.[te]'), or use torch."


def machine_problems(config: TrainConfig) -> Iterator[str]:
    """One sentence of fact and one of remedy for each thing that this machine lacks."""
    if config.attention.backend is AttentionBackend.triton and not torch.cuda.is_available():
        yield "attention.backend=triton needs a CUDA GPU, and torch sees none. Use reference."
    if config.model.backend is LayerBackend.transformer_engine and (problem := transformer_engine_problem()):
        yield f"model.backend=transformer_engine {problem}"


def transformer_engine_problem() -> str | None:
    """Why Transformer Engine cannot be used here, with the remedy; None when it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU, and torch sees none. Use torch."
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return f"needs the package transformer-engine, which is not installed. {TE_REMEDY}"
    if not version.startswith(f"{TE_VERSION}."):
        return f"needs transformer-engine {TE_VERSION}, and {version} is installed. {TE_REMEDY}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as err:  # what the checks of its own parts raise
        return f"needs transformer_engine.pytorch, which does not import ({type(err).__name__}: {err}). {TE_REMEDY}"
    return None
