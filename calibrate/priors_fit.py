"""Fit the priors: efficiencies that published runs and records imply, and how far they are off on runs left out.

The spreads of the fit say how sure a forecast of a new run is; sources left out one by one say by how much a new one is
slower than that, and with which multiple of the spreads 80% intervals hold 80% of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunecast.calibrate.priors_hierarchy import Solution, solve
from tunecast.calibrate.priors_left_out import left_out, row_log_sd, slower_of, width_of
from tunecast.calibrate.priors_memory import memory_priors, memory_rows
from tunecast.calibrate.priors_problem import (
    BY_KIND,
    CELL,
    EFFICIENCIES,
    FRACTIONS,
    HOST_GROUP,
    SHARED,
    WHOLE,
    Row,
    Training,
    beliefs,
    believed,
    params_of,
    problem_of,
    rows_of_records,
)
from tunecast.calibrate.priors_records import RecordRuns
from tunecast.model.exposed import SHARES
from tunecast.model.factors import HOST_S_PER_LAUNCH
from tunecast.model.prior_effects import ATTENTION_KERNEL, CLOCK, DEQUANT_KERNEL
from tunecast.model.priors import PRIORS_SCHEMA, interval
from tunecast.model.value import INTERVAL_LEVEL, Z80

KERNELS = (CLOCK, ATTENTION_KERNEL, DEQUANT_KERNEL)
KNOWN_BY_KIND = (*(group for group in BY_KIND if not group.startswith("source.")), *KERNELS)
FORECAST_GROUPS = (*WHOLE, *KNOWN_BY_KIND)
"""Groups of effects that a forecast of a new run may know."""
AT_ONE = -0.01
"""Log of a fraction from which it counts as at its limit."""
NARROWED = 0.95
"""A spread below this share of the belief's was narrowed by the rows."""


def fit_rows(rows: Sequence[Row]) -> Solution:
    """The hierarchy that the rows say."""
    return solve(problem_of(rows))


def fit_priors(
    training: Training, records: tuple[Sequence[RecordRuns], Mapping[str, str]] = ((), {})
) -> dict[str, Any]:
    """The content of ``results/priors.json``, from the training rows of published runs, and from records and reasons
    against others as `read_records` gives them."""
    rows, runs, (measured, unread) = training.rows, training.runs, records
    of_memory = memory_rows(runs)
    used = {*of_memory, *(row.run.id for row in rows)}
    return {
        "made_by": "scripts/fit-priors",
        "table": training.table,
        "rows_skipped": _by_reason(training.reasons),
        **as_shipped(priors_of([*rows, *rows_of_records(measured)])),
        "rows_used": sorted(row.run.id for row in rows),
        "records_used": {record.name: len(record.runs) for record in measured},
        "records_skipped": dict(unread),
        "memory_rows_used": of_memory,
        "marks": {run.id: run.mark for run in runs if run.id in used},
        **memory_priors(runs, beliefs(), measured),
    }


def priors_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The time part of the priors, interval widths included, from these rows alone."""
    solution = fit_rows(rows)
    unseen, sds = left_out(rows, solution), solution.sds
    slower = slower_of(rows, unseen)
    width = width_of(rows, unseen, slower)
    told = {row.run.id for row in rows if not row.waits}
    missed = {row_id: slower * row.work_share - row.missed for row_id, row in unseen.items() if row_id in told}
    log_sds = {"new": width * math.hypot(sds[CELL], row_log_sd(sds)), "seen": width * row_log_sd(sds)}
    stored = {name: _stored(solution, name) for name in SHARED}
    return {
        "schema": PRIORS_SCHEMA,
        "rows_used": sorted(row.run.id for row in rows),
        "beliefs": beliefs(),
        "efficiency": {name: stored[name] for name in EFFICIENCIES},
        **{name: stored[name] for name in SHARED if name not in EFFICIENCIES},
        **{f"{group}_effects": _effects(solution, group) for group in WHOLE},
        "effects_by_kind": {group: _effects(solution, group) for group in KNOWN_BY_KIND},
        "covariance": _covariance(solution),
        "spreads": dict(sds),
        "source_effect": {"value": slower, "unit": "log of time", "origin": "published"},
        "width": width,
        "least_width": least_width(len({row.run.source for row in rows})),
        "step_log_sd": log_sds,
        "left_out_log_errors": {"by_source": missed},
    }


def as_shipped(priors: Mapping[str, Any]) -> dict[str, Any]:
    """These priors with the width of a forecast of a new source: never narrower than the spreads of their fit
    (`least_width`).

    What holds for the sources that they were made with, left out one by one, stays as ``left_out_width``. They need
    less than the spreads between them, but they are the ones that the model's structure and its vocabulary were made
    with in view: that says nothing of others.
    """
    shipped = with_width(priors, max(float(priors["width"]), float(priors["least_width"])))
    return {**shipped, "left_out_width": priors["width"]}


def least_width(sources: int) -> float:
    """Multiple of spreads between so many sources that an 80% interval of one more takes: a spread estimated from n of
    them makes it Student's with n - 1 degrees of freedom, not normal."""
    from scipy.stats import t

    return float(t.ppf(0.5 + INTERVAL_LEVEL / 2.0, df=max(sources - 1, 1)) / Z80)


def with_width(priors: Mapping[str, Any], width: float) -> dict[str, Any]:
    """These priors with another multiple of their spreads."""
    log_sds = priors["step_log_sd"] | {"new": priors["step_log_sd"]["new"] * width / priors["width"]}
    return {**priors, "width": width, "step_log_sd": log_sds}


def _effects(solution: Solution, group: str) -> dict[str, dict[str, Any]]:
    found = solution.effects.items()
    return {name: {"value": value, "unit": "log of time"} for (own, name), value in found if own == group}


def _covariance(solution: Solution) -> dict[str, Any]:
    """Of the shared parameters and of the effects that forecasts know; a share of communication at 1 does not vary."""
    shared = len(SHARED)
    free = [name not in SHARES or solution.vector[i] < AT_ONE for i, name in enumerate(SHARED)]
    kept = [i for i, (group, _) in enumerate(solution.problem.effects) if group in FORECAST_GROUPS]
    names = [*SHARED, *(":".join(solution.problem.effects[i]) for i in kept)]
    places = [*range(shared), *(shared + i for i in kept)]
    mask = np.array([*free, *(True for _ in kept)], dtype=float)
    values = solution.covariance[np.ix_(places, places)] * np.outer(mask, mask)
    return {"names": names, "values": [[float(f"{value:.5g}") for value in row] for row in values]}


def _stored(solution: Solution, name: str) -> dict[str, Any]:
    """A parameter with its interval, no fraction above 1; one that the rows did not narrow is still an assumption."""
    place = SHARED.index(name)
    value = params_of(solution.vector[: len(SHARED)])[name]
    value = min(value, 1.0) if name in FRACTIONS else value
    spread, belief = float(np.sqrt(solution.covariance[place, place])), believed(name)
    hosts = solution.sds.get(HOST_GROUP, 0.0) if name == HOST_S_PER_LAUNCH else 0.0
    bounds = interval(value, math.hypot(spread, hosts))
    if name in FRACTIONS:
        bounds["high"] = min(bounds["high"], 1.0)
    origin = "published" if spread < NARROWED * belief["log_sd"] else "assumed"
    return {**bounds, "unit": belief["unit"], "origin": origin}


def _by_reason(reasons: Mapping[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons.values():
        counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
