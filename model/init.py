"""Initial weights as a function of the seed and each parameter's global name, so that no layout changes them."""

import hashlib
import math
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from .config import ModelSpec
from .experts import GroupedExperts

# Projections back into the residual stream start smaller by sqrt(2 x layers), as in GPT-2.
RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight", "down_proj")


@torch.no_grad()
def initialize(model: GPTModel, spec: ModelSpec) -> None:
    """Fill every parameter of one model chunk. Values are drawn on the CPU in fp32, then cast.

    At hundreds of billions of parameters this is slow; such runs start from a checkpoint that a small job wrote.
    """
    for name, parameter, first_expert in global_parameters(model, spec):
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        std = spec.model.init_std
        if name.endswith(RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2 * spec.model.num_layers)
        if first_expert is None:
            parameter.copy_(_draw(parameter.shape, std, spec.seed, name))
        else:
            for local, expert in enumerate(parameter):
                expert.copy_(_draw(expert.shape, std, spec.seed, f"{name}.{first_expert + local}"))


def global_parameters(model: GPTModel, spec: ModelSpec) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """(name with the 0-based global layer, parameter, first global expert for an expert weight, else None)."""
    offsets = {
        f"{name}.": module.num_local_experts * module.ep_group.rank()
        for name, module in model.named_modules()
        if isinstance(module, GroupedExperts)
    }
    for name, parameter in model.named_parameters():
        first_expert = next((first for prefix, first in offsets.items() if name.startswith(prefix)), None)
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        global_name = ".".join(parts)
        if spec.model.tie_embeddings and global_name == "output_layer.weight":
            global_name = "embedding.word_embeddings.weight"
        yield global_name, parameter, first_expert


def _draw(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator) * std
