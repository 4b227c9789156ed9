"""Runs that were watched on a device move the forecast of other runs there, by as much as the two share.

The logarithm of measured over forecast time of one run is what its device and software add (shared by every run
there) plus what is that run's own. The own part has the spread that published runs show on cards the priors have seen;
what the forecast's interval holds beyond it is shared. The posterior of the shared part is the usual normal one
(shrinkage): n watched runs of mean log-ratio d move the forecast by w d, with

    w = shared variance / (shared variance + own variance / n)

and leave a variance of shared (1 - w) + own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.time import StepTime
from tunecast.model.value import lognormal


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What observations make of a forecast."""

    log_ratio: float
    """Added to the logarithm of the step time."""
    log_sd: float
    runs: int


def shift(log_ratios: Sequence[float], *, log_sd: float, own_log_sd: float) -> Shift:
    """Posterior of a forecast with `log_sd`, given log(measured / forecast) of other runs on the device."""
    own = min(own_log_sd, log_sd) ** 2
    shared, n = max(log_sd**2 - own, 0.0), len(log_ratios)
    weight = shared / (shared + own / n) if shared > 0 else 0.0
    return Shift(log_ratio=weight * sum(log_ratios) / n, log_sd=math.sqrt(shared * (1.0 - weight) + own), runs=n)


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
    return f"{what} on this device moved the step time by {math.exp(by.log_ratio) - 1:+.1%} ({', '.join(names)})"
