"""Priors refitted without a group of runs: everything a forecast of that group uses, interval widths included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tunecast.calibrate.priors_fit import contexts_of_records, priors_of
from tunecast.calibrate.priors_memory import memory_priors
from tunecast.calibrate.priors_problem import beliefs, rows_of_records, timed_rows
from tunecast.calibrate.priors_records import RecordRuns, shipped_records
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.validate import Entry, Priors, PriorsOf
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.priors import load_priors

GroupOf = Callable[[PublishedRun], str]
Told = Callable[[str], None]
"""Hears in a line what runs next."""


def source_of(run: PublishedRun) -> str:
    """Who measured it."""
    return run.source


def gpu_of(run: PublishedRun) -> str:
    """What it ran on."""
    return run.gpu


def generation_of(run: PublishedRun) -> str:
    """The generation of what it ran on, by vendor and compute capability: cards of one share their kernels."""
    gpu = load_gpus()[run.gpu]
    return f"{gpu.vendor} {gpu.compute_capability}"


def shipped(_: PublishedRun) -> Priors:
    """The shipped priors, whatever the run."""
    return load_priors()


def honest_priors(entries: Iterable[Entry], told: Told | None = None) -> tuple[PriorsOf, int]:
    """Priors that have not seen the run they forecast, and how many runs of the table the shipped ones have seen.

    When the table holds every row that the shipped priors were fitted to, those rows are forecast with their
    own source left out; any other row, and any other table, with the shipped priors. `told` hears of every refit.
    """
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    shipped_priors = load_priors()
    fitted: dict[str, str] = shipped_priors["marks"]
    same = {run.id for run in runs if run.mark == fitted.get(run.id)}
    if len(same) < len(fitted):
        return shipped, len(same)
    known = {run.source for run in runs if run.id in fitted}
    left_out = leave_out([run for run in runs if run.source in known], source_of, told, shipped_records()[0])
    return lambda run: left_out(run) if run.source in known else load_priors(), len(fitted)


def leave_out(
    runs: Sequence[PublishedRun], group_of: GroupOf, told: Told | None = None, records: Sequence[RecordRuns] = ()
) -> PriorsOf:
    """The priors of each run: fitted to the runs and the records of all other groups. Each group is fitted once, when
    first asked.

    `told` hears which group is left out next, and how many there are.
    """
    rows, groups = [*timed_rows(runs), *rows_of_records(records)], len({group_of(run) for run in runs})
    found: dict[str, dict[str, Any]] = {}
    of_time: dict[frozenset[str], dict[str, Any]] = {}

    def priors(run: PublishedRun) -> Priors:
        group = group_of(run)
        if group not in found:
            if told is not None:
                told(f"refitting the priors without {group}, {len(found) + 1} of {groups}")
            kept = [row for row in rows if group_of(row.run) != group]
            ids = frozenset(row.run.id for row in kept)
            if ids not in of_time:  # groups without speeds leave the same rows
                of_time[ids] = priors_of(kept)
            others = [other for other in runs if group_of(other) != group]
            elsewhere = contexts_of_records([record for record in records if group_of(record.runs[0]) != group])
            found[group] = {**of_time[ids], **memory_priors(others, beliefs(), elsewhere)}
        return found[group]

    return priors
