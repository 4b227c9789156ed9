"""In-step corrections from whole training steps: what microbenchmarks cannot see.

Inside a step kernels run warm or throttled, caches are shared and the host issues through PEFT and
autograd. Each operation kind gets one factor ``scale.<kind>``, the host its seconds per launch, the
step its constant. All are held to their microbenchmark values (scales to 1) by a ridge whose width is
the one that best predicts steps left out; what the left-out steps still miss becomes the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from tunecast.calibrate.fit_curves import MEASURED, soft_l1
from tunecast.calibrate.stats import MAD_TO_SD
from tunecast.model.columns import CACHED, COLUMNS, FLOOR
from tunecast.model.curves import Array
from tunecast.model.factors import HOST_RATIOS, HOST_S_PER_LAUNCH, Factor, FactorSet
from tunecast.model.phase_table import PhaseTable
from tunecast.model.segments import passes_of
from tunecast.model.time import HOST_COLUMNS, LOG_STEP, host_steps, log_gradient, stacked, step_seconds
from tunecast.model.units import MILLISECOND_S
from tunecast.model.value import Z80

RIDGES = (0.25, 1.0, 4.0)
"""Ridge widths tried, as multiples of `PRIOR_LOG_SD`."""
PRIOR_LOG_SD = {
    "scale": 0.10,
    f"scale.{FLOOR}": 0.5,
    f"scale.{CACHED}": 0.3,
    "scale.host_recompute": 0.4,
    "scale.host_backward": 0.4,
    "scale.host_dequant": 1.5,
    "scale.host_calls": 1.5,
    "scale.host_layers": 1.5,
    HOST_S_PER_LAUNCH: 1.0,
    "step_overhead_s": 1.5,
}
"""How far, in e-folds, a correction may be from its start before steps must insist. Widths, not values:
the data choose their multiple from `RIDGES`."""
STEP_LOG_NOISE = 0.01
"""Smallest spread given to a step: a forecast closer than this to a measurement is as good as it."""
ROBUST_STEPS = 3.0
"""A step this many spreads off is trusted less (soft-L1)."""
MIN_SHARE = 0.002
"""A kind below this share of every step's device time gets no correction."""
CALL_LAUNCHES = 5.0
"""Launches' worth of host time from which the search starts for a call of the optimizer, and for entering a layer."""
NARROWING = 1.25
"""By which the host's reach is cut until the steps allow it."""
MIN_STEPS = 3
MIN_GROUPS = 4
"""Widths below which steps are left out one by one."""
SPREADS = tuple(float(spread) for spread in STEP_LOG_NOISE * np.geomspace(1.0, 64.0, 25))
"""Spreads tried: from half the noise of a step to 64 times that, a fifth more each time."""
HOST_STARTS = (1.0, 2.0, 4.0, 10.0)
"""Multiples of the launch benchmark to start from: eager PEFT costs several times a bare launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One whole-step trial and the operations' table of the same run."""

    trial: str
    table: PhaseTable
    seconds: float
    log_noise: float
    group: str = ""
    """What steps that say the same of a model's shape have in common; empty: a group of its own."""
    method: str = "lora"
    dtype: str = "bf16"
    """Compute dtype, whose peak the mfu is taken over."""
    model_flops: float = 0.0
    """Required work of the step, see `model_flops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """In-step factors with their joint uncertainty."""

    names: tuple[str, ...]
    values: dict[str, float]
    covariance: Array
    left_out: tuple[float, ...]
    """Log(measured / predicted) of each step, predicted by a fit without it."""
    step_log_sd: float


def step_names(steps: Sequence[MeasuredStep]) -> tuple[str, ...]:
    """Factors that these steps can say something about."""
    share = np.max([_shares(step.table) for step in steps], axis=0)
    scales = [f"scale.{kind}" for kind, part in zip(COLUMNS, share, strict=True) if part > MIN_SHARE]
    launched = np.sum([step.table.launches.sum(axis=0) for step in steps], axis=0)
    hosts = [
        f"scale.host_{name}"
        for name, found in zip(HOST_COLUMNS, launched, strict=True)
        if found and name in HOST_RATIOS
    ]
    return (*scales, HOST_S_PER_LAUNCH, *hosts, "step_overhead_s")


def _shares(table: PhaseTable) -> Array:
    total = passes_of(table.micro_steps) @ table.device_s
    return np.asarray(total / total.sum())


def _prior_sd(name: str) -> float:
    return PRIOR_LOG_SD.get(name, PRIOR_LOG_SD["scale"])


def start_values(names: Sequence[str], host_s_per_launch: float) -> dict[str, float]:
    """Where the ridge pulls: scales to 1, the host to its launch benchmark, the constant to 0.2 ms."""
    start = dict.fromkeys(names, 1.0)
    start |= {name: CALL_LAUNCHES for name in ("scale.host_calls", "scale.host_layers") if name in start}
    return start | {HOST_S_PER_LAUNCH: host_s_per_launch, "step_overhead_s": MILLISECOND_S / 5}


def predict(steps: Sequence[MeasuredStep], values: dict[str, float], *, synchronous: bool) -> Array:
    """Log seconds of each step."""
    return np.asarray(np.log(step_seconds(stacked([step.table for step in steps]), values, synchronous=synchronous)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    names: tuple[str, ...]
    start: dict[str, float]
    ridge: float
    synchronous: bool

    def values(self, theta: Array) -> dict[str, float]:
        return {name: self.start[name] * float(np.exp(t)) for name, t in zip(self.names, theta, strict=True)}

    def prior(self) -> Array:
        return self.ridge * np.array([_prior_sd(name) for name in self.names])

    def solve(self, steps: Sequence[MeasuredStep], spread: Array, first: Array) -> tuple[float, Array]:
        """(cost, log factors over their start)."""
        measured, stack = np.log([step.seconds for step in steps]), stacked([step.table for step in steps])

        def residuals(theta: Array) -> Array:
            predicted = np.log(step_seconds(stack, self.values(theta), synchronous=self.synchronous))
            error = (measured - predicted) / spread
            return np.concatenate([ROBUST_STEPS * soft_l1(error / ROBUST_STEPS), theta / self.prior()])

        found = least_squares(residuals, first, bounds=(-8.0, 8.0), max_nfev=60)
        return float(found.cost), np.asarray(found.x)

    def search(self, steps: Sequence[MeasuredStep], spread: Array) -> Array:
        """The best of several starts: a host that is too fast is never the bound, and then nothing pulls at it."""
        starts = np.zeros((len(HOST_STARTS), len(self.names)))
        starts[:, self.names.index(HOST_S_PER_LAUNCH)] = np.log(HOST_STARTS)
        return min((self.solve(steps, spread, first) for first in starts), key=lambda found: found[0])[1]

    def jacobian(self, steps: Sequence[MeasuredStep], theta: Array, by: Mapping[str, float] | None = None) -> Array:
        stack = stacked([step.table for step in steps])
        return log_gradient(stack, self.values(theta), self.names, synchronous=self.synchronous, by=by)

    def allowed(self, steps: Sequence[MeasuredStep], theta: Array, spread: Array) -> dict[str, float]:
        """How far up each factor of the host may go before the steps object: one spread of all of them together.

        A host that is never the bound has no slope, and yet steps say that it is not much slower.
        """
        at, found = predict(steps, self.values(theta), synchronous=self.synchronous), {}
        for place, (name, widest) in enumerate(zip(self.names, self.prior(), strict=True)):
            by = float(widest)
            while "host" in name and by > LOG_STEP:
                moved = self.values(theta + by * np.eye(len(theta))[place])
                error = (predict(steps, moved, synchronous=self.synchronous) - at) / spread
                if float(error @ error) <= 1.0:
                    break
                by /= NARROWING
            if "host" in name:
                found[name] = max(by, LOG_STEP)
        return found

    def covariance(self, steps: Sequence[MeasuredStep], theta: Array, spread: Array) -> Array:
        """Inverse curvature of the ridge problem at its solution, the host's as far as the steps allow it to go."""
        reach = self.allowed(steps, theta, spread)
        slope = self.jacobian(steps, theta, reach) / spread[:, None]
        prior = np.array([reach.get(name, sd) for name, sd in zip(self.names, self.prior(), strict=True)])
        return np.asarray(np.linalg.inv(slope.T @ slope + np.diag(1.0 / prior**2)))


def _spread(steps: Sequence[MeasuredStep], extra: float) -> Array:
    return np.array([np.hypot(step.log_noise, extra) for step in steps])


def folds(steps: Sequence[MeasuredStep]) -> list[list[int]]:
    """Steps that are left out together: those of one width, so that what is left out is unlike what is fitted.

    With fewer than `MIN_GROUPS` widths every step is left out alone.
    """
    groups: dict[str, list[int]] = {}
    for place, step in enumerate(steps):
        groups.setdefault(step.group or step.trial, []).append(place)
    return list(groups.values()) if len(groups) >= MIN_GROUPS else [[place] for place in range(len(steps))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeftOut:
    """Steps predicted by fits that never saw them, nor any of their width."""

    error: Array
    """Log(measured / predicted)."""
    variance: Array
    """Of the prediction, by the factors of that fit."""
    host_slope: Array
    """By how much log seconds move with the log of the host's seconds per launch, over that fit's spread of it."""


def _left_out(problem: _Problem, steps: Sequence[MeasuredStep], theta: Array, extra: float) -> _LeftOut:
    found = _LeftOut(error=np.zeros(len(steps)), variance=np.zeros(len(steps)), host_slope=np.zeros(len(steps)))
    for out in folds(steps):
        rest, tested = [s for i, s in enumerate(steps) if i not in out], [steps[i] for i in out]
        spread = _spread(rest, extra)
        _, fitted = problem.solve(rest, spread, theta)
        measured = np.log([step.seconds for step in tested])
        found.error[out] = measured - predict(tested, problem.values(fitted), synchronous=problem.synchronous)
        covariance = problem.covariance(rest, fitted, spread)
        slope = problem.jacobian(tested, fitted, host_steps(problem.names, covariance))
        found.variance[out] = np.sum((slope @ covariance) * slope, axis=1)
        found.host_slope[out] = slope[:, problem.names.index(HOST_S_PER_LAUNCH)]
    return found


def remaining_sds(error: Array, variance: Array, host_slope: Array) -> tuple[float, float]:
    """(spread between runs of the step, spread between runs of the host's cost per launch) that errors left over.

    Launches of unlike models differ in what the host does for each, kernels hardly: so the host has a spread of its
    own, felt by a run as far as the host bounds it. Of all pairs the one under which the errors, normal with variance
    s^2 + (slope h)^2 + what the factors and the noise of the measurement explain, are most likely.
    """
    chosen, best = (STEP_LOG_NOISE, 0.0), -np.inf
    for s in SPREADS:
        for host in (0.0, *SPREADS):
            total = s**2 + (host_slope * host) ** 2 + variance
            likelihood = float(-0.5 * np.sum(np.log(total) + error**2 / total))
            if likelihood > best:
                chosen, best = (s, host), likelihood
    return chosen


def _curve_variance(steps: Sequence[MeasuredStep], values: dict[str, float], *, synchronous: bool) -> Array:
    stack = stacked([step.table for step in steps])
    slope = log_gradient(stack, values, [f"scale.{column}" for column in COLUMNS], synchronous=synchronous)
    return np.asarray(np.sum(slope**2 * np.array([step.table.column_log_variance for step in steps]), axis=1))


def _fit_ridge(problem: _Problem, steps: Sequence[MeasuredStep]) -> tuple[float, StepFit]:
    """(left-out score, fit) for one ridge width; the spread of steps is estimated once and used again."""
    extra = 2 * STEP_LOG_NOISE
    for _ in range(2):
        theta = problem.search(steps, _spread(steps, extra))
        left = _left_out(problem, steps, theta, extra)
        extra = max(STEP_LOG_NOISE, MAD_TO_SD * float(np.median(np.abs(left.error))))
    values = problem.values(theta)
    curves = _curve_variance(steps, values, synchronous=problem.synchronous)
    noise = np.array([step.log_noise for step in steps]) ** 2
    step_sd, host_sd = remaining_sds(left.error, left.variance + curves + noise, left.host_slope)
    covariance = problem.covariance(steps, theta, _spread(steps, extra))
    host = problem.names.index(HOST_S_PER_LAUNCH)
    covariance[host, host] += host_sd**2
    fit = StepFit(
        names=problem.names,
        values=values,
        covariance=covariance,
        left_out=tuple(left.error.tolist()),
        step_log_sd=step_sd,
    )
    return float(np.mean(np.abs(left.error))), fit


def fit_steps(steps: Sequence[MeasuredStep], *, host_s_per_launch: float, synchronous: bool) -> StepFit | None:
    """Fit in-step factors; None with too few steps to leave one out.

    Of the ridges that predict steps left out as well as the best, within its standard error, the narrowest (Breiman et
    al. 1984, section 3.4.3): factors that steps cannot part stay where benchmarks left them.
    """
    if len(steps) < MIN_STEPS:
        return None
    names = step_names(steps)
    start = start_values(names, host_s_per_launch)
    fits = [
        _fit_ridge(_Problem(names=names, start=start, ridge=ridge, synchronous=synchronous), steps) for ridge in RIDGES
    ]
    best_score, best = min(fits, key=lambda scored: scored[0])
    error = np.abs(best.left_out)
    enough = best_score + float(np.std(error)) / np.sqrt(len(error))
    return next(fit for score, fit in fits if score <= enough)


def step_factors(fit: StepFit) -> dict[str, Factor]:
    """The fitted factors with 80% intervals from their covariance."""
    sds = np.sqrt(np.diag(fit.covariance))
    out = {}
    for name, sd in zip(fit.names, sds, strict=True):
        value, wide = fit.values[name], float(np.exp(Z80 * min(sd, 8.0)))
        unit = "1" if name.startswith("scale.") else "s"
        out[name] = Factor(value=value, low=value / wide, high=value * wide, unit=unit, origin=MEASURED)
    return out


def with_steps(factors: FactorSet, fit: StepFit) -> FactorSet:
    """The factor set, corrected by whole steps."""
    return replace(
        factors,
        factors={**factors.factors, **step_factors(fit)},
        step_log_sd=fit.step_log_sd,
        step_params=fit.names,
        step_covariance=tuple(tuple(row) for row in fit.covariance.tolist()),
    )
