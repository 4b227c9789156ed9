"""Runs that were watched on a device move the forecast of other runs there, by as much as the two share.

The logarithm of measured over forecast time of one run is what its device and software add (shared by every run
there) plus what is that run's own. The own part has the spread that published runs show on cards the priors have seen;
what the forecast's interval holds beyond it is shared. The posterior of the shared part is the usual normal one
(shrinkage): n watched runs of mean log-ratio d move the forecast by w d, with

    w = shared variance / (shared variance + own variance / n)

and leave a variance of shared (1 - w) + own. A watched run may also say nothing of others (a busy machine, steps that
waited for data, a card that was throttled): with the chance `CHANCE_APART` beforehand its ratio is its own, as wide as
`APART_LOG_SD`. How likely that is after all the ratios are seen follows from how well they agree with the forecast and
with each other, and forecasts move by as much less. Both figures are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.time import StepTime
from tunecast.model.value import INTERVAL_LEVEL, Z80, lognormal


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run that was watched to its end, or as long as it ran."""

    name: str
    """Of its record."""
    gpu: str
    architecture: Architecture
    run: Run
    step_time_s: float


Observations = Mapping[str, Sequence[Observation]]
"""By device."""
Forecaster = Callable[[Architecture, Run], StepTime]
"""The forecast of a run on the same device, without observations."""


LEAST_OWN = 0.4
"""Assumed: least share of a forecast's deviation that is the run's own. Where a device is little known, what one run
shows of it (many small kernels) says less of another (few large ones) than runs of one published source of another."""
CHANCE_APART = 0.05
"""Assumed: that the runs watched on a device say nothing of another."""
SURPRISE_LOG_SD = 0.5
"""Assumed: what a machine may be off by, whatever a forecast's interval says, before its runs are doubted."""
APART_LOG_SD = 1.0
"""Assumed: of log(measured / forecast) of a run that says nothing of others; a factor of 3.6 either way is its 80%."""
HALVINGS = 50
TOLD_APART = 0.5
"""Chance from which a note says that the ratio is taken to be the watched run's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What observations make of a forecast."""

    log_ratio: float
    """Added to the logarithm of the step time."""
    log_sd: float
    runs: int
    apart: float = 0.0
    """Chance that the watched runs say nothing of this one."""
    mean: float = 0.0
    """Of the watched runs' logarithms."""


def shift(log_ratios: Sequence[float], *, log_sd: float, own_log_sd: float) -> Shift:
    """Posterior of a forecast with `log_sd`, given log(measured / forecast) of other runs on the device."""
    own = min(max(own_log_sd, LEAST_OWN * log_sd), log_sd) ** 2
    shared, n = max(log_sd**2 - own, 0.0), len(log_ratios)
    weight = shared / (shared + own / n) if shared > 0 else 0.0
    mean = sum(log_ratios) / n
    apart = chance_apart(log_ratios, shared=shared, own=own)
    moved, left = weight * mean, math.sqrt(shared * (1.0 - weight) + own)
    at = (1.0 - apart) * moved
    parts = ((1.0 - apart, moved - at, left), (apart, -at, math.sqrt(shared + own)))
    return Shift(log_ratio=at, log_sd=spread_of(parts), runs=n, apart=apart, mean=mean)


def spread_of(parts: Sequence[tuple[float, float, float]]) -> float:
    """Standard deviation of the normal whose 80% interval around 0 holds as much of a mixture of normals.

    `parts` are (weight, mean, standard deviation).
    """
    low, high = 0.0, 2.0 * max(abs(mean) + deviation for _, mean, deviation in parts)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        end = Z80 * middle
        held = sum(w * (_below((end - m) / sd) - _below((-end - m) / sd)) for w, m, sd in parts)
        low, high = (middle, high) if held < INTERVAL_LEVEL else (low, middle)
    return high


def _below(z: float) -> float:
    """Standard normal distribution function."""
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))


def chance_apart(log_ratios: Sequence[float], *, shared: float, own: float) -> float:
    """Probability, after the ratios are seen, that they are the runs' own: Bayes' rule over two normal models.

    Together they have the covariance shared J + own I, apart each has all of that variance and `APART_LOG_SD`'s, where
    shared is no less than `SURPRISE_LOG_SD` squared.
    """
    shared = max(shared, SURPRISE_LOG_SD**2)
    n, squares = len(log_ratios), sum(ratio**2 for ratio in log_ratios)
    mean = sum(log_ratios) / n
    within = squares - n * mean**2
    together = -0.5 * (within / own + n * mean**2 / (own + n * shared) + (n - 1) * math.log(own))
    together -= 0.5 * math.log(own + n * shared)
    each = shared + own + APART_LOG_SD**2
    apart = -0.5 * (squares / each + n * math.log(each))
    odds = math.log(CHANCE_APART / (1.0 - CHANCE_APART)) + apart - together
    return 1.0 / (1.0 + math.exp(-odds)) if odds > -500.0 else 0.0


def observed(
    timing: StepTime, observations: Sequence[Observation], forecast: Forecaster, *, own_log_sd: float
) -> tuple[StepTime, str | None]:
    """The step time moved by what was watched, and a note that says so; unchanged without observations."""
    if not observations or timing.log_sd <= 0:
        return timing, None
    ratios = [
        math.log(seen.step_time_s / forecast(seen.architecture, seen.run).step_time_s.value) for seen in observations
    ]
    found = shift(ratios, log_sd=timing.log_sd, own_log_sd=own_log_sd)
    return moved(timing, found), told(found, [seen.name for seen in observations])


def moved(timing: StepTime, by: Shift) -> StepTime:
    """Every part longer or shorter by the same share."""
    factor = math.exp(by.log_ratio)
    return replace(
        timing,
        step_time_s=lognormal(timing.step_time_s.value * factor, by.log_sd),
        parts_s={name: part * factor for name, part in timing.parts_s.items()},
        phases_s={name: part * factor for name, part in timing.phases_s.items()},
        device_s=timing.device_s * factor,
        host_s=timing.host_s * factor,
        log_sd=by.log_sd,
    )


def told(by: Shift, names: Sequence[str]) -> str:
    """What the reader must know."""
    what = "a watched run" if by.runs == 1 else f"{by.runs} watched runs"
    moved = f"moved the step time by {math.exp(by.log_ratio) - 1:+.1%} ({', '.join(names)})"
    if by.apart < TOLD_APART:
        return f"{what} on this device {moved}"
    return (
        f"{what} on this device took {math.exp(by.mean):.2g} times as long as forecast, which with a chance of "
        f"{by.apart:.0%} is of its own (a busy machine, waiting for data): it {moved}"
    )
