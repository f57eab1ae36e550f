"""An estimate with its error: the least and the most it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Geometric: errors of rates are factors."""
        return math.sqrt(self.low * self.high)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: Range | float) -> Range:
        """Both factors positive."""
        if not isinstance(factor, Range):
            factor = Range(factor, factor)
        return Range(self.low * factor.low, self.high * factor.high)

    def at_least(self, floor: Range) -> Range:
        return Range(max(self.low, floor.low), max(self.high, floor.high))

    def __str__(self) -> str:
        return f"{self.middle:.3g} ({self.low:.3g} to {self.high:.3g})"


NOTHING = Range(0.0, 0.0)


def over(amount: float, rate: Range) -> Range:
    """Time of `amount` at a rate that lies in `rate`."""
    return Range(amount / rate.high, amount / rate.low)
