"""Published runs and steps of records, timed at the datasheet's rates, as the problem that the priors' fit solves.

What remains of a row's time is a few efficiencies, which all rows share, and the effects of its card, generation,
stack, sharding and source (`priors_hierarchy`), each with what is believed of it before the rows are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from tunecast.calibrate.priors_hierarchy import Array, Effect, Problem, effects_of
from tunecast.calibrate.priors_records import RecordRuns
from tunecast.calibrate.priors_stack import MOVED, clock_values, log_seconds
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.start_up import START_UP, start_up_share
from tunecast.calibrate.validate import Entry, read_entries
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.exposed import SHARES
from tunecast.model.factors import HOST_S_PER_LAUNCH
from tunecast.model.inventory import step_operations
from tunecast.model.parallel_network import WHOLE_RATE, catalog_network, with_network
from tunecast.model.parallel_offload import with_host
from tunecast.model.phase_table import PhaseTable, phase_table
from tunecast.model.prior_effects import (
    AROUND_LAYERS,
    ATTENTION_KERNEL,
    CLOCK,
    DEQUANT_KERNEL,
    DEVICE_KINDS,
    GENERATION_KINDS,
    PRODUCTS,
    SOURCE_KINDS,
    STACK_KINDS,
    WORK,
    dequant_kernel,
)
from tunecast.model.priors import ISSUING, datasheet_factors
from tunecast.model.time import COLUMNS, run_clocks

EFFICIENCIES = ("gemm", "attention", "memory", "dequant", "link")
FRACTIONS = (*EFFICIENCIES, *SHARES)
SHARED = (*FRACTIONS, HOST_S_PER_LAUNCH, *ISSUING, START_UP)
"""Parameters that all rows share."""
HOST_GROUP = "host"
BY_KIND = {
    **{f"device.{kind}": (kind,) for kind in DEVICE_KINDS},
    **{f"generation.{kind}": (kind,) for kind in GENERATION_KINDS},
    **{f"stack.{kind}": (kind,) for kind in STACK_KINDS},
    **{f"source.{kind}": (kind,) for kind in SOURCE_KINDS},
}
FOLLOWED = {**{name: (name, -1.0) for name in EFFICIENCIES}, HOST_S_PER_LAUNCH: (HOST_GROUP, 1.0)}
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
STARTS = tuple(tuple(host * (name == HOST_S_PER_LAUNCH) for name in SHARED) for host in (0.0, 0.7))
"""Hosts as believed and slower ones: while the device decides, the rows say nothing of the host."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run, timed at datasheet rates. Without slots, for what is worked out once."""

    run: PublishedRun
    table: PhaseTable
    measured_s: float
    """One optimizer step."""
    own_log_sd: float = 0.0
    """Noise of its own, beside that of rows: of a step that waits for a host whose pace changes."""
    waits: bool = False
    """Whether it is a record's step that says nothing of the card."""

    @property
    def trust(self) -> float:
        """Share of a published row's precision, at the believed noise of rows."""
        row_sd = float(beliefs()["spreads"]["row"])
        return row_sd**2 / (row_sd**2 + self.own_log_sd**2)

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """What its time may differ by; the same in every fold."""
        return tuple(effect for effect in effect_names(self.run) if has_work(self, effect[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training rows of a table of published runs."""

    table: str
    """Name of its file."""
    runs: list[PublishedRun]
    """Those that did not run out of memory, timed or not."""
    rows: list[Row]
    reasons: dict[str, str]
    """By id: why a row is not timed."""


def effect_names(run: PublishedRun) -> tuple[Effect, ...]:
    """What a run's time may differ by: its card and sharding as a whole, its card, the card's generation and its stack
    by kind of work, which forecasts know; its source by kind, the source's host, and the source's rows of one method on
    one card, which they do not."""
    own, gpu = run.run, load_gpus()[run.gpu]
    code = AROUND_LAYERS.get(own.sharding) if own.num_gpus > 1 else None
    sharding = () if code is None else (("sharding", code),)
    kernel = ((ATTENTION_KERNEL, run.attention_kernel),) if run.attention_kernel else ()
    unpacking = ((DEQUANT_KERNEL, dequant_kernel(own, run.stack)),) if own.base_quantization else ()
    clock = ((CLOCK, run.gpu),) if run.gpu in beliefs()["held_clock"]["values"] else ()
    parts = (run.source, run.gpu, own.method, own.base_quantization, own.fp8, own.num_gpus > 1)
    cell = (CELL, " ".join(str(part) for part in parts))
    names = {"device": run.gpu, "generation": gpu.generation, "stack": run.stack, "source": run.source}
    by_kind = ((group, names[group.partition(".")[0]]) for group in BY_KIND)
    return (
        ("device", run.gpu),
        *clock,
        *sharding,
        *kernel,
        *unpacking,
        *by_kind,
        (HOST_GROUP, run.host or run.source),
        cell,
    )


def has_work(row: Row, group: str) -> bool:
    """Whether a row has any of what a group's effects slow: most have neither 4-bit weights nor links.

    What waits for host memory and processors says nothing of links.
    """
    kind = "dequant" if group == DEQUANT_KERNEL else group.partition(".")[2]
    if kind == "link":
        table = row.table
        on_links = table.communication_s + table.once_s + table.blocking_s + table.ring_s
        return row.run.run.offload == "none" and bool(on_links.sum() > 0.0)
    return kind != "dequant" or bool(row.table.device_s[:, COLUMNS.index(kind)].sum() > 0.0)


@cache
def beliefs() -> dict[str, Any]:
    """The committed beliefs that the fit starts from."""
    text = resources.files("tunecast.calibrate").joinpath("data/prior_beliefs.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def believed(name: str) -> dict[str, Any]:
    """The belief of a shared parameter."""
    found: dict[str, Any] = beliefs()["efficiency"][name] if name in EFFICIENCIES else beliefs()[name]
    return found


def believed_effect(group: str, name: str) -> float:
    """Log of time that is believed of an effect: of cards that hold less than their clock, of older attention."""
    about = {CLOCK: "held_clock", ATTENTION_KERNEL: "attention_kernels", DEQUANT_KERNEL: "dequant_kernels"}.get(group)
    value = None if about is None else beliefs()[about]["values"].get(name)
    return 0.0 if value is None else -math.log(value)


def read_training(path: Path) -> Training:
    """The training rows of a table, read once: what the model can time, and reasons for the others."""
    entries = read_entries(row for row in read_table(path) if row.get("set") == "training")
    reasons = {entry.id: why for entry in entries if (why := _why_not_timed(entry))}
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    rows = [_timed(run) for run in runs if run.id not in reasons]
    return Training(table=path.name, runs=runs, rows=rows, reasons=reasons)


def _why_not_timed(entry: Entry) -> str:
    if entry.out_of_memory:
        return "ran out of memory: a test of fit, not of speed"
    return entry.reason or ("" if entry.run is None else _why_not(entry.run))


def timed_rows(runs: Sequence[PublishedRun]) -> list[Row]:
    """The runs that the model can time, at datasheet rates."""
    return [_timed(run) for run in runs if not _why_not(run)]


def rows_of_records(records: Sequence[RecordRuns]) -> list[Row]:
    """The whole steps of records, at datasheet rates."""
    return [
        replace(row, own_log_sd=record.waiting_log_sd, waits=True) if row.run.id in record.waiting else row
        for record in records
        for row in timed_rows(record.runs)
    ]


def _why_not(run: PublishedRun) -> str:
    if run.tokens_per_s is None:
        return "no speed is stated"
    if run.whole_time:
        return "its speed is of the whole wall time"
    if run.run.num_gpus > run.run.gpus_per_node and run.internode_gbps is None and catalog_network(run.gpu) is None:
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
        trust=np.array([row.trust for row in rows]),
    )


def params_of(shared: Array) -> dict[str, float]:
    """Shared parameters by name; no more than all communication is exposed."""
    values = zip(SHARED, np.exp(shared).tolist(), strict=True)
    return {name: min(value, 1.0) if name in SHARES else value for name, value in values}
