"""Initial weights as a function of the seed and each parameter's global name, so that no layout changes them."""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from .config import ModelSpec
from .experts import SHARDED_DIM as EXPERT_SHARDED_DIM
from .experts import GroupedExperts

# Projections back into the residual stream start smaller by sqrt(2 x layers), as in GPT-2.
RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight", "down_proj")


def mark_shards(model: GPTModel) -> None:
    """Say of the weights of Megatron's parallel layers which dimension is sharded, as ours say themselves.

    Megatron does so in its own initialisation, which is switched off: without the marks the gradient norm would take
    the share of tensor-parallel rank 0 for the whole.
    """
    gated = {id(module.linear_fc1) for module in model.modules() if isinstance(module, MLP)}
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            if module.weight is None:  # a head tied to the embedding
                continue
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            # gate and up are sharded each for itself
            set_tensor_model_parallel_attributes(module.weight, True, dim, 2 if id(module) in gated else 1)


@torch.no_grad()
def initialize(model: GPTModel, spec: ModelSpec) -> None:
    """Fill every parameter of one model chunk with its share of values that are drawn whole, on the CPU in fp32.

    At hundreds of billions of parameters this is slow; such runs start from a checkpoint that a small job wrote.
    """
    for name, parameter, first_expert in global_parameters(model, spec):
        if name.endswith("norm.weight"):
            parameter.fill_(0.0 if spec.model.zero_centered_norms else 1.0)
            continue
        std = spec.model.init_std
        if name.endswith(RESIDUAL_PROJECTIONS):
            std /= math.sqrt(2 * spec.model.num_layers)
        draw = partial(_draw, std=std, seed=spec.seed)
        if first_expert is None:
            group = parallel_state.get_tensor_model_parallel_group()
            # set on the weights of parallel layers alone
            dim, stride = getattr(parameter, "partition_dim", None), getattr(parameter, "partition_stride", 1)
            parameter.copy_(_share(draw, parameter.shape, name, group, dim, stride))
        else:
            group = parallel_state.get_expert_tensor_parallel_group()
            for local, expert in enumerate(parameter):
                expert_name = f"{name}.{first_expert + local}"
                expert.copy_(_share(draw, expert.shape, expert_name, group, EXPERT_SHARDED_DIM - 1))


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


def _share(
    draw: Callable[[torch.Size, str], Tensor],
    shape: torch.Size,
    name: str,
    group: dist.ProcessGroup,
    dim: int | None,
    stride: int = 1,
) -> Tensor:
    """This rank's share, of that shape, of a parameter drawn whole; each of its `stride` parts is sharded in `dim`."""
    if dim is None:
        return draw(shape, name)
    size, rank = group.size(), group.rank()
    whole = draw(torch.Size([*shape[:dim], shape[dim] * size, *shape[dim + 1 :]]), name)
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.chunk(stride, dim)], dim)


def _draw(shape: torch.Size, name: str, *, std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator) * std
