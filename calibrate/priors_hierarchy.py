"""The statistics of the priors: a few efficiencies, and what rows differ by as a whole, with the spread of each.

    log(step time) = log(clocks at the efficiencies) + device + stack + sharding + source + cell + noise

Device, stack, sharding, source and cell (a source's rows of one method on one card) are random effects: logs of time
that slow the device's work. Each source has its own host, too. Every group has one spread, found by maximum marginal
likelihood under a wide belief; effects and efficiencies follow from the spreads by Gauss-Newton, and the noise of rows
has Student's tails, so that an odd row moves little. What the rows leave open is the covariance that a forecast of a
new run uses: a card, stack or sharding that is not among the rows has its group's spread instead of an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Effect = tuple[str, str]
"""Group and name."""
HOST = "host"
"""The group whose effects slow the host's launches; the others slow the device's work."""
STUDENT_DF = 4.0
"""Degrees of freedom of the noise of rows (Lange, Little, Taylor 1989 propose four for robust regression)."""
LEAST_SD = 2e-3
"""No spread is smaller: published figures are rounded."""
STEP = 1e-4
"""Of the numerical derivatives, in logs."""
ROUNDS = 3
"""Of spreads after efficiencies after spreads; the last ones move by less than a percent."""
NEWTON_STEPS = 12
SETTLED = 1e-4
"""A Gauss-Newton step below this has arrived."""

Timed = Callable[[Array, Array, Array], Array]
"""(logs of the parameters, each row's log slowdown of device work, and of launches) to log seconds of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows and beliefs."""

    names: tuple[str, ...]
    """Parameters that all rows share."""
    centre: Array
    width: Array
    """Beliefs of their logarithms."""
    effects: tuple[Effect, ...]
    members: Array
    """(rows, effects) 1 where the row has the effect."""
    effect_centre: Array
    believed_sd: Mapping[str, float]
    """By group, and ``row``: the middle of the belief of a spread."""
    believed_sd_log_sd: float
    """How wide that belief is."""
    measured: Array
    """Logs of seconds."""
    timed: Timed
    starts: tuple[tuple[float, ...], ...] = ()
    """Offsets of the shared logs from their centre to start from: where the device decides, the host has no slope."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of effects, in order."""
        return tuple(dict.fromkeys(group for group, _ in self.effects))

    @property
    def in_host(self) -> npt.NDArray[np.bool_]:
        """(effects,) whether an effect slows the host."""
        return np.array([group == HOST for group, _ in self.effects], dtype=bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the rows say."""

    problem: Problem
    vector: Array
    """Logs of parameters, then effects."""
    covariance: Array
    """Of the vector."""
    sds: Mapping[str, float] = field(default_factory=dict)
    """Spread of each group, and of rows."""

    @property
    def params(self) -> dict[str, float]:
        """Values of the parameters."""
        return {name: float(np.exp(v)) for name, v in zip(self.problem.names, self.vector, strict=False)}

    @property
    def effects(self) -> dict[Effect, float]:
        """Values of the effects."""
        return dict(zip(self.problem.effects, self.vector[len(self.problem.names) :].tolist(), strict=True))


def solve(problem: Problem) -> Solution:
    """Alternate: efficiencies and effects at given spreads, then spreads and weights at those."""
    sds = dict(problem.believed_sd)
    weights = np.ones(len(problem.measured))
    vector = first_vector(problem, weights, sds)
    for _ in range(ROUNDS):
        vector = newton(problem, vector, weights, sds)
        level, slopes = linear(problem, vector)
        weights = student_weights(problem.measured - level, sds["row"])
        sds = spreads(problem, vector, level, slopes, weights, sds)
    return ended(problem, newton(problem, vector, weights, sds), weights, sds)


def solve_like(problem: Problem, other: Solution) -> Solution:
    """What fewer rows say at the spreads of more, starting from where those arrived."""
    effects, sds = other.effects, other.sds
    shared = other.vector[: len(problem.names)]
    vector = np.concatenate([shared, [effects[effect] for effect in problem.effects]])
    weights = np.ones(len(problem.measured))
    for _ in range(2):
        weights = student_weights(problem.measured - problem.timed(*split(problem, vector)), sds["row"])
        vector = newton(problem, vector, weights, sds)
    return ended(problem, vector, weights, sds)


def ended(problem: Problem, vector: Array, weights: Array, sds: Mapping[str, float]) -> Solution:
    """The solution at a vector that Gauss-Newton found."""
    _, slopes = linear(problem, vector)
    precision = slopes.T @ (slopes * (weights / sds["row"] ** 2)[:, None]) + np.diag(prior_precision(problem, sds))
    return Solution(
        problem=problem, vector=vector, covariance=np.asarray(np.linalg.inv(precision), dtype=np.float64), sds=sds
    )


def split(problem: Problem, vector: Array) -> tuple[Array, Array, Array]:
    """Shared parameters, effects on device work by row, effects on the host by row."""
    shared, effects = vector[: len(problem.names)], vector[len(problem.names) :]
    host = problem.in_host
    return shared, problem.members @ (effects * ~host), problem.members @ (effects * host)


def linear(problem: Problem, vector: Array) -> tuple[Array, Array]:
    """Log seconds, and their derivatives by every entry of the vector."""
    shared, work, host = split(problem, vector)
    level = problem.timed(shared, work, host)

    def slope(moved: tuple[Array, Array, Array]) -> Array:
        return (problem.timed(*moved) - level) / STEP

    own = [slope((shared + STEP * unit, work, host)) for unit in np.eye(len(shared))]
    by_work, by_host = slope((shared, work + STEP, host)), slope((shared, work, host + STEP))
    per_effect = np.where(problem.in_host[None, :], by_host[:, None], by_work[:, None])
    return level, np.column_stack([*own, problem.members * per_effect])


def prior_precision(problem: Problem, sds: Mapping[str, float]) -> Array:
    """Of every entry of the vector."""
    effects = np.array([sds[group] for group, _ in problem.effects])
    return np.concatenate([problem.width, effects]) ** -2.0


def first_vector(problem: Problem, weights: Array, sds: Mapping[str, float]) -> Array:
    """Where Gauss-Newton from the best of the starts arrives."""
    offsets = problem.starts or ((0.0,) * len(problem.names),)
    begun = [np.concatenate([problem.centre + np.array(offset), problem.effect_centre]) for offset in offsets]
    ends = [newton(problem, vector, weights, sds) for vector in begun]
    return min(ends, key=lambda vector: cost_of(problem, vector, weights, sds))


def cost_of(problem: Problem, vector: Array, weights: Array, sds: Mapping[str, float]) -> float:
    """Weighted squares of what rows and beliefs miss, in their spreads."""
    centre = np.concatenate([problem.centre, problem.effect_centre])
    missed = problem.measured - problem.timed(*split(problem, vector))
    return float((weights / sds["row"] ** 2) @ missed**2 + prior_precision(problem, sds) @ (vector - centre) ** 2)


def newton(problem: Problem, vector: Array, weights: Array, sds: Mapping[str, float]) -> Array:
    """The vector that beliefs and weighted rows agree on, by Gauss-Newton with halved steps where one overshoots."""
    centre = np.concatenate([problem.centre, problem.effect_centre])
    precision, by_row = prior_precision(problem, sds), weights / sds["row"] ** 2

    def cost(at: Array) -> float:
        return cost_of(problem, at, weights, sds)

    best = cost(vector)
    for _ in range(NEWTON_STEPS):
        level, slopes = linear(problem, vector)
        gradient = slopes.T @ (by_row * (problem.measured - level)) - precision * (vector - centre)
        step = np.linalg.solve(slopes.T @ (slopes * by_row[:, None]) + np.diag(precision), gradient)
        share = 1.0
        while share > STEP and cost(vector + share * step) > best:
            share /= 2.0
        vector = vector + share * step
        best = cost(vector)
        if float(np.abs(share * step).max()) < SETTLED:
            break
    return vector


def student_weights(missed: Array, sd: float) -> Array:
    """(df + 1) / (df + z^2): the weight that a row has under Student's noise."""
    return np.asarray((STUDENT_DF + 1.0) / (STUDENT_DF + (missed / sd) ** 2))


def spreads(
    problem: Problem, vector: Array, level: Array, slopes: Array, weights: Array, start: Mapping[str, float]
) -> dict[str, float]:
    """The spreads of highest marginal likelihood, times their beliefs; the model is taken as linear at the vector."""
    from scipy.optimize import minimize

    centre = np.concatenate([problem.centre, problem.effect_centre])
    missed = problem.measured - level - slopes @ (centre - vector)
    names = (*problem.groups, "row")
    inner, outer = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * missed)
    total, rows = float(weights @ missed**2), len(missed)
    believed = np.log([problem.believed_sd[name] for name in names])

    def minus_log(logs: Array) -> float:
        sds = dict(zip(names, np.maximum(np.exp(logs), LEAST_SD).tolist(), strict=True))
        noise, precision = sds["row"] ** 2, prior_precision(problem, sds)
        system = inner / noise + np.diag(precision)
        fitted = float(outer @ np.linalg.solve(system, outer)) / noise**2
        log_det = float(np.linalg.slogdet(system)[1]) - float(np.log(precision).sum()) + rows * math.log(noise)
        belief = float((((logs - believed) / problem.believed_sd_log_sd) ** 2).sum())
        return float(0.5 * (total / noise - fitted + log_det + belief))

    found = minimize(
        minus_log,
        np.log([start[name] for name in names]),
        method="Nelder-Mead",
        options={"xatol": 1e-2, "fatol": 1e-2, "maxfev": 200},
    )
    ends = np.maximum(np.exp(found.x), LEAST_SD).tolist()
    return {**problem.believed_sd, **dict(zip(names, ends, strict=True))}


def effects_of(names: Sequence[Sequence[Effect]]) -> tuple[tuple[Effect, ...], Array]:
    """All effects, sorted, and which row has which."""
    effects = tuple(sorted({effect for own in names for effect in own}))
    return effects, np.array([[effect in own for effect in effects] for own in names], dtype=float)
