"""Checks across config values. Each problem is one sentence of fact with the values and one of remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.order import LongDocuments, Packing
from ..model.config import (
    AttentionBackend,
    AttentionKind,
    IndexerInit,
    LayerBackend,
    Precision,
    QKNorm,
    ScoreFunction,
)
from .check_tools import choices, divisors, value_of
from .curriculum_checks import border_problems, curriculum_problems, stage_problems
from .layout_checks import batch_problems, layout_problems

if TYPE_CHECKING:
    from .config import TrainConfig

MINIMUMS = {
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.num_query_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 1,
    "model.rotary_dim": 0,
    "model.rope_theta": 1,
    "model.vocab_size": 1,
    "model.mtp_layers": 0,
    "model.init_std": 0,
    "attention.block_size": 1,
    "attention.top_k": 1,
    "attention.index_dim": 1,
    "attention.init_blocks": 0,
    "moe.num_experts": 1,
    "moe.top_k": 1,
    "moe.expert_hidden_size": 1,
    "moe.shared_hidden_size": 0,
    "moe.bias_update_rate": 0,
    "moe.num_groups": 1,
    "moe.top_groups": 1,
    "moe.aux_loss_coef": 0,
    "moe.z_loss_coef": 0,
    "moe.dense_hidden_size": 0,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
    "training.seq_length": 1,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 1,
    "training.total_tokens": 1,
    "training.warmup_tokens": 0,
    "training.kl_coef": 0,
    "training.mtp_coef": 0,
    "training.seed": 0,
    "training.num_threads": 1,
    "training.eval_every": 0,
    "training.eval_samples": 0,
    "optim.min_lr": 0,
    "optim.lr_warmup_tokens": 0,
    "optim.wsd_decay_tokens": 0,
    "optim.weight_decay": 0,
    "optim.indexer_weight_decay": 0,
    "data.num_workers": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 1,
    "tracking.log_every": 1,
    "tracking.recall_every": 0,
    "tracking.recall_rows": 1,
    "tracking.moe_layers": 0,
}
POSITIVE = (
    "model.norm_eps",
    "moe.routed_scaling",
    "optim.lr",
    "optim.eps",
    "optim.clip_norm",
    "optim.indexer_lr",
    "optim.indexer_clip_norm",
)

TRITON_SIZES = (16, 32, 64, 128)
TRITON_MAX_TOP_K = 32
TRITON_MAX_HEADS_PER_GROUP = 16


def cross_check(config: TrainConfig, world_size: int | None) -> Iterator[str]:
    """Every problem of `config`; checks that divide by a size run only once all sizes are sane."""
    ranges = [*_ranges(config), *curriculum_problems(config)]
    yield from ranges
    if ranges:
        return
    yield from _model(config)
    yield from _attention(config)
    yield from _moe(config)
    parallel = list(layout_problems(config, world_size))
    yield from parallel
    yield from _training(config)
    yield from _ramp(config)
    yield from _optim(config)
    if world_size is not None and not parallel:
        yield from batch_problems(config, world_size)
    yield from stage_problems(config, world_size)
    yield from _run(config)
    yield from _data(config)


def _ranges(config: TrainConfig) -> Iterator[str]:
    for key, minimum in MINIMUMS.items():
        if (value := value_of(config, key)) < minimum:
            yield f"{key} ({value}) must be at least {minimum}."
    for key in POSITIVE:
        if (value := value_of(config, key)) <= 0:
            yield f"{key} ({value}) must be above 0."


def _model(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if model.num_query_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads ({model.num_kv_heads}) must divide model.num_query_heads ({model.num_query_heads}). "
            f"Use {choices(divisors(model.num_query_heads))}."
        )
    if model.rotary_dim % 2 or model.rotary_dim > model.head_dim:
        yield f"model.rotary_dim ({model.rotary_dim}) must be even and at most model.head_dim ({model.head_dim})."
    if model.zero_centered_norms and model.backend is LayerBackend.transformer_engine:
        yield "model.zero_centered_norms=true has no form in model.backend=transformer_engine. Use torch."
    if model.backend is LayerBackend.transformer_engine and config.training.precision is Precision.fp32:
        yield (
            "training.precision (fp32) is not what model.backend=transformer_engine computes: its products round fp32 "
            "to TF32. Use bf16, or model.backend=torch."
        )
    scaling = model.rope_scaling
    if scaling.factor < 1 or scaling.original_length < 1 or not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        yield (
            f"model.rope_scaling (factor {scaling.factor}, low_freq_factor {scaling.low_freq_factor}, high_freq_factor "
            f"{scaling.high_freq_factor}, original_length {scaling.original_length}) needs a factor and a length of 1 "
            "or more, and a low factor above 0 and below the high one."
        )
    if model.zero_centered_norms and model.qk_norm is QKNorm.full_vector:
        yield "model.zero_centered_norms=true has no form for model.qk_norm=full_vector. Use per_head or none."


def _attention(config: TrainConfig) -> Iterator[str]:
    attention, model = config.attention, config.model
    yield from _layer_list("attention.full_layers", attention.full_layers, model.num_layers)
    if attention.init_blocks + 1 > attention.top_k:
        yield (
            f"attention.top_k ({attention.top_k}) must hold the local block and attention.init_blocks "
            f"({attention.init_blocks}). Raise attention.top_k to {attention.init_blocks + 1} or more."
        )
    if attention.index_rope and model.rotary_dim > attention.index_dim:
        yield (
            f"attention.index_dim ({attention.index_dim}) must be at least model.rotary_dim ({model.rotary_dim}), or "
            "set attention.index_rope=false."
        )
    if attention.backend is AttentionBackend.triton:
        yield from _triton_sizes(config)
    if attention.kind is AttentionKind.dense:
        if attention.full_layers:
            yield "attention.full_layers has no effect with attention.kind=dense. Leave it empty."
        if config.training.warmup_tokens:
            yield (
                f"training.warmup_tokens ({config.training.warmup_tokens}) has no effect with attention.kind=dense, "
                "which has no indexer. Set it to 0."
            )
    elif not config.spec.msa_layers:
        yield "attention.full_layers names every layer. Leave one out, or set attention.kind=dense."


def _triton_sizes(config: TrainConfig) -> Iterator[str]:
    """What the Triton ops would refuse at the first step (a test compares these numbers with theirs)."""
    sizes = ("attention.block_size", "attention.index_dim", "model.head_dim")
    for key in sizes if config.spec.msa_layers else ():
        if (size := value_of(config, key)) not in TRITON_SIZES:
            yield f"{key} ({size}) must be {choices(list(TRITON_SIZES))} with attention.backend=triton."
    if config.attention.top_k > TRITON_MAX_TOP_K:
        yield (
            f"attention.top_k ({config.attention.top_k}) must be at most {TRITON_MAX_TOP_K} with "
            "attention.backend=triton."
        )
    if (heads := config.model.num_query_heads // config.model.num_kv_heads) > TRITON_MAX_HEADS_PER_GROUP:
        yield (
            f"model.num_query_heads / model.num_kv_heads ({heads}) must be at most {TRITON_MAX_HEADS_PER_GROUP} with "
            "attention.backend=triton."
        )


def _moe(config: TrainConfig) -> Iterator[str]:
    moe = config.moe
    yield from _layer_list("moe.dense_mlp_layers", moe.dense_mlp_layers, config.model.num_layers)
    if moe.top_k > moe.num_experts:
        yield f"moe.top_k ({moe.top_k}) must be at most moe.num_experts ({moe.num_experts})."
    yield from _expert_groups(config)
    if moe.score_function is ScoreFunction.softmax and moe.bias_update_rate:
        yield (
            f"moe.bias_update_rate ({moe.bias_update_rate}) is a step for sigmoid scores, far too large for "
            "moe.score_function=softmax, whose scores are about 1 / num_experts. Set it to 0 and balance with "
            "moe.aux_loss_coef."
        )
    if moe.force_balance and moe.has_losses:
        yield (
            f"moe.aux_loss_coef ({moe.aux_loss_coef}) and moe.z_loss_coef ({moe.z_loss_coef}) have no meaning with "
            "moe.force_balance=true, where the router chooses nothing. Set them to 0."
        )
    if bool(moe.dense_mlp_layers) != bool(moe.dense_hidden_size):
        yield (
            f"moe.dense_hidden_size ({moe.dense_hidden_size}) and moe.dense_mlp_layers ({moe.dense_mlp_layers}) go "
            "together. Set both, or 0 and []."
        )


def _expert_groups(config: TrainConfig) -> Iterator[str]:
    moe = config.moe
    if moe.num_experts % moe.num_groups:
        yield (
            f"moe.num_groups ({moe.num_groups}) must divide moe.num_experts ({moe.num_experts}). "
            f"Use {choices(divisors(moe.num_experts))}."
        )
        return
    if moe.top_groups > moe.num_groups:
        yield f"moe.top_groups ({moe.top_groups}) must be at most moe.num_groups ({moe.num_groups})."
    if moe.top_k % moe.top_groups:
        yield (
            f"moe.top_groups ({moe.top_groups}) must divide moe.top_k ({moe.top_k}): a group is worth its top_k / "
            f"top_groups best experts. Use {choices(divisors(moe.top_k))}."
        )
    open_experts = moe.top_groups * moe.num_experts // moe.num_groups
    if open_experts < moe.top_k <= moe.num_experts:
        yield (
            f"moe.top_groups ({moe.top_groups}) leaves {open_experts} experts open to a token, fewer than moe.top_k "
            f"({moe.top_k}). Raise moe.top_groups."
        )


def _training(config: TrainConfig) -> Iterator[str]:
    training = config.training
    if training.warmup_tokens > training.total_tokens:
        yield (
            f"training.warmup_tokens ({training.warmup_tokens}) is longer than the run, training.total_tokens "
            f"({training.total_tokens}). Shorten the one or lengthen the other."
        )
    yield from border_problems(config)
    if training.eval_every and not training.eval_samples:
        yield f"training.eval_every ({training.eval_every}) needs training.eval_samples above 0."
    if training.eval_every and not config.dry_run and not config.data.valid:
        yield f"training.eval_every ({training.eval_every}) needs data.valid."
    if training.resume not in ("auto", "none") and not Path(training.resume).is_dir():
        yield f"training.resume ({training.resume}) is neither auto, none, nor a checkpoint folder."
    yield from _init_from(config)


def _init_from(config: TrainConfig) -> Iterator[str]:
    training, attention = config.training, config.attention
    # a run that continues does not read it again, so it may be gone
    begun = config.dry_run or (Path(config.run.dir) / config.run.name / "checkpoints").is_dir()
    if training.init_from and not begun and not Path(training.init_from).is_dir():
        yield f"training.init_from ({training.init_from}) is not a folder. Name a checkpoint or a folder of them."
    if training.init_from and training.resume not in ("auto", "none"):
        yield (
            f"training.init_from ({training.init_from}) has no effect beside training.resume ({training.resume}), "
            "which brings all weights. Leave one out."
        )
    if training.init_optimizer.name == "keep" and not training.init_from:
        yield "training.init_optimizer=keep needs a checkpoint to keep it from. Set training.init_from, or use reset."
    if attention.indexer_init is IndexerInit.random:
        return
    if attention.kind is AttentionKind.dense:
        yield "attention.indexer_init=from_attention has no effect with attention.kind=dense, which has no indexer."
    if not training.init_from:
        yield "attention.indexer_init=from_attention needs trained attention. Set training.init_from, or use random."
    if attention.index_dim != config.model.head_dim:
        yield (
            f"attention.indexer_init=from_attention needs attention.index_dim ({attention.index_dim}) equal to "
            f"model.head_dim ({config.model.head_dim}). Change one, or use random."
        )


def _ramp(config: TrainConfig) -> Iterator[str]:
    ramp, size = config.training.batch_ramp, config.training.global_batch_size
    if ramp and (len(ramp) != 3 or min(ramp) < 1):
        yield f"training.batch_ramp ({ramp}) must be three numbers above 0: [start, increment, samples]."
    elif ramp and (ramp[0] >= size or (size - ramp[0]) % ramp[1]):
        yield (
            f"training.batch_ramp ({ramp}) must grow from {ramp[0]} in steps of {ramp[1]} to "
            f"training.global_batch_size ({size}) exactly."
        )


def _optim(config: TrainConfig) -> Iterator[str]:
    optim, training = config.optim, config.training
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr ({optim.min_lr}) must be at most optim.lr ({optim.lr})."
    if optim.lr_warmup_tokens >= training.total_tokens:
        yield (
            f"optim.lr_warmup_tokens ({optim.lr_warmup_tokens}) must be below training.total_tokens "
            f"({training.total_tokens})."
        )
    wsd = optim.schedule.name == "wsd"
    if wsd and not 0 < optim.wsd_decay_tokens <= training.total_tokens - optim.lr_warmup_tokens:
        yield (
            f"optim.wsd_decay_tokens ({optim.wsd_decay_tokens}) must be above 0 and at most training.total_tokens - "
            f"optim.lr_warmup_tokens ({training.total_tokens - optim.lr_warmup_tokens})."
        )
    if not wsd and optim.wsd_decay_tokens:
        yield f"optim.wsd_decay_tokens ({optim.wsd_decay_tokens}) has no effect with optim.schedule=cosine. Set 0."
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas ({optim.betas}) must be two numbers from 0 to below 1."


def _run(config: TrainConfig) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.run.name):
        yield f"run.name ({config.run.name!r}) must be letters, digits, '.', '_' and '-'."
    sources = {key: getattr(config.data, key) for key in ("train", "valid", "test")}
    sources |= {f"train_schedule[{n}].blend": stage.blend for n, stage in enumerate(config.data.train_schedule)}
    for key, blend in sources.items():
        for source in blend:
            prefix, share = split_source(source)
            if not re.fullmatch(r"\d*\.?\d+", share) or float(share) == 0:
                yield f"data.{key}: the share in {source!r} must be a number above 0, as in {prefix}:0.5."
            if not config.dry_run and not Path(f"{prefix}.idx").is_file():
                yield (
                    f"data.{key}: {prefix}.idx does not exist. Prepare it with `python -m "
                    "msa_pretrain.scripts.prepare_data`, or correct the prefix."
                )
    if not config.dry_run and not config.data.train:
        yield "data.train is empty. Name at least one prepared dataset: data.train=[PREFIX]."


def _data(config: TrainConfig) -> Iterator[str]:
    data, training = config.data, config.training
    before = 0
    for number, stage in enumerate(data.train_schedule):
        if not stage.blend:
            yield f"data.train_schedule[{number}].blend is empty. Name a blend as in data.train."
        length = next((s for s in reversed(config.stages) if s.first_token <= stage.from_tokens), config.stages[0])
        offset = stage.from_tokens - length.first_token
        if not before < stage.from_tokens < training.total_tokens or offset % length.seq_length:
            behind = f" behind {length.key}.from_tokens ({length.first_token})" if length.key else ""
            yield (
                f"data.train_schedule[{number}].from_tokens ({stage.from_tokens}) must be a multiple of "
                f"{length.key or 'training'}.seq_length ({length.seq_length}){behind} above {before} and below "
                f"training.total_tokens ({training.total_tokens})."
            )
        before = stage.from_tokens
    sources = {"train": data.train, "valid": data.valid, "test": data.test}
    sources |= {f"train_schedule[{n}].blend": stage.blend for n, stage in enumerate(data.train_schedule)}
    for key, blend in sources.items():
        prefixes = [Path(split_source(source)[0]) for source in blend]
        if len(set(prefixes)) != len(prefixes):
            yield f"data.{key} ({blend}) names a source twice. Name it once, with its whole share."
    if data.test and not training.eval_samples:
        yield f"data.test ({data.test}) has no effect with training.eval_samples=0. Set it above 0."
    if data.packing is Packing.concat and data.long_documents is not LongDocuments.split:
        yield (
            f"data.long_documents ({data.long_documents.name}) has no effect with data.packing=concat, which cuts "
            "every document where a sample is full. Use split, or data.packing=best_fit."
        )


def split_source(source: str) -> tuple[str, str]:
    """PREFIX or PREFIX:SHARE -> (prefix, share as text, "1" where none is given)."""
    prefix, colon, share = source.rpartition(":")
    return (prefix, share) if colon else (source, "1")


def _layer_list(key: str, layers: list[int], num_layers: int) -> Iterator[str]:
    if bad := [layer for layer in layers if not 0 <= layer < num_layers]:
        yield f"{key} names layers {bad}, but layers run from 0 to {num_layers - 1}."
    if len(set(layers)) != len(layers):
        yield f"{key} ({layers}) names a layer twice."
