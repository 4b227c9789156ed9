"""Memory beyond tensors, and how exact the tensors are, from published runs that state two or three counters.

What an allocator holds beyond the tensors is taken in shares of what a step adds (its transient), run by run: the
shares of two sources that never met, on an A100 and on a T4, agree in median and spread; offsets in bytes do not. What
it holds beyond a replay of the run's allocations (`model/replay.py`) is taken in the same shares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tunecast.calibrate.priors_records import SOURCE, RecordRuns
from tunecast.calibrate.published import PublishedRun
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architecture import Architecture
from tunecast.model.memory import memory_timeline
from tunecast.model.memory_codes import COMPARED, OTHER, PER_THREAD, SHARED, context_threads, memory_code
from tunecast.model.replay import replayed_bytes
from tunecast.model.run import Run
from tunecast.model.units import MIB
from tunecast.model.value import INTERVAL_LEVEL, Z80
from tunecast.model.workspaces import workspace_bytes

PRESSED_ABOVE = 0.85
"""Share of the card above which a caching allocator gives memory back: such rows say nothing of its habits."""
PROCESS_PATTERN = re.compile(r"nvidia-smi, averaged over GPUs: (\d+) MiB")
COUNTERS_PATTERN = re.compile(r"in MiB: peak allocated ([\d.]+), peak reserved ([\d.]+), whole process ([\d.]+)")
QUANTILES = (0.1, 0.5, 0.9)
ENOUGH = 3
"""Sources from which the tenths of their contexts say how far contexts differ."""
OF_OTHERS = ("active", "reserved")
"""Counters that bound the tensors of code without published peaks of allocated memory."""
Shares = Mapping[str, Sequence[float]]
"""Figures by source."""
Pairs = Mapping[str, Sequence[tuple[float, float]]]
"""By source, what was reserved beyond a replay and beyond the tensors, in shares of what each run's step adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One run on one GPU that states its tensors and the device's use, perhaps what the allocator reserved."""

    source: str
    allocated_bytes: float
    reserved_bytes: float | None
    process_bytes: float
    transient_bytes: float
    """Predicted: allocated at the peak beyond the resting state."""
    threads: int
    """That the card holds: what its context grows by."""
    replayed_bytes: int | None = None
    """Predicted: reserved; None where the order of allocations is not known."""

    def reserved(self, context_per_thread: float) -> float:
        """Reserved; the process less its context where not stated."""
        if self.reserved_bytes is not None:
            return self.reserved_bytes
        return self.process_bytes - context_per_thread * self.threads

    def fragmentation(self, context_per_thread: float) -> float:
        """Reserved beyond allocated over the transient."""
        return max(self.reserved(context_per_thread) - self.allocated_bytes, 0.0) / self.transient_bytes

    def replay(self, context_per_thread: float) -> list[tuple[float, float]]:
        """Reserved beyond the replay over the transient, beside the same of allocated; nothing without a replay."""
        if self.replayed_bytes is None:
            return []
        beyond = (self.reserved(context_per_thread) - self.replayed_bytes) / self.transient_bytes
        return [(beyond, self.fragmentation(context_per_thread))]


@lru_cache(maxsize=4096)
def tensors(architecture: Architecture, run: Run, gpu: str) -> tuple[float, float]:
    """Allocated bytes at the peak and at rest; every fold of a leave-one-out asks for the same runs."""
    timeline = memory_timeline(architecture, run, workspace_bytes=_workspaces(gpu))
    return timeline.allocated_bytes, timeline.at_rest_bytes


def _workspaces(gpu: str) -> int:
    return workspace_bytes(load_gpus()[gpu].compute_capability)


def counted_runs(runs: Sequence[PublishedRun]) -> list[Counters]:
    """Runs on one GPU with several counters, the card not nearly full."""
    found = []
    for run in runs:
        stated = None if run.run.num_gpus > 1 else _stated(run)
        if stated is None:
            continue
        allocated, reserved, process = stated
        usable = load_gpus()[run.gpu].usable_bytes
        if usable is None or process > PRESSED_ABOVE * usable:
            continue
        allocated_peak, resting = tensors(run.architecture, run.run, run.gpu)
        found.append(
            Counters(
                source=run.source,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                process_bytes=process,
                transient_bytes=allocated_peak - resting,
                threads=context_threads(load_gpus()[run.gpu]),
                replayed_bytes=replayed_bytes(run.architecture, run.run, "cuda", _workspaces(run.gpu)),
            )
        )
    return found


def _stated(run: PublishedRun) -> tuple[float, float | None, float] | None:
    """Allocated, reserved where stated, and the process."""
    all_three = COUNTERS_PATTERN.search(run.notes)
    if all_three is not None:
        allocated, reserved, process = (float(text) * MIB for text in all_three.groups())
        return allocated, reserved, process
    match = PROCESS_PATTERN.search(run.notes)
    if match is None or not states_allocated(run):
        return None
    assert run.peak_bytes is not None
    return run.peak_bytes, None, int(match[1]) * MIB


def states_allocated(run: PublishedRun) -> bool:
    """Whether the row's peak is that of allocated tensors."""
    return run.peak_bytes is not None and run.counter == "allocated"


def memory_codes(runs: Sequence[PublishedRun], same: Mapping[str, str]) -> list[str]:
    """Codes (`model.memory_codes`) whose published peaks of allocated memory are among these runs, sorted."""
    return sorted({_code(run, same) for run in runs if states_allocated(run)})


def _code(run: PublishedRun, same: Mapping[str, str]) -> str:
    """The code that held a published run's tensors: its software's, whatever stack stands for it here."""
    return memory_code(replace(run.run, stack=run.stack), same)


def other_code_log_sd(
    runs: Sequence[PublishedRun], known: Mapping[str, Any], codes: Sequence[str], fragmentation_frac: float
) -> float | None:
    """The same of code outside `codes` and those that were traced: its active or reserved bytes against the forecast.

    Active is allocated but for blocks that wait for a stream; a reserved peak's error is the allocator's too.
    """
    compared = {*known["traced"], *codes}
    errors: dict[str, list[float]] = {}
    for run in runs:
        if not _states_other(run) or _code(run, known["same"]) in compared:
            continue
        assert run.peak_bytes is not None
        counter = run.counter.split(" ")[0]
        allocated, resting = tensors(run.architecture, run.run, run.gpu)
        cached = fragmentation_frac * (allocated - resting) if counter == "reserved" else 0.0
        errors.setdefault(run.source, []).append(abs(math.log((allocated + cached) / run.peak_bytes)))
    return quantiles(errors, (INTERVAL_LEVEL,))[0] / Z80 if errors else None


def allocated_log_sd(runs: Sequence[PublishedRun], *, several: bool) -> float | None:
    """80% quantile of |log(predicted / published)| of allocated, every source weighing the same, as a deviation; of
    runs on one GPU, or on `several`."""
    errors: dict[str, list[float]] = {}
    for run in runs:
        if states_allocated(run) and (run.run.num_gpus > 1) is several:
            assert run.peak_bytes is not None
            predicted, _ = tensors(run.architecture, run.run, run.gpu)
            errors.setdefault(run.source, []).append(abs(math.log(predicted / run.peak_bytes)))
    return quantiles(errors, (INTERVAL_LEVEL,))[0] / Z80 if errors else None


def memory_rows(runs: Sequence[PublishedRun]) -> list[str]:
    """Ids of the runs that `memory_priors` may read, sorted: those that state allocated memory, several counters, or
    what bounds the tensors of code that was never compared."""
    return sorted(run.id for run in runs if states_allocated(run) or _states_other(run) or counted_runs([run]))


def _states_other(run: PublishedRun) -> bool:
    """Whether the row's peak bounds the tensors of code without published peaks of allocated memory."""
    return run.peak_bytes is not None and run.counter.split(" ")[0] in OF_OTHERS


def memory_overheads(
    runs: Sequence[PublishedRun], context: Mapping[str, Any], records: Sequence[RecordRuns] = ()
) -> dict[str, float]:
    """``context_per_thread``, ``fragmentation_frac`` and ``replayed_frac`` with their 80% bounds, ``allocated_log_sd``
    of runs on one GPU and ``sharded_log_sd`` of others; empty without evidence.

    `context` is the belief: MiB that others measured on a card, each weighing as much as a source of these runs; the
    `records` are one. A context is taken by the threads that its card holds (`memory_codes.context_threads`). Every
    source weighs the same in the quantiles. Of fragmentation the records say nothing: their models have few layers.
    """
    counted = counted_runs(runs)
    if not counted:
        return {}
    threads = {gpu.id: context_threads(gpu) for gpu in load_gpus().values()}
    contexts = {f"cited {gpu}": [float(mib) * MIB / threads[gpu]] for gpu, mib in context["values_mib"].items()}
    for record in records:
        if record.contexts_bytes:
            own = (context / threads[record.runs[0].gpu] for context in record.contexts_bytes)
            contexts.setdefault(SOURCE, []).extend(own)
    for row in counted:
        if row.reserved_bytes is not None:
            contexts.setdefault(row.source, []).append((row.process_bytes - row.reserved_bytes) / row.threads)
    bounds = _context_bounds(contexts, float(context["few_log_sd"]))
    fractions: dict[str, list[float]] = {}
    replays = {record.name: list(record.replays) for record in records if record.replays}
    for row in counted:
        fractions.setdefault(row.source, []).append(row.fragmentation(bounds[1]))
        if row.replayed_bytes is not None:
            replays.setdefault(row.source, []).extend(row.replay(bounds[1]))
    terms = {f"context{PER_THREAD}": bounds, "fragmentation_frac": quantiles(fractions)}
    named = {
        f"{name}{end}": value
        for name, values in terms.items()
        for end, value in zip(("_low", "", "_high"), values, strict=True)
    }
    spreads = {COMPARED: allocated_log_sd(runs, several=False), SHARED: allocated_log_sd(runs, several=True)}
    named |= replayed_bounds(replays)
    return named | {name: spread for name, spread in spreads.items() if spread is not None}


def _context_bounds(contexts: Shares, few_log_sd: float) -> tuple[float, ...]:
    """Tenths and the middle; of fewer than `ENOUGH` sources, which may be alike by chance, the middle with a spread."""
    low, middle, high = quantiles(contexts)
    wide = 1.0 if len(contexts) >= ENOUGH else math.exp(Z80 * few_log_sd)
    return min(low, middle / wide), middle, max(high, middle * wide)


def replayed_bounds(replays: Pairs) -> dict[str, float]:
    """``replayed_frac`` with its 80% bounds; nothing where a share tells these runs as well.

    Sources differ by more than the runs of one do, and a new one is one more, so that the bounds hold 80% of every
    source: the lowest of their lower tenths, the highest of their upper ones.
    """
    beyond = {source: [pair[0] for pair in own] for source, own in replays.items()}
    if not beyond or _missed(beyond) >= _missed({source: [pair[1] for pair in own] for source, own in replays.items()}):
        return {}
    ends = [quantiles({source: own}) for source, own in beyond.items()]
    return {
        "replayed_frac_low": min(low for low, _, _ in ends),
        "replayed_frac": quantiles(beyond, (0.5,))[0],
        "replayed_frac_high": max(high for _, _, high in ends),
    }


def _missed(figures: Shares) -> float:
    """Median distance from the middle of all figures, every source weighing the same in both."""
    (middle,) = quantiles(figures, (0.5,))
    return quantiles({source: [abs(value - middle) for value in own] for source, own in figures.items()}, (0.5,))[0]


def memory_priors(
    runs: Sequence[PublishedRun], beliefs: Mapping[str, Any], records: Sequence[RecordRuns] = ()
) -> dict[str, Any]:
    """The priors' keys about memory: `memory_overheads`, with the spread of code never compared, and which code was.

    That spread is no smaller than the beliefs' ``unmodelled_log_sd``: rows get nearer as their own code is modelled,
    which says nothing of code that is not.
    """
    terms, known = memory_overheads(runs, beliefs["context"], records), beliefs["memory_codes"]
    codes = memory_codes(runs, known["same"])
    other = other_code_log_sd(runs, known, codes, terms["fragmentation_frac"]) if terms else None
    if other is not None:
        terms[OTHER] = max(other, float(known.get("unmodelled_log_sd", 0.0)))
    return {"memory_overhead_bytes": terms, "memory_codes": codes}


def quantiles(figures: Shares, at: Sequence[float] = QUANTILES) -> tuple[float, ...]:
    """Quantiles over all figures, every source weighing the same, between neighbours in proportion."""
    pairs = sorted((value, 1.0 / len(own)) for own in figures.values() for value in own)
    values, weights = np.array(pairs).T
    places = (np.cumsum(weights) - 0.5 * weights) / weights.sum()
    return tuple(np.interp(at, places, values).tolist())
