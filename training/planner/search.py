"""All layouts of a number of GPUs that the config's own checks accept, the fastest that fit first."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from ...model.config import ParallelConfig, Phase, Recompute
from ..checks import cross_check
from ..config import TrainConfig
from ..phases import phase_at
from .duration import Duration, step_duration
from .hardware import GPUS_PER_NODE, Gpu
from .memory import GIB, Load, Peak, fullest
from .ranges import NOTHING, Range
from .stages import Layout

# What is tried for each key that the command line leaves open; other values, and `parallel.expert_tensor`, count when
# they are set by hand. Tensor parallelism stays within a node.
TENSOR = (1, 2, 4, 8)
CONTEXT = (1, 2, 4, 8)
VIRTUAL = (1, 2, 4)
MICRO_BATCHES = (1, 2)
CONTEXT_TOKENS = 16384
"""Context parallelism is tried while each rank keeps so many tokens of a sample: splitting less saves no time."""


@dataclass(frozen=True)
class Plan:
    """One layout with what it costs."""

    config: TrainConfig
    layout: Layout
    load: Load
    peak: Peak
    durations: list[Duration]
    """Of the phases that the run has, in order."""

    @property
    def days(self) -> Range:
        """Of the whole token budget."""
        total = NOTHING
        for duration, steps in zip(self.durations, phase_steps(self.config).values(), strict=True):
            total += duration.step_s * (steps / 86400)
        return total

    def fits(self, gpu: Gpu) -> bool:
        return self.peak.needed <= gpu.memory_gib * GIB

    @property
    def overrides(self) -> list[str]:
        """Command-line words that select this layout."""
        parallel = [f"parallel.{f.name}={_word(getattr(self.config.parallel, f.name))}" for f in fields(ParallelConfig)]
        training = self.config.training
        return [
            *parallel,
            f"training.micro_batch_size={training.micro_batch_size}",
            f"training.recompute={training.recompute.name}",
        ]


def _word(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "name", value))


def phase_steps(config: TrainConfig) -> dict[Phase, int]:
    """Phase -> steps of the run, phases in order; a ramp-up's smaller steps count as whole ones."""
    size, total = config.tokens_per_step, config.total_steps

    def phase(tokens: int) -> Phase:
        return phase_at(tokens, kind=config.attention.kind, warmup_tokens=config.training.warmup_tokens)

    if phase(0) is not Phase.warmup:
        return {phase(0): total}
    warmup = min(total, -(-config.training.warmup_tokens // size))
    return {Phase.warmup: warmup, Phase.sparse: total - warmup} if total > warmup else {Phase.warmup: total}


def plan(config: TrainConfig, world_size: int, gpu: Gpu) -> Plan:
    """What the config's own layout costs on so many GPUs."""
    layout, training = Layout(config.parallel, world_size), config.training
    micro_batches = training.global_batch_size // (training.micro_batch_size * layout.data_parallel)
    load = Load(training.micro_batch_size, training.seq_length, micro_batches, training.deterministic)
    phases = list(phase_steps(config))
    return Plan(
        config,
        layout,
        load,
        fullest(config.spec, layout, load, phases),
        [step_duration(config.spec, layout, load, phase, gpu) for phase in phases],
    )


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    fitting: list[Plan]
    """Fastest first."""
    too_large: list[Plan]
    """Legal, but past the GPU's memory; the nearest miss first."""
    refused: Counter[str]
    """Reason of `training/checks.py` -> layouts refused for it."""
    closest: list[str]
    """Every reason against the layout that is nearest to a legal one; empty when some layout is legal."""
    own: Plan | None
    """The config's own layout, if the checks accept it for so many GPUs."""


def search(config: TrainConfig, world_size: int, gpu: Gpu, pinned: Collection[str] = ()) -> Found:
    """Try every layout; `pinned` names config keys whose value in `config` stays (`parallel.pipeline`, ...)."""
    refused: Counter[str] = Counter()
    closest: list[str] = []
    plans = []
    for candidate in candidates(config, world_size, pinned, refused):
        problems = list(cross_check(candidate, world_size))
        refused.update(problems)
        if not problems:
            plans.append(plan(candidate, world_size, gpu))
        elif not closest or _distance(problems) < _distance(closest):
            closest = problems
    fitting = sorted((p for p in plans if p.fits(gpu)), key=lambda p: p.days.middle)
    too_large = sorted((p for p in plans if not p.fits(gpu)), key=lambda p: p.peak.needed)
    own = None if list(cross_check(config, world_size)) else plan(config, world_size, gpu)
    return Found(fitting, too_large, refused, [] if plans else closest, own)


def _distance(problems: list[str]) -> tuple[int, int]:
    """Sizes that do not go together come first: the batch is checked only where they do."""
    return sum(problem.startswith("parallel.") for problem in problems), len(problems)


def candidates(
    config: TrainConfig, world_size: int, pinned: Collection[str], refused: Counter[str]
) -> Iterator[TrainConfig]:
    """Configs with every combination of the open keys. A value that is refused by itself is tried once only."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    tries: dict[str, tuple] = {
        "tensor": tuple(size for size in TENSOR if size in divisors and size <= GPUS_PER_NODE),
        "sequence": (False, True),
        "context": tuple(
            size
            for size in CONTEXT
            if size == 1 or (size in divisors and config.training.seq_length >= size * CONTEXT_TOKENS)
        ),
        "pipeline": tuple(size for size in divisors if size <= config.model.num_layers + 2),
        "virtual_pipeline": VIRTUAL,
        "expert": tuple(size for size in divisors if size <= config.moe.num_experts),
    }
    names = [f.name for f in fields(ParallelConfig)]
    for name in names:
        if name not in tries or f"parallel.{name}" in pinned:
            tries[name] = (getattr(config.parallel, name),)
    split = ["tensor", "sequence", "context", "expert_tensor"]
    whole = [name for name in names if name not in split]
    recomputes = (config.training.recompute,) if "training.recompute" in pinned else tuple(Recompute)
    sizes = (config.training.micro_batch_size,) if "training.micro_batch_size" in pinned else MICRO_BATCHES
    for values in product(*(tries[name] for name in split)):
        chosen = dict(zip(split, values, strict=True))
        alone = _with(config, chosen | dict(pipeline=1, virtual_pipeline=1, expert=1))
        if problems := list(cross_check(alone, None)):
            refused.update(problems)
            continue
        for rest in product(*(tries[name] for name in whole)):
            parallel = chosen | dict(zip(whole, rest, strict=True))
            if parallel["virtual_pipeline"] > 1 and parallel["pipeline"] == 1:
                continue
            for recompute, size in product(recomputes, sizes):
                yield _with(config, parallel, micro_batch_size=size, recompute=recompute)


def _with(config: TrainConfig, parallel: dict, **training: object) -> TrainConfig:
    return replace(
        config,
        parallel=replace(config.parallel, **parallel),
        training=replace(config.training, **training),  # type: ignore[arg-type]  # names checked by replace
    )
