"""A number that says how sure it is and where it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

INTERVAL_LEVEL = 0.80
"""Probability mass of every interval tunecast prints."""
Z80 = 1.2815515655446004
"""Standard-normal quantile of an 80% two-sided interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Point value with an 80% interval; ``low <= value <= high``."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Value:
        """The same quantity in another unit; `factor` is positive."""
        return Value(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def inverse(self, numerator: float) -> Value:
        """numerator / self; the ends swap."""
        return Value(value=numerator / self.value, low=numerator / self.high, high=numerator / self.low)

    def as_dict(self) -> dict[str, float]:
        """``{"value", "low", "high"}`` of the JSON format."""
        return {"value": self.value, "low": self.low, "high": self.high}


def exact(value: float) -> Value:
    """A value without uncertainty (counted, not estimated)."""
    return Value(value=value, low=value, high=value)


def lognormal(value: float, log_sd: float) -> Value:
    """80% interval of a log-normal with median `value` and log standard deviation `log_sd`."""
    spread = math.exp(Z80 * log_sd)
    return Value(value=value, low=value / spread, high=value * spread)


def chance_below(value: Value, limit: float) -> float:
    """Probability that the quantity is at most `limit`: log-normal on either side of the value, with that side's width.

    0.5 at the value itself; 0 or 1 where nothing is unsure.
    """
    if limit <= 0.0:
        return 0.0
    side = value.high / value.value if limit >= value.value else value.value / value.low
    away = math.log(limit / value.value)
    if side <= 1.0:
        return 1.0 if away >= 0.0 else 0.0
    return 0.5 * (1.0 + math.erf(away * Z80 / math.log(side) / math.sqrt(2.0)))


def at_least_to(high: float, value: Value) -> Value:
    """The same value, its interval reaching up to `high` if it does not."""
    return Value(value=value.value, low=value.low, high=max(value.high, high))


def at_most_to(low: float, value: Value) -> Value:
    """The same value, its interval reaching down to `low` at most, which may be above the value itself."""
    return Value(value=value.value, low=max(value.low, min(low, value.value)), high=value.high)


def total(values: Iterable[Value]) -> Value:
    """Sum of independent values: their distances to the low ends add in squares, and so do those to the high ends."""
    point = down = up = 0.0
    for part in values:
        point += part.value
        down += (part.value - part.low) ** 2
        up += (part.high - part.value) ** 2
    return Value(value=point, low=point - math.sqrt(down), high=point + math.sqrt(up))


def product(left: Value, right: Value) -> Value:
    """Product of two independent values above 0: logarithmic distances add in squares."""
    point = left.value * right.value
    if point <= 0.0:
        return exact(0.0)
    down = math.hypot(math.log(left.value / left.low), math.log(right.value / right.low))
    up = math.hypot(math.log(left.high / left.value), math.log(right.high / right.value))
    return Value(value=point, low=point * math.exp(-down), high=point * math.exp(up))
