"""Fit the priors: efficiencies that published runs and records imply, and how far they are off on runs left out.

Each row's operations are timed at the datasheet's rates; what remains is a few efficiencies and the effects of
`priors_hierarchy`. Its spreads say how sure a forecast of a new run is. Sources left out one by one say by how much a
new one is slower than that, and with which multiple of the spreads 80% intervals hold 80%.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tunecast.calibrate.priors_hierarchy import (
    STUDENT_DF,
    Array,
    Effect,
    Problem,
    Solution,
    effects_of,
    linear,
    solve,
    solve_like,
)
from tunecast.calibrate.priors_memory import memory_priors, memory_rows
from tunecast.calibrate.priors_records import RecordRuns
from tunecast.calibrate.priors_stack import MOVED, clock_values, log_seconds
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.start_up import START_UP, start_up_share
from tunecast.calibrate.validate import read_entries
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.inventory import step_operations
from tunecast.model.parallel_network import WHOLE_RATE, catalog_network, with_network
from tunecast.model.parallel_offload import with_host
from tunecast.model.priors import (
    ATTENTION_KERNEL,
    CLOCK,
    DEQUANT_KERNEL,
    DEVICE_KINDS,
    GENERATION_KINDS,
    PRIORS_SCHEMA,
    PRODUCTS,
    SOURCE_KINDS,
    STACK_KINDS,
    WORK,
    datasheet_factors,
    dequant_kernel,
    interval,
)
from tunecast.model.time import COLUMNS, PhaseTable, phase_table, run_clocks
from tunecast.model.value import INTERVAL_LEVEL, Z80

EFFICIENCIES = ("gemm", "attention", "memory", "dequant", "link")
OVERLAP = "overlap_frac"
FRACTIONS = (*EFFICIENCIES, OVERLAP)
SHARED = (*FRACTIONS, "host_s_per_launch", "host_hooks", START_UP)
"""Parameters that all rows share."""
HOST_GROUP = "host"
BY_KIND = {
    **{f"device.{kind}": (kind,) for kind in DEVICE_KINDS},
    **{f"generation.{kind}": (kind,) for kind in GENERATION_KINDS},
    **{f"stack.{kind}": (kind,) for kind in STACK_KINDS},
    **{f"source.{kind}": (kind,) for kind in SOURCE_KINDS},
}
FOLLOWED = {**{name: (name, -1.0) for name in EFFICIENCIES}, "host_s_per_launch": (HOST_GROUP, 1.0)}
"""Shared parameters that stretch a kind of work."""
WHOLE = ("device", "sharding")
CELL = "cell"
MOVES = {
    **dict.fromkeys((*WHOLE, CELL), WORK),
    **BY_KIND,
    HOST_GROUP: (HOST_GROUP,),
    CLOCK: PRODUCTS,
    ATTENTION_KERNEL: ("attention",),
    DEQUANT_KERNEL: ("dequant",),
}
"""By group: the kinds of work that its effects slow."""
KERNELS = (CLOCK, ATTENTION_KERNEL, DEQUANT_KERNEL)
KNOWN_BY_KIND = (*(group for group in BY_KIND if not group.startswith("source.")), *KERNELS)
FORECAST_GROUPS = (*WHOLE, *KNOWN_BY_KIND)
"""Groups of effects that a forecast of a new run may know."""
STARTS = tuple((*(0.0,) * len(FRACTIONS), host, 0.0, 0.0) for host in (0.0, 0.7))
"""Hosts as believed and slower ones: while the device decides, the rows say nothing of the host."""
NARROWEST = 0.5
"""Least multiple of the spreads: few sources left out may all be near by chance."""
AT_ONE = -0.01
"""Log of a fraction from which it counts as at its limit."""
NARROWED = 0.95
"""A spread below this share of the belief's was narrowed by the rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run, timed at datasheet rates. Without slots, for what is worked out once."""

    run: PublishedRun
    table: PhaseTable
    measured_s: float
    """One optimizer step."""

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """What its time may differ by; the same in every fold."""
        return tuple(effect for effect in effect_names(self.run) if has_work(self, effect[0]))


def effect_names(run: PublishedRun) -> tuple[Effect, ...]:
    """What a run's time may differ by: its card and sharding as a whole, its card, the card's generation and its stack
    by kind of work, which forecasts know; its source by kind, the source's host, and the source's rows of one method on
    one card, which they do not."""
    own, gpu = run.run, load_gpus()[run.gpu]
    sharding = (("sharding", own.sharding),) if own.num_gpus > 1 else ()
    kernel = ((ATTENTION_KERNEL, run.attention_kernel),) if run.attention_kernel else ()
    unpacking = ((DEQUANT_KERNEL, dequant_kernel(own, run.stack)),) if own.base_quantization else ()
    clock = ((CLOCK, run.gpu),) if run.gpu in beliefs()["held_clock"]["values"] else ()
    parts = (run.source, run.gpu, own.method, own.base_quantization, own.fp8, own.num_gpus > 1)
    cell = (CELL, " ".join(str(part) for part in parts))
    names = {"device": run.gpu, "generation": gpu.generation, "stack": run.stack, "source": run.source}
    by_kind = ((group, names[group.partition(".")[0]]) for group in BY_KIND)
    return (("device", run.gpu), *clock, *sharding, *kernel, *unpacking, *by_kind, (HOST_GROUP, run.source), cell)


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


def rows_of_records(records: Sequence[RecordRuns]) -> list[Row]:
    """The whole steps of records, at datasheet rates."""
    return timed_rows([run for record in records for run in record.runs])


def contexts_of_records(records: Sequence[RecordRuns]) -> dict[str, tuple[float, ...]]:
    """Bytes of contexts by the record that read them."""
    return {record.name: record.contexts_bytes for record in records}


def _why_not(run: PublishedRun) -> str:
    if run.tokens_per_s is None:
        return "no speed is stated"
    if run.run.num_gpus > run.run.gpus_per_node and not run.network and catalog_network(run.gpu) is None:
        return "several machines, and no catalog fact says how they are joined"
    return ""


def _timed(run: PublishedRun) -> Row:
    gpu = load_gpus()[run.gpu]
    factors = datasheet_factors(gpu, beliefs(), run.run)
    factors = with_network(factors, run.run, gpu, run.network, reached=WHOLE_RATE)
    factors = with_host(factors, run.architecture, run.run, gpu, reached=WHOLE_RATE)
    operations = step_operations(run.architecture, run.run)
    assert run.tokens_per_s is not None
    return Row(
        run=run,
        table=phase_table(operations, factors, run=run.run),
        measured_s=run.run.tokens_per_step / run.tokens_per_s,
    )


def predicted_log_s(row: Row, params: Mapping[str, float]) -> float:
    """Log seconds of a row's step at these parameters, without effects."""
    step_s = run_clocks(row.table, clock_values(params), synchronous=False).step_s
    return math.log(step_s + start_up_share(row.run.notes) * params.get(START_UP, 0.0))


def believed(name: str) -> dict[str, Any]:
    """The belief of a shared parameter."""
    found: dict[str, Any] = beliefs()["efficiency"][name] if name in EFFICIENCIES else beliefs()[name]
    return found


def believed_effect(group: str, name: str) -> float:
    """Log of time that is believed of an effect: of cards that hold less than their clock, of older attention."""
    about = {CLOCK: "held_clock", ATTENTION_KERNEL: "attention_kernels", DEQUANT_KERNEL: "dequant_kernels"}.get(group)
    value = None if about is None else beliefs()[about]["values"].get(name)
    return 0.0 if value is None else -math.log(value)


def problem_of(rows: Sequence[Row]) -> Problem:
    """The rows with what is believed before they are read."""
    effects, members = effects_of([row.effects for row in rows])
    timed = log_seconds([row.table for row in rows], [start_up_share(row.run.notes) for row in rows])
    spreads = {name: value for name, value in beliefs()["spreads"].items() if isinstance(value, float)}
    return Problem(
        names=SHARED,
        centre=np.log([believed(name)["value"] for name in SHARED]),
        width=np.array([believed(name)["log_sd"] for name in SHARED]),
        effects=effects,
        members=members,
        effect_centre=np.array([believed_effect(group, name) for group, name in effects]),
        believed_sd={name: value for name, value in spreads.items() if name != "log_sd"},
        believed_sd_log_sd=spreads["log_sd"],
        columns=MOVED,
        moves=MOVES,
        measured=np.log([row.measured_s for row in rows]),
        timed=lambda shared, slower: timed(params_of(shared), slower),
        follows=FOLLOWED,
        starts=STARTS,
    )


def has_work(row: Row, group: str) -> bool:
    """Whether a row has any of what a group's effects slow: most have neither 4-bit weights nor links.

    What waits for host memory and processors says nothing of links.
    """
    kind = "dequant" if group == DEQUANT_KERNEL else group.partition(".")[2]
    if kind == "link":
        return row.run.run.offload == "none" and bool(
            (row.table.communication_s + row.table.once_s + row.table.blocking_s).sum() > 0.0
        )
    return kind != "dequant" or bool(row.table.device_s[:, COLUMNS.index(kind)].sum() > 0.0)


def params_of(shared: Array) -> dict[str, float]:
    """Shared parameters by name; no more than all of the work can overlap."""
    values = zip(SHARED, np.exp(shared).tolist(), strict=True)
    return {name: min(value, 1.0) if name == OVERLAP else value for name, value in values}


def fit_rows(rows: Sequence[Row]) -> Solution:
    """The hierarchy that the rows say."""
    return solve(problem_of(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A row forecast by a fit that has not seen it."""

    missed: float
    """log(measured / predicted) of the step time, a new source taken to be no slower than those of the fit."""
    log_sd: float
    """Of that, beside `new_log_sd`: what the priors' width goes for."""
    new_log_sd: float
    """Of a card, a generation and a sharding that the fit does not know, and of the source's host: forecasts keep those
    spreads, whatever the width."""
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
    own = [row for row in rows if row.run.id in unseen and unseen[row.run.id].work_share > 0.0]
    if not own:
        return 0.0
    missed = np.array([unseen[row.run.id].missed for row in own])
    shares = np.array([unseen[row.run.id].work_share for row in own])
    return weighted_quantile(missed / shares, source_weights(own) * shares, 0.5)


def width_of(rows: Sequence[Row], unseen: Mapping[str, Unseen], slower: float) -> float:
    """Multiple of the spreads that it goes for with which 80% intervals hold 80% of rows left out with their source,
    forecast `slower`. Never below a half."""
    own = [row for row in rows if row.run.id in unseen]
    if not own:
        return 1.0
    found = [unseen[row.run.id] for row in own]
    needed = [((item.missed - slower * item.work_share) / Z80) ** 2 - item.new_log_sd**2 for item in found]
    sizes = np.array([math.sqrt(max(need, 0.0)) / item.log_sd for need, item in zip(needed, found, strict=True)])
    return max(weighted_quantile(sizes, source_weights(own), INTERVAL_LEVEL), NARROWEST)


def fit_priors(
    path: Path,
    timed: tuple[list[Row], dict[str, str]] | None = None,
    records: tuple[Sequence[RecordRuns], Mapping[str, str]] = ((), {}),
) -> dict[str, Any]:
    """The content of ``results/priors.json``, from a table of published runs, timed already or not, and from records
    and reasons against others as `read_records` gives them."""
    rows, reasons = training_rows(path) if timed is None else timed
    measured, unread = records
    entries = read_entries(row for row in read_table(path) if row.get("set") == "training")
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    of_memory = memory_rows(runs)
    used = {*of_memory, *(row.run.id for row in rows)}
    return {
        "made_by": "scripts/fit-priors",
        "table": path.name,
        "rows_skipped": _by_reason(reasons),
        **priors_of([*rows, *rows_of_records(measured)]),
        "rows_used": sorted(row.run.id for row in rows),
        "records_used": {record.name: len(record.runs) for record in measured},
        "records_skipped": dict(unread),
        "memory_rows_used": of_memory,
        "marks": {run.id: run.mark for run in runs if run.id in used},
        **memory_priors(runs, beliefs(), contexts_of_records(measured)),
    }


def priors_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The time part of the priors, interval widths included, from these rows alone."""
    solution = fit_rows(rows)
    unseen, sds = left_out(rows, solution), solution.sds
    slower = slower_of(rows, unseen)
    width = width_of(rows, unseen, slower)
    missed = {row_id: slower * row.work_share - row.missed for row_id, row in unseen.items()}
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
        "step_log_sd": log_sds,
        "left_out_log_errors": {"by_source": missed},
    }


def _effects(solution: Solution, group: str) -> dict[str, dict[str, Any]]:
    found = solution.effects.items()
    return {name: {"value": value, "unit": "log of time"} for (own, name), value in found if own == group}


def _covariance(solution: Solution) -> dict[str, Any]:
    """Of the shared parameters and of the effects that forecasts know; an overlap that is at 1 does not vary."""
    shared = len(SHARED)
    free = [name != OVERLAP or solution.vector[i] < AT_ONE for i, name in enumerate(SHARED)]
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
    hosts = solution.sds.get(HOST_GROUP, 0.0) if name == "host_s_per_launch" else 0.0
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
