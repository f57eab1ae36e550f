"""The run's configuration and its only door: `load_config` makes a checked `TrainConfig` of a composed Hydra config."""

import difflib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..data.order import LongDocuments, Packing
from ..model.config import (
    AttentionBackend,
    AttentionConfig,
    LayerBackend,
    ModelConfig,
    ModelSpec,
    MoEConfig,
    ParallelConfig,
    Precision,
    Recompute,
)
from .checks import cross_check, split_source
from .curriculum import Stage, stages_of

InitOptimizer = Enum("InitOptimizer", ["reset", "keep"])
Schedule = Enum("Schedule", ["cosine", "wsd"])
WandbMode = Enum("WandbMode", ["online", "offline", "off"])
# The sections that make a model.
ARCHITECTURE = {"model": ModelConfig, "attention": AttentionConfig, "moe": MoEConfig}


@dataclass(kw_only=True)
class LengthStage:
    """Longer samples from some point on, with the batch that goes with them."""

    from_tokens: int
    """Consumed tokens at which it begins: a whole number of the steps before."""
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    eval_samples: int = 0
    """In place of training.eval_samples: validation follows the length of training."""


@dataclass(kw_only=True)
class TrainingConfig:
    """The run: lengths in tokens, batch sizes in samples."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    length_schedule: list[LengthStage] = field(default_factory=list)
    """Stages of longer samples; a source goes on with what its epoch has left. Phase and rates follow tokens."""
    batch_ramp: list[int] = field(default_factory=list)
    """[start, increment, samples]: the batch grows from `start` by `increment` to global_batch_size within so many
    samples; empty: no ramp-up. Phase and learning rate follow tokens, so they do not notice."""
    total_tokens: int
    warmup_tokens: int
    """Indexer warm-up budget (dense attention, KL over the full sequence); in the paper 40B, written 40_000_000_000."""
    kl_coef: float = 1.0
    """Lambda of the KL loss. With the detach and Adam only eps and the clip feel it: tune optim.indexer_lr instead."""
    mtp_coef: float = 0.1
    """Factor on the MTP loss, the mean over depths of each depth's mean over its targets."""
    seed: int
    deterministic: bool = True
    num_threads: int
    """CPU threads of torch; fixed, since sums differ in their last bits with the thread count."""
    precision: Precision
    recompute: Recompute = Recompute.none
    resume: str = "auto"
    """`auto`: the newest complete checkpoint of this run, if any; `none`: start anew; or a checkpoint folder."""
    init_from: str = ""
    """Weights of a new run: a checkpoint, or the `checkpoints` folder of another run. Only index branches may be
    missing there (continued pretraining of a dense model). A run with a checkpoint of its own continues from that."""
    init_optimizer: InitOptimizer = InitOptimizer.reset
    """What `init_from` brings beside weights: nothing (`reset`), or (`keep`) the optimizer's fp32 weights, moments and
    Adam steps, while index parameters that are new start at step 0. Rates, tokens and data start at 0 with either."""
    eval_every: int
    """Steps between validations; one more at the end and two at the warm-up -> sparse switch. 0: none."""
    eval_samples: int


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW in two groups, backbone and indexer, each with its own rate, weight decay and gradient-norm clip."""

    lr: float
    min_lr: float
    schedule: Schedule
    lr_warmup_tokens: int
    wsd_decay_tokens: int = 0
    """Tokens of the final decay of the `wsd` schedule."""
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    clip_norm: float = 1.0
    indexer_lr: float
    """Peak rate of the index branch; it decays to min_lr / lr of itself."""
    indexer_weight_decay: float = 0.0
    indexer_clip_norm: float = 1.0


@dataclass(kw_only=True)
class BlendStage:
    """A blend in place of `data.train`, or of the stage before."""

    from_tokens: int
    """Consumed tokens at which it begins."""
    blend: list[str]
    """As in `data.train`."""


@dataclass(kw_only=True)
class DataConfig:
    train: list[str]
    """Prepared datasets: PREFIX (of PREFIX.bin, .idx, .crc, .json), or PREFIX:SHARE with its share of the samples."""
    train_schedule: list[BlendStage] = field(default_factory=list)
    """Further blends, by tokens; a source goes on where it was."""
    valid: list[str]
    """Each source is evaluated on training.eval_samples samples; the mean of their losses weighs by shares."""
    test: list[str] = field(default_factory=list)
    """Evaluated like `valid`, once, at the end of the run."""
    packing: Packing = Packing.concat
    """`concat`: documents end to end, cut where a sample is full; `best_fit`: whole documents, and padding."""
    long_documents: LongDocuments = LongDocuments.split
    """What `best_fit` does with a document longer than a sample: `split` it, or `drop` it."""
    cache_dir: str
    """Where the orders of the samples are built, once for all ranks that see the folder; shared or local disk."""
    num_workers: int = 0


def blend(sources: list[str]) -> dict[str, float]:
    """Prefix -> share of the samples; a source without one has share 1.

    Example: `["/data/web:0.9", "/data/code:0.1"]` gives `{"/data/web": 0.9, "/data/code": 0.1}`.
    """
    return {prefix: float(share) for prefix, share in map(split_source, sources)}


@dataclass(kw_only=True)
class CheckpointConfig:
    every_steps: int = 0
    """Steps between checkpoints; one more at the end. 0: only at the end."""
    keep_last: int = 2
    """Complete checkpoints kept."""


@dataclass(kw_only=True)
class TrackingConfig:
    wandb: WandbMode = WandbMode.online
    """`online` needs a login; without one the run is recorded offline and says so."""
    project: str = "msa-pretrain"
    log_every: int = 1
    recall_every: int = 0
    """Steps between measurements of the selection on training rows (validation always measures it); 0: never."""
    recall_rows: int = 256
    """Query rows sampled for each measurement of the selection."""
    moe_layers: int = 8
    """MoE layers whose expert load is logged one by one, evenly spread; the worst of all is always logged."""


@dataclass(kw_only=True)
class RunConfig:
    name: str
    dir: str = "runs"


@dataclass(kw_only=True)
class TrainConfig:
    model: ModelConfig
    attention: AttentionConfig
    moe: MoEConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optim: OptimConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    tracking: TrackingConfig
    run: RunConfig
    dry_run: bool = False

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model=self.model,
            attention=self.attention,
            moe=self.moe,
            parallel=self.parallel,
            precision=self.training.precision,
            recompute=self.training.recompute,
            seed=self.training.seed,
        )

    @cached_property
    def stages(self) -> list[Stage]:
        """By the length of the samples; one without `training.length_schedule`."""
        return stages_of(self)

    @property
    def tokens_per_step(self) -> int:
        """Of the first stage, after the ramp-up, if there is one."""
        return self.stages[0].tokens_per_step

    @property
    def total_samples(self) -> int:
        return self.stages[-1].end_sample

    def stage_at(self, consumed_samples: int) -> Stage:
        """The stage of the step that starts after `consumed_samples`; at the end of the run, the last."""
        return next((stage for stage in self.stages if consumed_samples < stage.end_sample), self.stages[-1])

    def samples_at(self, tokens: int) -> int:
        """Samples that so many tokens are; the last one may be begun."""
        stage = next((one for one in self.stages if tokens < one.end_token), self.stages[-1])
        return stage.first_sample + (tokens - stage.first_token) // stage.seq_length

    def batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples`; the last of a stage takes what is left."""
        stage = self.stage_at(consumed_samples)
        size, remaining = stage.global_batch_size, stage.end_sample - consumed_samples
        if self.training.batch_ramp and stage is self.stages[0]:
            start, increment, samples = self.training.batch_ramp
            grown = consumed_samples * ((size - start) // increment) // samples
            size = min(size, start + increment * grown)
        return min(size, remaining) if remaining > 0 else size

    @property
    def total_steps(self) -> int:
        return self.steps_until(self.training.total_tokens)

    def steps_until(self, tokens: int) -> int:
        """Steps from the start of the run that begin before so many tokens are consumed."""
        steps = 0
        for stage in self.stages:
            consumed, end = stage.first_token, min(stage.end_token, tokens)
            if stage is self.stages[0] and self.training.batch_ramp:
                while consumed < end:
                    consumed += self.batch_size_at(consumed // stage.seq_length) * stage.seq_length
                    steps += 1
            else:
                steps += max(0, -(-(end - consumed) // stage.tokens_per_step))
        return steps


class ConfigError(ValueError):
    """A configuration a user can fix; the message lists every problem found."""

    def __init__(self, problems: list[str]):
        super().__init__("invalid configuration:\n" + "\n".join(f"  - {p}" for p in problems))
        self.problems = problems


def load_config(cfg: DictConfig, *, world_size: int | None) -> TrainConfig:
    """Resolve, refuse strays and wrong types, name what is missing, cross-check; every problem in one ConfigError.

    `world_size` None skips the checks that need the number of processes (a dry run of a large layout on a laptop).
    """
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as err:
        raise ConfigError([f"{err.full_key}: {first_line(err)}"]) from err
    typed = _blank()
    problems = [*unknown_keys(plain)]
    known = set(leaf_keys(TrainConfig))
    for key, value in leaves(plain):
        if key in known and value != "???":
            try:
                OmegaConf.update(typed, key, value)
            except (OmegaConfBaseException, ValueError) as err:
                problems.append(f"{key}: {first_line(err)}")
    refused = {problem.split(":")[0] for problem in problems}
    problems += [
        f"{key} is missing. Set {key}=..." for key in sorted(OmegaConf.missing_keys(typed)) if key not in refused
    ]
    if problems:
        raise ConfigError(problems)
    config = OmegaConf.to_object(typed)
    assert isinstance(config, TrainConfig)
    if problems := list(cross_check(config, world_size)):
        raise ConfigError(problems)
    return config


def _blank() -> DictConfig:
    """A typed config whose values without default are missing."""
    blank = OmegaConf.structured(TrainConfig)
    for section in fields(TrainConfig):
        if is_dataclass(section.type):
            blank[section.name] = OmegaConf.structured(section.type)
    return blank


def check_overrides(overrides: Iterable[str]) -> None:
    """Refuse command-line keys that no dataclass declares, before Hydra's own error, which suggests `+key`, is seen."""
    groups = {f.name for f in fields(TrainConfig)} | {"experiment"}
    plain: dict[str, Any] = {}
    for override in overrides:
        key, is_override, _ = override.partition("=")
        key = key.lstrip("+~").split("@")[0]
        if not is_override or key.startswith(("hydra", "-")) or key in groups:
            continue
        node = plain
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = None
    if problems := list(unknown_keys(plain)):
        raise ConfigError(problems)


def to_yaml(plain: dict[str, Any]) -> str:
    """`to_dict`'s output as YAML text, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def architecture_to_dict(source: Any) -> dict[str, Any]:
    """The `model`, `attention` and `moe` sections of a config, or of what has these attributes, as plain values."""
    return {
        name: OmegaConf.to_container(OmegaConf.structured(getattr(source, name)), enum_to_str=True)
        for name in ARCHITECTURE
    }


def saved_spec(config_yaml: str) -> ModelSpec:
    """The model of the config in a checkpoint, on one process and on any machine: torch's layers, reference kernels.

    Keys that are newer than the checkpoint have their defaults.
    """
    stored: Any = OmegaConf.create(config_yaml)
    stored.model.backend, stored.attention.backend = LayerBackend.torch.name, AttentionBackend.reference.name
    sections: dict[str, Any] = {
        name: OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), stored[name]))
        for name, schema in ARCHITECTURE.items()
    }
    return ModelSpec(
        **sections,
        parallel=ParallelConfig(),
        precision=Precision[stored.training.precision],
        recompute=Recompute.none,
        seed=0,
    )


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, lists, numbers and strings."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def unknown_keys(node: dict[str, Any], schema: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Keys that no dataclass field declares; Hydra's `+a.b=1` would otherwise pass and do nothing."""
    hints = typing.get_type_hints(schema)
    for key, value in node.items():
        if key not in hints:
            near = [f"{prefix}{name}" for name in difflib.get_close_matches(str(key), hints, n=1)]
            near = near or [name for name in leaf_keys(TrainConfig) if name.endswith(f".{key}")]
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            yield f"unknown key '{prefix}{key}'.{hint}"
        elif is_dataclass(hints[key]) and isinstance(value, dict):
            yield from unknown_keys(value, hints[key], f"{prefix}{key}.")


def leaf_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of every value of a dataclass tree."""
    for name, kind in typing.get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from leaf_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]  # is_dataclass admits instances
        else:
            yield f"{prefix}{name}"


def leaves(node: dict[str, Any], schema: type = TrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a plain config, stopping where the schema has a value (a dict value stays whole)."""
    hints = typing.get_type_hints(schema)
    for key, value in node.items():
        kind = hints.get(key)
        if is_dataclass(kind) and isinstance(value, dict):
            yield from leaves(value, kind, f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{key}", value


def first_line(err: Exception) -> str:
    return str(err).splitlines()[0]
