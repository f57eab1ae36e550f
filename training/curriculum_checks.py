"""Checks of `training.length_schedule` and of the token counts at which its stages and the run end (see checks.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .curriculum import Stage, config_of_stage
from .layout_checks import batch_problems, layout_problems

if TYPE_CHECKING:
    from .config import TrainConfig


def curriculum_problems(config: TrainConfig) -> Iterator[str]:
    """Stages out of order or with sizes that make no sense come first: the rest is checked only without these."""
    training = config.training
    before = (0, training.seq_length)
    for number, stage in enumerate(training.length_schedule):
        key = f"training.length_schedule[{number}]"
        for name in ("micro_batch_size", "global_batch_size"):
            if (size := getattr(stage, name)) < 1:
                yield f"{key}.{name} ({size}) must be at least 1."
        if stage.seq_length <= before[1]:
            yield f"{key}.seq_length ({stage.seq_length}) must be above that of the stage before ({before[1]})."
        if not before[0] < stage.from_tokens < training.total_tokens:
            yield (
                f"{key}.from_tokens ({stage.from_tokens}) must be above {before[0]} and below training.total_tokens "
                f"({training.total_tokens})."
            )
        if training.eval_every and stage.eval_samples < 1:
            yield f"{key}.eval_samples ({stage.eval_samples}) must be at least 1 with training.eval_every above 0."
        before = (stage.from_tokens, stage.seq_length)


def border_problems(config: TrainConfig) -> Iterator[str]:
    """Each stage must end with a whole step, and the ramp-up within the first."""
    stages = config.stages
    ends = [f"{stage.key}.from_tokens" for stage in stages[1:]] + ["training.total_tokens"]
    for stage, end in zip(stages, ends, strict=True):
        size = stage.tokens_per_step
        if (stage.end_token - stage.first_token) % size:
            near = stage.first_token + -(-(stage.end_token - stage.first_token) // size) * size
            behind = f" behind {stage.key}.from_tokens ({stage.first_token})" if stage.key else ""
            yield (
                f"{end} ({stage.end_token}) must be a multiple of the tokens of a step, global_batch_size x seq_length "
                f"({size}){behind}. Use {near}."
            )
    ramp = config.training.batch_ramp
    if len(ramp) == 3 and len(stages) > 1 and ramp[2] > stages[0].num_samples:
        yield (
            f"training.batch_ramp ({ramp}) must end before training.length_schedule[0], which begins after "
            f"{stages[0].num_samples} samples. Shorten the one or move the other."
        )


def stage_problems(config: TrainConfig, world_size: int | None) -> Iterator[str]:
    """What the layout and the number of processes have against a later stage and not against the first."""

    def problems(stage: Stage) -> list[str]:
        one = config_of_stage(config, stage)
        layout = list(layout_problems(one, world_size))
        return layout or (list(batch_problems(one, world_size)) if world_size is not None else [])

    first, *later = config.stages
    known = set(problems(first))
    for stage in later:
        yield from (f"{stage.key}: {problem}" for problem in problems(stage) if problem not in known)
