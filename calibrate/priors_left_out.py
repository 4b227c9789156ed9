"""How far the priors are off on rows of sources that they have not seen: what new ones lose, and the intervals' width.

Each source is left out in turn, everything refitted but the spreads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunecast.calibrate.priors_hierarchy import STUDENT_DF, Array, Solution, linear, solve_like
from tunecast.calibrate.priors_problem import CELL, SHARED, Row, problem_of
from tunecast.model.prior_effects import DEQUANT_KERNEL
from tunecast.model.value import INTERVAL_LEVEL, Z80

NARROWEST = 0.5
"""Least multiple of the spreads: few sources left out may all be near by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A row forecast by a fit that has not seen it."""

    missed: float
    """log(measured / predicted) of the step time, a new source taken to be no slower than those of the fit."""
    log_sd: float
    """Of that, beside `new_log_sd`: what the priors' width goes for."""
    new_log_sd: float
    """Of a card, its clock, a generation, a sharding and an attention kernel that the fit does not know, and of the
    source's host: forecasts keep those spreads, whatever the width (`scaled`)."""
    work_share: float
    """By how much the step's log grows with that of the device's work."""


def unseen_of(solution: Solution, rows: Sequence[Row]) -> list[Unseen]:
    """Rows that the solution has not seen. Effects that it does not have are none, with their group's spread."""
    problem = problem_of(rows)
    known = {effect: place for place, effect in enumerate(solution.problem.effects)}
    shared = len(SHARED)
    own = [*range(shared), *(shared + known[e] for e in problem.effects if e in known)]
    kept = [*range(shared), *(shared + i for i, e in enumerate(problem.effects) if e in known)]
    vector = np.concatenate([solution.vector[:shared], problem.effect_centre])
    covariance = np.diag([0.0] * shared + [solution.sds[group] ** 2 for group, _ in problem.effects])
    unscaled = np.zeros(len(vector))
    for i, (group, name) in enumerate(problem.effects):
        if (group, name) not in known and not scaled(group):
            unscaled[shared + i], covariance[shared + i, shared + i] = solution.sds[group], 0.0
    vector[kept] = solution.vector[own]
    covariance[np.ix_(kept, kept)] = solution.covariance[np.ix_(own, own)]
    level, slopes = linear(problem, vector)
    variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes) + row_log_sd(solution.sds) ** 2
    of_card = [shared + i for i, (group, _) in enumerate(problem.effects) if group == "device"]
    work = slopes[:, of_card].sum(axis=1)  # every row has one effect of its card, on all of the device's work
    new = np.sqrt((slopes**2) @ unscaled**2)
    found = zip(problem.measured - level, np.sqrt(variance), new, work, strict=True)
    return [Unseen(missed=float(m), log_sd=float(s), new_log_sd=float(n), work_share=float(w)) for m, s, n, w in found]


def scaled(group: str) -> bool:
    """Whether the priors' width goes for the spread of a group's unknown effects, as `step_covariance` has it."""
    return group in (CELL, DEQUANT_KERNEL) or group.startswith(("source.", "stack."))


def row_log_sd(sds: Mapping[str, float]) -> float:
    """Normal standard deviation of the same 80% interval as the rows' Student noise."""
    from scipy.stats import t

    return float(sds["row"] * t.ppf(0.5 + INTERVAL_LEVEL / 2.0, df=STUDENT_DF) / Z80)


def left_out(rows: Sequence[Row], whole: Solution) -> dict[str, Unseen]:
    """By id: every row as a fit without its source forecasts it.

    The spreads are those of all rows: estimating them in every inner fit would change little.
    """
    found: dict[str, Unseen] = {}
    for source in sorted({row.run.source for row in rows}):
        kept = [row for row in rows if row.run.source != source]
        out = [row for row in rows if row.run.source == source]
        if kept:
            unseen = unseen_of(solve_like(problem_of(kept), whole), out)
            found |= {row.run.id: own for row, own in zip(out, unseen, strict=True)}
    return found


def source_weights(rows: Sequence[Row]) -> Array:
    """(rows,) one over the rows of its source: a new run is of a new source, and those of one are not independent."""
    sources = [row.run.source for row in rows]
    return np.array([1.0 / sources.count(source) for source in sources])


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """The least of the values that, with those below it, has this share of the weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share - 1e-9)])


def slower_of(rows: Sequence[Row], unseen: Mapping[str, Unseen]) -> float:
    """Log of time by which the device's work of sources left out is slower than forecast without them.

    The effects of the sources in a fit are centred; those of others are not: what slows one set-up alone is told by the
    rows of its source only. Least absolute deviations, every source weighing the same; rows that wait for their host
    have no say.
    """
    own = [row for row in rows if row.run.id in unseen and unseen[row.run.id].work_share > 0.0 and not row.waits]
    if not own:
        return 0.0
    missed = np.array([unseen[row.run.id].missed for row in own])
    shares = np.array([unseen[row.run.id].work_share for row in own])
    return weighted_quantile(missed / shares, source_weights(own) * shares, 0.5)


def width_of(rows: Sequence[Row], unseen: Mapping[str, Unseen], slower: float) -> float:
    """Multiple of the spreads that it goes for with which 80% intervals hold 80% of rows left out with their source,
    forecast `slower`. Never below a half. Steps of records that wait for their host have no say: one machine's are no
    sample of hosts, whose spread is kept whatever the width."""
    own = [row for row in rows if row.run.id in unseen and not row.waits]
    if not own:
        return 1.0
    found = [unseen[row.run.id] for row in own]
    needed = [((item.missed - slower * item.work_share) / Z80) ** 2 - item.new_log_sd**2 for item in found]
    sizes = np.array([math.sqrt(max(need, 0.0)) / item.log_sd for need, item in zip(needed, found, strict=True)])
    return max(weighted_quantile(sizes, source_weights(own), INTERVAL_LEVEL), NARROWEST)
