"""The statistics of the priors: a few efficiencies, and what rows differ by, with the spread of each.

    log(step time) = log(clocks at the efficiencies, each kind of work slowed by the effects that reach it) + noise

Effects are random: logs of time by which a card, a stack, a sharding, a source or a cell (a source's rows of one
method on one card) is slower, some in all of the device's work and some in one kind of it (products, attention, bytes
moved, dequantization, links, the host's launches). So rows of many runs of one source cannot state one kind's rate for
all the others, and a forecast is as unsure as the kinds that it consists of. Every group has one spread, found by
maximum marginal likelihood under a wide belief; effects and efficiencies follow from the spreads by Gauss-Newton, and
the noise of rows has Student's tails, so that an odd row moves little. What the rows leave open is the covariance that
a forecast of a new run uses: a card, stack, sharding or source that is not among the rows has its group's spread
instead of an effect.
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
STUDENT_DF = 4.0
"""Degrees of freedom of the noise of rows (Lange, Little, Taylor 1989 propose four for robust regression)."""
LEAST_SD = 2e-3
"""No spread is smaller: published figures are rounded."""
MOST_SD = 2.0
"""No spread is larger."""
STEP = 0.05
"""To either side, of the numerical derivatives, in logs: wide enough to pass over the kinks where a row's links or its
host come out from behind its device, since a slope on one side of a kink says where the search ended, not how sure
it is."""
LEAST_SHARE = 1e-4
"""Of a Gauss-Newton step, when halving it ends."""
ROUNDS = 40
"""Of spreads after efficiencies after spreads, at most."""
SAME_LIKELIHOOD = 0.05
"""A round that changes the log likelihood by less is the last one."""
REWEIGHTED = 4
"""Rounds of weights and vector at given spreads: after two the overlap of communication had still not arrived."""
NEWTON_STEPS = 12
SETTLED = 1e-3
"""A Gauss-Newton step below this has arrived."""

Timed = Callable[[Array, Array], Array]
"""(logs of the parameters, (rows, columns) logs by which each row's work is slower) to log seconds of each row."""


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
    columns: tuple[str, ...]
    """Kinds of work that an effect may slow."""
    moves: Mapping[str, tuple[str, ...]]
    """By group: the columns that its effects slow, all alike."""
    measured: Array
    """Logs of seconds."""
    timed: Timed
    follows: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Parameters whose derivative is that of a column, with its sign: half an efficiency is twice the work's time."""
    starts: tuple[tuple[float, ...], ...] = ()
    """Offsets of the shared logs from their centre to start from: where the device decides, the host has no slope."""
    trust: Array | float = 1.0
    """(rows,) Of a row's precision, what one with noise of its own has."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of effects, in order."""
        return tuple(dict.fromkeys(group for group, _ in self.effects))

    @property
    def reach(self) -> Array:
        """(effects, columns) 1 where an effect slows a column."""
        return np.array([[float(column in self.moves[group]) for column in self.columns] for group, _ in self.effects])


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
    weights = np.ones(len(problem.measured)) * problem.trust
    vector = first_vector(problem, weights, sds)
    reached = math.inf
    for _ in range(ROUNDS):
        vector = newton(problem, vector, weights, sds)
        weights = row_weights(problem, vector, sds)
        before, (sds, reached) = reached, spreads(marginal_of(problem, vector, weights), sds)
        if abs(before - reached) < SAME_LIKELIHOOD:
            break
    return ended(problem, newton(problem, vector, weights, sds), weights, sds)


def solve_like(problem: Problem, other: Solution) -> Solution:
    """What fewer rows say at the spreads of more, starting from where those arrived."""
    effects, sds = other.effects, other.sds
    shared = other.vector[: len(problem.names)]
    vector = np.concatenate([shared, [effects[effect] for effect in problem.effects]])
    weights = np.ones(len(problem.measured)) * problem.trust
    for _ in range(REWEIGHTED):
        weights = row_weights(problem, vector, sds)
        vector = newton(problem, vector, weights, sds)
    return ended(problem, vector, weights, sds)


def ended(problem: Problem, vector: Array, weights: Array, sds: Mapping[str, float]) -> Solution:
    """The solution at a vector that Gauss-Newton found."""
    _, slopes = linear(problem, vector)
    precision = slopes.T @ (slopes * (weights / sds["row"] ** 2)[:, None]) + np.diag(prior_precision(problem, sds))
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return Solution(problem=problem, vector=vector, covariance=covariance, sds=sds)


def split(problem: Problem, vector: Array) -> tuple[Array, Array]:
    """Shared parameters, and by row the logs by which its columns are slower."""
    shared, effects = vector[: len(problem.names)], vector[len(problem.names) :]
    return shared, problem.members @ (effects[:, None] * problem.reach)


def linear(problem: Problem, vector: Array) -> tuple[Array, Array]:
    """Log seconds, and their derivatives by every entry of the vector."""
    shared, slower = split(problem, vector)

    def slope(by_shared: Array | float, by_slower: Array | float) -> Array:
        ahead = problem.timed(shared + STEP * by_shared, slower + STEP * by_slower)
        behind = problem.timed(shared - STEP * by_shared, slower - STEP * by_slower)
        return np.asarray((ahead - behind) / (2.0 * STEP))

    columns = zip(problem.columns, np.eye(len(problem.columns)), strict=True)
    by_column = {column: slope(0.0, unit) for column, unit in columns}

    def own(name: str, unit: Array) -> Array:
        column, sign = problem.follows.get(name, ("", 1.0))
        return sign * by_column[column] if column else slope(unit, 0.0)

    of_shared = [own(name, unit) for name, unit in zip(problem.names, np.eye(len(shared)), strict=True)]
    of_effects = problem.members * (np.column_stack([*by_column.values()]) @ problem.reach.T)
    return problem.timed(shared, slower), np.column_stack([*of_shared, of_effects])


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
        while share > LEAST_SHARE and cost(vector + share * step) > best:
            share /= 2.0
        vector = vector + share * step
        best = cost(vector)
        if float(np.abs(share * step).max()) < SETTLED:
            break
    return vector


def row_weights(problem: Problem, vector: Array, sds: Mapping[str, float]) -> Array:
    """Of every row: its trust, by how far it is off in its own noise."""
    missed = problem.measured - problem.timed(*split(problem, vector))
    return np.asarray(problem.trust * student_weights(missed * np.sqrt(problem.trust), sds["row"]))


def student_weights(missed: Array, sd: float) -> Array:
    """(df + 1) / (df + z^2): the weight that a row has under Student's noise."""
    return np.asarray((STUDENT_DF + 1.0) / (STUDENT_DF + (missed / sd) ** 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal:
    """The likelihood of spreads with everything else integrated out, times their beliefs; linear at a vector."""

    problem: Problem
    names: tuple[str, ...]
    """Of the spreads: the groups, then ``row``."""
    group: npt.NDArray[np.int64]
    """(effects,) place of each effect's group among the names."""
    inner: Array
    outer: Array
    total: float
    """Weighted products of slopes and of what rows miss."""

    def minus_log(self, logs: Array) -> tuple[float, Array]:
        """Minus its logarithm, and the derivatives by the logs of the spreads."""
        problem, noise = self.problem, math.exp(2.0 * logs[-1])
        precision = np.concatenate([problem.width**-2.0, np.exp(-2.0 * logs[self.group])])
        covariance = np.linalg.inv(self.inner / noise + np.diag(precision))
        mean = covariance @ self.outer / noise
        log_det = -float(np.linalg.slogdet(covariance)[1]) - float(np.log(precision).sum())
        believed = np.log([problem.believed_sd[name] for name in self.names])
        off = (logs - believed) / problem.believed_sd_log_sd
        rows = len(problem.measured)
        fitted = float(self.outer @ mean) / noise
        value = 0.5 * (self.total / noise - fitted + log_det + rows * math.log(noise) + float(off @ off))
        own = 1.0 - (mean**2 + np.diag(covariance)) * precision
        missed = self.total - 2.0 * float(self.outer @ mean) + float(mean @ self.inner @ mean)
        gradient = np.zeros(len(logs))
        np.add.at(gradient, self.group, own[len(problem.names) :])
        gradient[-1] = rows - (missed + float((covariance * self.inner).sum())) / noise
        return float(value), gradient + off / problem.believed_sd_log_sd


def marginal_of(problem: Problem, vector: Array, weights: Array) -> Marginal:
    """The likelihood of spreads where Gauss-Newton is now."""
    level, slopes = linear(problem, vector)
    centre = np.concatenate([problem.centre, problem.effect_centre])
    missed = problem.measured - level - slopes @ (centre - vector)
    names = (*problem.groups, "row")
    return Marginal(
        problem=problem,
        names=names,
        group=np.array([names.index(group) for group, _ in problem.effects], dtype=np.int64),
        inner=slopes.T @ (slopes * weights[:, None]),
        outer=slopes.T @ (weights * missed),
        total=float(weights @ missed**2),
    )


def spreads(marginal: Marginal, start: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """The spreads of highest marginal likelihood, and minus its logarithm."""
    from scipy.optimize import minimize

    bounds = [(math.log(LEAST_SD), math.log(MOST_SD))] * len(marginal.names)
    begin = np.log([start[name] for name in marginal.names])
    found = minimize(marginal.minus_log, begin, jac=True, method="L-BFGS-B", bounds=bounds)
    ends = dict(zip(marginal.names, np.exp(found.x).tolist(), strict=True))
    return {**marginal.problem.believed_sd, **ends}, float(found.fun)


def effects_of(names: Sequence[Sequence[Effect]]) -> tuple[tuple[Effect, ...], Array]:
    """All effects, sorted, and which row has which."""
    effects = tuple(sorted({effect for own in names for effect in own}))
    place = {effect: i for i, effect in enumerate(effects)}
    members = np.zeros((len(names), len(effects)))
    for row, own in enumerate(names):
        members[row, [place[effect] for effect in own]] = 1.0
    return effects, members
