"""The stages of a run by the length of its samples (`training.length_schedule`), resolved from tokens to samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig


@dataclass(frozen=True)
class Stage:
    """Steps whose samples have one length; a run without a curriculum is one stage."""

    key: str
    """Of its first token in the config; empty for the first stage."""
    first_token: int
    end_token: int
    first_sample: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    eval_samples: int

    @property
    def tokens_per_step(self) -> int:
        """After the ramp-up, if there is one."""
        return self.global_batch_size * self.seq_length

    @property
    def num_samples(self) -> int:
        return (self.end_token - self.first_token) // self.seq_length

    @property
    def end_sample(self) -> int:
        return self.first_sample + self.num_samples


def stages_of(config: TrainConfig) -> list[Stage]:
    """In their order, the first from token 0 on with the lengths and sizes of `training` itself."""
    training = config.training
    keys = ["", *(f"training.length_schedule[{number}]" for number in range(len(training.length_schedule)))]
    begins = [0, *(stage.from_tokens for stage in training.length_schedule)]
    stages: list[Stage] = []
    ends, sizes_of = [*begins[1:], training.total_tokens], [training, *training.length_schedule]
    sizes: Any  # a LengthStage, or `training` itself
    for key, begin, end, sizes in zip(keys, begins, ends, sizes_of, strict=True):
        stages.append(
            Stage(
                key=key,
                first_token=begin,
                end_token=end,
                first_sample=stages[-1].end_sample if stages else 0,
                seq_length=sizes.seq_length,
                micro_batch_size=sizes.micro_batch_size,
                global_batch_size=sizes.global_batch_size,
                eval_samples=sizes.eval_samples,
            )
        )
    return stages


def config_of_stage(config: TrainConfig, stage: Stage) -> TrainConfig:
    """A run of nothing but that stage: what checks and estimates of one sequence length can be asked about."""
    sizes = ("seq_length", "micro_batch_size", "global_batch_size", "eval_samples")
    training = replace(
        config.training,
        length_schedule=[],
        batch_ramp=[],
        total_tokens=stage.end_token - stage.first_token,
        **{name: getattr(stage, name) for name in sizes},
    )
    return replace(config, training=training)
