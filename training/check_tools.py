"""What the checks of a config share: reading a value by its key, and the remedies that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import TrainConfig


def value_of(config: TrainConfig, key: str) -> float:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def near(number: int, unit: int) -> list[int]:
    """The multiples of `unit`, from itself on, next to `number`, which is none."""
    below = number // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def choices(values: list[int]) -> str:
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])
