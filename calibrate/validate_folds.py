"""Priors refitted without a group of runs: everything a forecast of that group uses, interval widths included."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunecast.calibrate.priors_fit import priors_of, timed_rows
from tunecast.calibrate.priors_memory import QUANTILES, held_memory, memory_overheads
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.validate import Entry, Priors, PriorsOf
from tunecast.model.memory import memory_timeline
from tunecast.model.priors import load_priors
from tunecast.model.units import MIB
from tunecast.model.value import Z80

GroupOf = Callable[[PublishedRun], str]
COUNTERS_PATTERN = re.compile(r"in MiB: peak allocated ([\d.]+), peak reserved ([\d.]+), whole process ([\d.]+)")


def source_of(run: PublishedRun) -> str:
    """Who measured it."""
    return run.source


def gpu_of(run: PublishedRun) -> str:
    """What it ran on."""
    return run.gpu


def shipped(_: PublishedRun) -> Priors:
    """The shipped priors, whatever the run."""
    return load_priors()


def honest_priors(entries: Iterable[Entry]) -> tuple[PriorsOf, int]:
    """Priors that have not seen the run they forecast, and how many runs of the table the shipped ones have seen.

    When the table holds every row that the shipped priors were fitted to, those rows are forecast with their
    own source left out; any other row, and any other table, with the shipped priors.
    """
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    fitted = set(load_priors()["rows_used"])
    if not fitted <= {run.id for run in runs}:
        return shipped, len(fitted & {run.id for run in runs})
    known = {run.source for run in runs if run.id in fitted}
    left_out = leave_out([run for run in runs if run.source in known], source_of)
    return lambda run: left_out(run) if run.source in known else load_priors(), len(fitted)


def leave_out(runs: Sequence[PublishedRun], group_of: GroupOf) -> PriorsOf:
    """The priors of each run: fitted to the runs of all other groups. Each group is fitted once, when first asked."""
    rows = timed_rows(runs)
    found: dict[str, dict[str, Any]] = {}
    of_time: dict[frozenset[str], dict[str, Any]] = {}

    def priors(run: PublishedRun) -> Priors:
        group = group_of(run)
        if group not in found:
            kept = [row for row in rows if group_of(row.run) != group]
            ids = frozenset(row.run.id for row in kept)
            if ids not in of_time:  # groups without speeds leave the same rows
                of_time[ids] = priors_of(kept)
            memory = fold_memory([other for other in runs if group_of(other) != group])
            found[group] = {**of_time[ids], "memory_overhead_bytes": memory}
        return found[group]

    return priors


def fold_memory(runs: Sequence[PublishedRun]) -> Mapping[str, float]:
    """Memory terms: as shipped where runs of several batches state device use by nvidia-smi, else from runs that
    state three counters; nothing where there are none."""
    if len({row.transient_bytes for row in held_memory(runs)}) > 1:
        return memory_overheads(runs)
    counted = [found for run in runs if run.run.num_gpus == 1 and (found := _counters(run)) is not None]
    return memory_of_counters(counted) if counted else {}


def memory_of_counters(counted: Sequence[Counters]) -> dict[str, float]:
    """The terms of `memory_overheads`, each the quantiles over runs of what the run's own counters say."""
    fractions = [(c.reserved_bytes - c.allocated_bytes) / c.transient_bytes for c in counted]
    contexts = [c.process_bytes - c.reserved_bytes for c in counted]
    errors = [abs(math.log(c.predicted_allocated_bytes / c.allocated_bytes)) for c in counted]
    terms = {"fragmentation_frac": fractions, "context": contexts}
    bounded = {
        f"{name}{end}": float(value)
        for name, values in terms.items()
        for end, value in zip(("_low", "", "_high"), np.quantile(values, QUANTILES), strict=True)
    }
    return {**bounded, "allocated_log_sd": float(np.quantile(errors, 0.8)) / Z80}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One run on one GPU that states all three counters, and what the model says of its tensors."""

    allocated_bytes: float
    reserved_bytes: float
    process_bytes: float
    predicted_allocated_bytes: float
    transient_bytes: float
    """Predicted: allocated at the peak beyond the resting state."""


def _counters(run: PublishedRun) -> Counters | None:
    match = COUNTERS_PATTERN.search(run.notes)
    if match is None:
        return None
    allocated, reserved, process = (float(text) * MIB for text in match.groups())
    timeline = memory_timeline(run.architecture, run.run)
    return Counters(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_bytes=process,
        predicted_allocated_bytes=timeline.allocated_bytes,
        transient_bytes=timeline.allocated_bytes - timeline.at_rest_bytes,
    )
