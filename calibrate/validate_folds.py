"""Priors refitted without a group of runs: everything a forecast of that group uses, interval widths included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tunecast.calibrate.priors_fit import priors_of
from tunecast.calibrate.priors_memory import memory_priors
from tunecast.calibrate.priors_problem import Row, beliefs, rows_of_records, timed_rows
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """The priors of each run of a table, and which of its runs the shipped ones were fitted to."""

    priors_of: PriorsOf
    fitted: frozenset[str]
    """Ids of the runs that the shipped priors have seen."""
    left_out: bool
    """Whether these are forecast with their own source left out of the fit."""

    @property
    def in_sample(self) -> frozenset[str]:
        """Ids of the runs that are forecast by priors that have seen them."""
        return frozenset() if self.left_out else self.fitted


def honest_priors(entries: Iterable[Entry], told: Told | None = None, *, all_at_once: bool = False) -> Honest:
    """Priors that have not seen the run they forecast, where the table has what a fit without it needs.

    When the table holds every row that the shipped priors were fitted to, those rows are forecast with their
    own source left out; any other row, and any other table, with the shipped priors. `told` and `all_at_once` as in
    `leave_out`.
    """
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    shipped_priors = load_priors()
    fitted: dict[str, str] = shipped_priors["marks"]
    same = frozenset(run.id for run in runs if run.mark == fitted.get(run.id))
    if len(same) < len(fitted):
        return Honest(priors_of=shipped, fitted=same, left_out=False)
    known = {run.source for run in runs if run.id in fitted}
    kept, records = [run for run in runs if run.source in known], shipped_records()[0]
    left_out = leave_out(kept, source_of, told, records, all_at_once=all_at_once)
    return Honest(
        priors_of=lambda run: left_out(run) if run.source in known else load_priors(), fitted=same, left_out=True
    )


def leave_out(
    runs: Sequence[PublishedRun],
    group_of: GroupOf,
    told: Told | None = None,
    records: Sequence[RecordRuns] = (),
    *,
    all_at_once: bool = False,
) -> PriorsOf:
    """The priors of each run: fitted to the runs and the records of all other groups. Each group is fitted once, when
    first asked, and rows are timed then; `all_at_once` fits every group then, one on each processor.

    `told` hears which group is left out, or how many were, and how many there are.
    """
    groups = sorted({group_of(run) for run in runs})
    found: dict[str, dict[str, Any]] = {}
    of_time: dict[frozenset[str], dict[str, Any]] = {}
    say = told or (lambda _: None)

    @cache
    def rows() -> list[Row]:
        return [*timed_rows(runs), *rows_of_records(records)]

    def fit(names: Sequence[str]) -> None:
        left_out = {name: frozenset(row.run.id for row in rows() if group_of(row.run) == name) for name in names}
        new = set(left_out.values()) - set(of_time)  # groups without speeds leave the same rows
        for ids, fitted in _fitted_without(sorted(new, key=len), rows()):
            of_time[ids] = fitted
            if all_at_once:
                say(f"refitted the priors {len(of_time)} of {len(new)} times")
        for name in names:
            others = [run for run in runs if group_of(run) != name]
            elsewhere = [record for record in records if group_of(record.runs[0]) != name]
            found[name] = {**of_time[left_out[name]], **memory_priors(others, beliefs(), elsewhere)}

    def priors(run: PublishedRun) -> Priors:
        group = group_of(run)
        if group not in found and all_at_once:
            say(f"refitting the priors without each of {len(groups)} groups of runs")
            fit(groups)
        elif group not in found:
            say(f"refitting the priors without {group}, {len(found) + 1} of {len(groups)}")
            fit([group])
        return found[group]

    return priors


def _fitted_without(
    left_out: Sequence[frozenset[str]], rows: Sequence[Row]
) -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
    """As each is done: ids of rows, and the priors of time without them. Several are fitted beside each other."""
    from joblib import Parallel, cpu_count, delayed

    processes = Parallel(n_jobs=max(min(len(left_out), cpu_count()), 1), return_as="generator_unordered")
    yield from processes(delayed(_without)(ids, rows) for ids in left_out)


def _without(ids: frozenset[str], rows: Sequence[Row]) -> tuple[frozenset[str], dict[str, Any]]:
    return ids, priors_of([row for row in rows if row.run.id not in ids])
