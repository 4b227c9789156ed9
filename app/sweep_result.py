"""The answer of a sweep, of whatever kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.sweeping import METRICS, Metric, Point

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast

SCHEMA = "tunecast.sweep/1"
Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One input of a tornado: the metric at both ends of the input."""

    name: str
    kind: str
    """``choice`` (yours to make) or ``uncertain`` (an 80% interval, or the dearest offer)."""
    low_setting: str
    high_setting: str
    low: float | None
    high: float | None
    """The metric there; None where this end does not exist or is refused."""
    base: float
    """The metric as asked."""
    low_verdict: str | None = None
    high_verdict: str | None = None
    """``fits``, ``tight`` or ``no`` there; None where that is unknown or there is no such end."""

    @property
    def swing(self) -> float:
        """How far the metric moves between the ends; an end that does not exist moves nothing."""
        known = [value for value in (self.low, self.high) if value is not None]
        return max([self.base, *known]) - min([self.base, *known])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The answer of any sweep."""

    kind: str
    """``tornado``, ``grid`` or ``what-if``."""
    metric_name: str
    base: Forecast
    bars: tuple[Bar, ...] = ()
    dimensions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def metric(self) -> Metric:
        """What was looked at."""
        return METRICS[self.metric_name]

    def value(self, at: Point) -> float | None:
        """The metric of one combination."""
        return None if at.forecast is None else self.metric.of(at.forecast)


def default_metric(base: Forecast) -> str:
    """Cost where there is one, else time, else the step."""
    if base.cost_usd is not None:
        return "cost"
    return "time" if base.total_time_h is not None else "step"


def chosen_metric(metric: str | None, base: Forecast) -> str:
    """The metric asked for, if this forecast has it."""
    if metric is None:
        return default_metric(base)
    if metric not in METRICS:
        raise InputError(f"--metric {metric} is none of {', '.join(METRICS)}; use one of them.")
    if METRICS[metric].of(base) is None:
        raise InputError(
            f"--metric {metric} was asked for, but this run on {base.gpu} has none; add an amount (--tokens 10M), "
            "a price (--usd-per-gpu-hour 2), or choose --metric step."
        )
    return metric


def reported(told: Told | None, total: int, points: Iterable[Any]) -> Iterable[Any]:
    """The points, each reported when it is done."""
    for done, at in enumerate(points, start=1):
        if told is not None:
            told(done, total)
        yield at
