"""Fit the priors: efficiencies that published runs imply, and how far they are off on runs left out.

Each row's operations are timed at the datasheet's rates; what remains is a few efficiencies, an
effect of each device and of each software stack, all pulled to their beliefs, by robust least
squares in the logarithm. Widths come from rows that the fit did not see: whole sources left out for
cards that it knows, whole cards left out for those that it does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunecast.calibrate.priors_memory import memory_overheads
from tunecast.calibrate.priors_stack import LINK_SECONDS, clock_values, log_seconds
from tunecast.calibrate.published import PublishedRun, read_runs, read_table
from tunecast.catalogs.gpus import load_gpus, training_dtype
from tunecast.model.inventory import step_operations
from tunecast.model.parallel_network import WHOLE_RATE, catalog_network, with_network
from tunecast.model.priors import PRIORS_SCHEMA, datasheet_factors, interval
from tunecast.model.time import PhaseTable, phase_table, run_clocks
from tunecast.model.value import INTERVAL_LEVEL, Z80

Array = npt.NDArray[np.float64]
EFFICIENCIES = ("gemm", "attention", "memory", "dequant", "link")
NARROWED = 0.95
"""A spread below this share of the belief's was narrowed by the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run, timed at datasheet rates."""

    run: PublishedRun
    table: PhaseTable
    measured_s: float
    """One optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each parameter sits in the vector: logs of efficiencies and overlap, then effects."""

    effects: tuple[tuple[str, str], ...]
    """(group, name) of each effect; the groups are those of `effect_names`."""

    def unpack(self, vector: Array) -> Estimates:
        """The vector by name."""
        at = len(EFFICIENCIES)
        return Estimates(
            efficiency={name: float(np.exp(vector[i])) for i, name in enumerate(EFFICIENCIES)},
            overlap_frac=min(float(np.exp(vector[at])), 1.0),
            effects=dict(zip(self.effects, vector[at + 1 :].tolist(), strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Fitted parameters."""

    efficiency: Mapping[str, float]
    overlap_frac: float
    effects: Mapping[tuple[str, str], float]
    """Logs of time; one that was not fitted is none."""

    def log_s(self, row: Row, host_s_per_launch: float) -> float:
        """Log seconds of a row's step, effects included."""
        base = predicted_log_s(row, self.efficiency, self.overlap_frac, host_s_per_launch)
        return base + sum(self.effects.get(effect, 0.0) for effect in effect_names(row.run))

    def group(self, name: str) -> dict[str, dict[str, Any]]:
        """Effects of one group, as stored."""
        return {n: {"value": v, "unit": "log of time"} for (group, n), v in self.effects.items() if group == name}


def effect_names(run: PublishedRun) -> tuple[tuple[str, str], ...]:
    """What a run's time may differ by as a whole: its card, its software stack, its sharding."""
    sharding = (("sharding", run.run.sharding),) if run.run.num_gpus > 1 else ()
    return (("device", run.gpu), ("stack", run.stack), *sharding)


@cache
def beliefs() -> dict[str, Any]:
    """The committed beliefs that the fit starts from."""
    text = resources.files("tunecast.calibrate").joinpath("data/prior_beliefs.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def training_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows that the model can time, and reasons for the others."""
    table = [row for row in read_table(path) if row.get("set") == "training"]
    runs, skipped = read_runs(table)
    reasons = {skip.id: skip.reason for skip in skipped}
    rows: list[Row] = []
    for run in runs:
        reason = _why_not(run)
        if reason:
            reasons[run.id] = reason
        else:
            rows.append(_timed(run))
    return rows, reasons


def timed_rows(runs: Sequence[PublishedRun]) -> list[Row]:
    """The runs that the model can time, at datasheet rates."""
    return [_timed(run) for run in runs if not _why_not(run)]


def _why_not(run: PublishedRun) -> str:
    if run.tokens_per_s is None:
        return "no speed is stated"
    if run.run.num_gpus > run.run.gpus_per_node and not run.network and catalog_network(run.gpu) is None:
        return "several machines, and no catalog fact says how they are joined"
    return ""


def _timed(run: PublishedRun) -> Row:
    gpu = load_gpus()[run.gpu]
    factors = with_network(datasheet_factors(gpu, beliefs()), run.run, gpu, run.network, reached=WHOLE_RATE)
    operations = step_operations(run.architecture, run.run)
    assert run.tokens_per_s is not None
    return Row(
        run=run,
        table=phase_table(operations, factors, run=run.run),
        measured_s=run.run.tokens_per_step / run.tokens_per_s,
    )


def predicted_log_s(row: Row, efficiency: Mapping[str, float], overlap_frac: float, host_s_per_launch: float) -> float:
    """Log seconds of a row's step, without effects."""
    values = clock_values(efficiency, overlap_frac, host_s_per_launch)
    sent = {name: getattr(row.table, name) / efficiency["link"] for name in LINK_SECONDS}
    table = replace(row.table, **sent)
    return math.log(run_clocks(table, values, synchronous=False).step_s)


def fit_rows(rows: Sequence[Row], host_s_per_launch: float) -> tuple[Layout, Array, Array]:
    """Layout, parameters and their standard deviations (of the logs)."""
    from scipy.optimize import least_squares

    layout = Layout(effects=tuple(sorted({effect for row in rows for effect in effect_names(row.run)})))
    centre, width = _prior(layout)
    residuals = _residuals(rows, layout, centre, width, host_s_per_launch)
    found = least_squares(residuals, centre, loss="soft_l1")
    jacobian: Array = np.asarray(found.jac, dtype=float)
    return layout, np.asarray(found.x), np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))


def _prior(layout: Layout) -> tuple[Array, Array]:
    known = [beliefs()["efficiency"][name] for name in EFFICIENCIES] + [beliefs()["overlap_frac"]]
    centre = [math.log(b["value"]) for b in known] + [0.0] * len(layout.effects)
    width = [b["log_sd"] for b in known] + [beliefs()["effect_log_sd"][group] for group, _ in layout.effects]
    return np.array(centre), np.array(width)


def _residuals(
    rows: Sequence[Row], layout: Layout, centre: Array, width: Array, host_s_per_launch: float
) -> Callable[[Array], Array]:
    weight = _weights(rows) / beliefs()["row_log_sd"]["value"]
    measured = np.log([row.measured_s for row in rows])

    timed = log_seconds([row.table for row in rows])
    names = [effect_names(row.run) for row in rows]
    has_effect = np.array([[effect in own for effect in layout.effects] for own in names], dtype=float)

    def residuals(vector: Array) -> Array:
        found = layout.unpack(vector)
        log_s = timed(found.efficiency, found.overlap_frac, host_s_per_launch)
        log_s += has_effect @ vector[len(EFFICIENCIES) + 1 :]
        return np.concatenate([weight * (log_s - measured), (vector - centre) / width])

    return residuals


def _weights(rows: Sequence[Row]) -> Array:
    """Rows of one source are not independent: n of them weigh as the square root of n rows do."""
    sources = [row.run.source for row in rows]
    return np.array([sources.count(source) ** -0.25 for source in sources])


def left_out_errors(
    rows: Sequence[Row], group: Callable[[PublishedRun], str], host_s_per_launch: float
) -> dict[str, float]:
    """log(predicted / measured) of every row, by id, from a fit without the row's group."""
    errors: dict[str, float] = {}
    for name in sorted({group(row.run) for row in rows}):
        kept = [row for row in rows if group(row.run) != name]
        layout, vector, _ = fit_rows(kept, host_s_per_launch)
        found = layout.unpack(vector)
        for row in rows:
            if group(row.run) == name:
                errors[row.run.id] = found.log_s(row, host_s_per_launch) - math.log(row.measured_s)
    return errors


def width_seen(rows: Sequence[Row], errors: Mapping[str, float]) -> float:
    """Log standard deviation whose 80% interval holds 80% of the rows of a new source, each left out with its own.

    Only rows whose card other sources hold too (all rows where there is none). Each source has the 80%
    quantile of its absolute errors; of n sources the conformal one counts, the ceil(0.8 (n + 1))th, so the
    largest while there are fewer than nine.
    """
    shared = [row for row in rows if any(o.run.gpu == row.run.gpu and o.run.source != row.run.source for o in rows)]
    by_source: dict[str, list[float]] = {}
    for row in shared or rows:
        by_source.setdefault(row.run.source, []).append(abs(errors[row.run.id]))
    quantiles = sorted(float(np.quantile(found, INTERVAL_LEVEL)) for found in by_source.values())
    rank = min(math.ceil(INTERVAL_LEVEL * (len(quantiles) + 1)), len(quantiles))
    return quantiles[rank - 1] / Z80


def width_unseen(rows: Sequence[Row], errors: Mapping[str, float], *, bf16: bool) -> float:
    """Log standard deviation of cards left out whole, of cards with bf16 or of older ones.

    Root mean square over cards of the card's median error. Few cards are little evidence, so the
    width is that of a Student distribution of (cards - 1, at least 1) degrees of freedom. Where the
    rows hold no card of that kind, all cards stand for it.
    """
    from scipy.stats import t

    by_card: dict[str, list[float]] = {}
    alike = [row for row in rows if (training_dtype(load_gpus()[row.run.gpu]) == "bf16") == bf16]
    for row in alike or rows:
        by_card.setdefault(row.run.gpu, []).append(errors[row.run.id])
    medians = [float(np.median(card)) for card in by_card.values()]
    square = float(np.sqrt(np.mean(np.square(medians))))
    return square if len(medians) == 1 else square * float(t.ppf(0.9, df=len(medians) - 1)) / Z80


def host_factor() -> dict[str, Any]:
    """Seconds per launch of a host nobody measured, with the belief's interval."""
    belief = beliefs()["host_s_per_launch"]
    return {**interval(belief["value"], belief["log_sd"]), "unit": "s", "origin": "assumed"}


def fit_priors(path: Path) -> dict[str, Any]:
    """The content of ``results/priors.json``, from a table of published runs."""
    rows, reasons = training_rows(path)
    runs = read_runs(row for row in read_table(path) if row.get("set") == "training")[0]
    return {
        "made_by": "scripts/fit-priors",
        "table": path.name,
        "rows_skipped": _by_reason(reasons),
        **priors_of(rows),
        "memory_overhead_bytes": memory_overheads(runs),
    }


def priors_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The time part of the priors, interval widths included, from these rows alone."""
    host = host_factor()
    seconds = float(host["value"])
    layout, vector, spread = fit_rows(rows, seconds)
    found = layout.unpack(vector)
    stored = partial(_stored, vector=vector, spread=spread, prior_width=_prior(layout)[1])
    by_source = left_out_errors(rows, lambda run: run.source, seconds)
    by_gpu = left_out_errors(rows, lambda run: run.gpu, seconds)
    return {
        "schema": PRIORS_SCHEMA,
        "rows_used": sorted(row.run.id for row in rows),
        "beliefs": beliefs(),
        "efficiency": {name: stored(i, unit="fraction of datasheet rate") for i, name in enumerate(EFFICIENCIES)},
        "overlap_frac": stored(len(EFFICIENCIES), unit="fraction of device work"),
        "host_s_per_launch": host,
        "device_effects": found.group("device"),
        "stack_effects": found.group("stack"),
        "sharding_effects": found.group("sharding"),
        "step_log_sd": {
            "seen": width_seen(rows, by_source),
            "unseen": width_unseen(rows, by_gpu, bf16=True),
            "unseen_without_bf16": width_unseen(rows, by_gpu, bf16=False),
        },
        "left_out_log_errors": {"by_source": by_source, "by_gpu": by_gpu},
    }


def _stored(index: int, vector: Array, spread: Array, prior_width: Array, unit: str) -> dict[str, Any]:
    """A fraction with its interval, none above 1; one that the rows did not narrow is still an assumption."""
    value = min(float(np.exp(vector[index])), 1.0)
    bounds = interval(value, float(spread[index]))
    origin = "published" if spread[index] < NARROWED * prior_width[index] else "assumed"
    return {**bounds, "high": min(bounds["high"], 1.0), "unit": unit, "origin": origin}


def _by_reason(reasons: Mapping[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons.values():
        counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
