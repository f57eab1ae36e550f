"""AdamW on Megatron's distributed optimizer: two groups with a rate, decay and clip each; rates by consumed tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from ..model.config import ModelSpec, Precision
from ..model.mcore import DTYPES
from .config import OptimConfig, Schedule, TrainingConfig

# Megatron tells parameter groups of a checkpoint apart by a few keys, `lr_mult` among them, and by nothing of ours:
# without a value of its own there, a loaded backbone group takes the index group's rate. The rate itself ignores it.
INDEXER_TAG, FP32_TAG = 2.0, 3.0
CLIP_GROUPS = ("backbone", "indexer")


class GroupStepsDistributedOptimizer(DistributedOptimizer):
    """Megatron 0.16.1's distributed optimizer, whose groups count Adam's steps each for itself, in `group["step"]`.

    Index parameters that join an optimizer with a past begin at step 0, while the backbone's bias correction goes on;
    Megatron saves one step for all groups and refuses several. A group without parameters on this rank counts like the
    others: a checkpoint takes the first rank's groups, where Megatron looks the step up at a parameter, and Transformer
    Engine counts only groups that have some. So does the experts' optimizer on a stage without experts.
    """

    def step_with_ready_grads(self) -> bool:
        groups = self.optimizer.param_groups
        steps = [group.get("step", 0) + 1 for group in groups]
        applied = super().step_with_ready_grads()
        for group, step in zip(groups, steps, strict=True):
            group["step"] = step
        return applied

    def state_dict(self) -> dict:
        """What is not kept by parameter: of each group its settings and its steps."""
        groups = [{"step": 0, **group} for group in self.optimizer.param_groups]
        for group in groups:
            del group["params"]
        return {"optimizer": {"param_groups": groups}}


class TorchAdamDistributedOptimizer(GroupStepsDistributedOptimizer):
    """The same with torch's Adam, able to save before its first step and to resume.

    torch creates Adam's state in the first step, Megatron asks for it before; and Megatron's load hands one shared step
    tensor to all parameters, so that each would advance every other's. Goes when both are fixed upstream.
    """

    def _ensure_state(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )

    def state_dict(self) -> dict:
        self._ensure_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self._ensure_state()
        saved = state_dict["optimizer"]["param_groups"]
        steps = {_identifier(group): int(group["step"]) for group in saved}
        # one step for all is what Megatron insists on; every group's own follows
        groups = {"param_groups": [{**group, "step": 0} for group in saved]}
        super().load_state_dict({**state_dict, "optimizer": groups})
        for group in self.optimizer.param_groups:
            group["step"] = steps[_identifier(group)]
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for name, value in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                value.copy_(tensors[name])


class GroupStepsChainedOptimizer(ChainedOptimizer):
    """Megatron's chain of optimizers, without its check that all their groups are at one step."""

    def _synchronize_steps(self) -> None:
        """Nothing: `GroupStepsDistributedOptimizer` keeps the steps of its groups itself."""


# By these keys alone Megatron finds the group of a checkpoint that belongs to one of ours.
_identifier = itemgetter(*param_group_identifier_keys)


def wrap_with_ddp(chunks: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """Megatron's DDP around each model chunk: fp32 gradient buffers, reduced once a step.

    Megatron's trainer passes `disable_bucketing` for all chunks but the first. Without overlap nothing is cut into
    buckets anyway, and it would put the bf16 and the fp32 weights into one gather, of which gloo mixes up the bytes.
    """
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    for chunk in wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            _count_padding_between_buckets(buffer)
    return wrapped


def release(chunks: Iterable[DistributedDataParallel]) -> None:
    """Let go of chunks for good, before a process makes other ones.

    After a backward pass autograd's nodes and Megatron's hooks on them keep each other, the model, and with it 48
    threads of gloo's process groups, alive for ever; ten models later these take all of the processor.
    """
    for chunk in chunks:
        vars(chunk).clear()


def _count_padding_between_buckets(buffer: Any) -> None:
    """Megatron 0.16.1 collects a buffer's optimizer state without the padding behind each bucket, then cuts parameters
    out of it at offsets that count the padding: with several buckets a checkpoint has shifted weights and moments. An
    embedding that two pipeline stages share is a bucket of its own. Padding counts here, but for the last bucket's."""
    for bucket in buffer.buckets[:-1]:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)


def build_optimizer(chunks: list[DistributedDataParallel], spec: ModelSpec, optim: OptimConfig) -> ChainedOptimizer:
    """One distributed optimizer over all chunks, chained for dense and expert parameters."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=0.0,  # clipped by group, in `clip_and_step`
        use_distributed_optimizer=True,
        bf16=spec.precision is Precision.bf16,
        params_dtype=DTYPES[spec.precision],
    )
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=group_overrides(config, optim))
    optimizer.__class__ = GroupStepsChainedOptimizer
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            is_torch = isinstance(part.optimizer, torch.optim.AdamW)
            part.__class__ = TorchAdamDistributedOptimizer if is_torch else GroupStepsDistributedOptimizer
    return optimizer


def group_overrides(config: OptimizerConfig, optim: OptimConfig) -> dict[ParamKey, ParamGroupOverride]:
    """What sets parameters apart from the default group, by their marks."""
    indexer: Any = dict(
        lr_mult=INDEXER_TAG,
        max_lr=optim.indexer_lr,
        min_lr=optim.indexer_lr * optim.min_lr / optim.lr,
        start_wd=optim.indexer_weight_decay,
        end_wd=optim.indexer_weight_decay,
        clip_group="indexer",
    )
    return {
        **get_standard_config_overrides(config),  # no decay for norms; passing any override drops it
        ParamKey(attr="is_indexer"): ParamGroupOverride(**indexer),
        # fp32 parameters beside bf16 ones in one group would confuse the optimizer's index map
        ParamKey(attr="is_fp32_param"): ParamGroupOverride(lr_mult=FP32_TAG),  # type: ignore[typeddict-unknown-key]
    }


class LearningRates:
    """Learning rate and weight decay of every group as a pure function of consumed tokens (Megatron's scheduler).

    Nothing of it is saved: the rates at a step are the same with and without a restart.
    """

    def __init__(self, optimizer: ChainedOptimizer, optim: OptimConfig, training: TrainingConfig) -> None:
        self._scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=optim.lr,
            min_lr=optim.min_lr,
            lr_warmup_steps=optim.lr_warmup_tokens,
            lr_decay_steps=training.total_tokens,
            lr_decay_style="WSD" if optim.schedule is Schedule.wsd else "cosine",
            wsd_decay_steps=optim.wsd_decay_tokens,
            lr_wsd_decay_style="linear",
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._optimizer = optimizer

    def set(self, consumed_tokens: int) -> dict[str, float]:
        """Set every group's rate for the step that ends at `consumed_tokens`; returns the rate by clip group."""
        self._scheduler.num_steps = consumed_tokens
        self._scheduler.step(0)
        groups = self._optimizer.param_groups
        return {clip_group(group): group["lr"] for group in groups}


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step did, the same on every rank."""

    applied: bool
    """False when a gradient norm was not finite: no weight, moment or expert bias has moved."""
    norms: dict[str, float]
    """Gradient norm before clipping, by clip group."""


@torch.no_grad()
def clip_and_step(optimizer: ChainedOptimizer, limits: dict[str, float]) -> OptimizerStep:
    """Clip each group by its own global norm, then step; skip the step on all ranks if a norm is not finite.

    One shared norm would let the KL gradients scale the backbone's step.
    """
    overflow = optimizer.prepare_grads()
    # in a fixed order: each norm is a collective that every rank joins, with or without parameters of the group
    norms = {name: _global_norm(optimizer, name) for name in CLIP_GROUPS}
    if overflow or not all(math.isfinite(norm) for norm in norms.values()):
        return OptimizerStep(applied=False, norms=norms)
    for name, norm in norms.items():
        for part in optimizer.chained_optimizers:
            # Megatron hands even an empty list to Transformer Engine, where that is installed; 2.11 crashes on it
            if members := [parameter for parameter in _members(part, name) if parameter.grad is not None]:
                clip_grad_by_total_norm_fp32(members, limits[name], norm)
    return OptimizerStep(applied=bool(optimizer.step_with_ready_grads()), norms=norms)


def clip_group(group: dict) -> str:
    return group.get("clip_group", "backbone")


def _members(part: DistributedOptimizer, name: str) -> list[nn.Parameter]:
    if part.is_stub_optimizer:
        return []
    return [parameter for group in part.param_groups if clip_group(group) == name for parameter in group["params"]]


def _global_norm(optimizer: ChainedOptimizer, name: str) -> float:
    square = 0.0
    for part in optimizer.chained_optimizers:
        gradients = [
            parameter.grad
            for parameter in _members(part, name)
            if parameter.grad is not None
            and param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter, part.tp_group)
        ]
        square += get_grad_norm_fp32(gradients, grad_stats_parallel_group=part.get_grad_stats_parallel_group()) ** 2
    return math.sqrt(square) if math.isfinite(square) else square
