"""Runs of a table, forecast and compared with what was measured. Only what is stated is scored.

Speed is tokens/s of the whole job. Memory compares allocated with allocated, reserved with reserved and
what nvidia-smi shows with the process. Low-confidence rows are never scored; runs that ran out of memory
test the verdict only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.calibrate.mean_rows import COLUMN, in_samples, is_padded, padded_memory, rows_of, timed, with_mean
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.row_faults import in_columns
from tunecast.calibrate.run_end import OUT_OF_MEMORY, nothing_measured, out_of_memory
from tunecast.calibrate.run_table import NO_SPEED, NOTHING, SkipRowError
from tunecast.calibrate.start_up import as_sure, start_up_share, with_start_up
from tunecast.calibrate.vocabulary import vocabulary
from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.fits import fit_probability, fit_verdict, memory_view
from tunecast.model.forecast import MemoryView
from tunecast.model.inventory import step_operations
from tunecast.model.memory_codes import as_other_code
from tunecast.model.parallel_network import with_network
from tunecast.model.parallel_offload import with_host
from tunecast.model.priors import prior_factors
from tunecast.model.rows import own_run
from tunecast.model.run import Run
from tunecast.model.target import Target
from tunecast.model.time import StepTime
from tunecast.model.timing import linked_step
from tunecast.model.units import gib
from tunecast.model.value import Value

PRESUMED = f"{OUT_OF_MEMORY} (presumed)"
AUXILIARY = "auxiliary set: for ratios between rows, never scored"
ABOVE_PROCESS, BELOW_TENSORS = 1.25, 0.8
"""A stated peak beyond these shares of the forecast process, or of its tensors, contradicts how the row was read."""

COUNTER = "reserved_or_allocated"
"""The column that says which memory a peak is of."""
WRITE_COUNTER = "write allocated, reserved, or nvidia-smi for the process"

OF_PROCESS = re.compile(
    r"(?:(?:nvidia-)?smi|process|nvtop|nvitop|gpustat|(?:py)?nvml|dcgm(?:-exporter)?)\b(?!.*(?:allocated|reserved|percent|%))",
    re.IGNORECASE,
)
"""Counters of the memory that a process holds, most by NVML's figures; not their columns of another."""

Priors = Mapping[str, Any]
PriorsOf = Callable[[PublishedRun], Priors]
"""The priors a run is forecast with; leaving its group out is this function's business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One row of the table, as far as it could be read."""

    id: str
    run: PublishedRun | None
    """None when the row is skipped."""
    reason: str = ""
    """Why the row is skipped, or why its speed cannot be compared."""
    out_of_memory: str = ""
    """``stated``, ``presumed`` or empty."""
    measured: bool = True
    """Whether anything was measured: a row without does not say that it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured quantity beside its forecast."""

    measured: float
    predicted: Value

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.value / self.measured - 1.0

    @property
    def inside(self) -> bool:
        """Whether the measured value is inside the 80% interval."""
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def half_width(self) -> float:
        """Half the interval, as a share of the forecast."""
        return (self.predicted.high - self.predicted.low) / (2.0 * self.predicted.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of one published run."""

    step: StepTime
    tokens_per_s: Value
    memory: MemoryView
    verdict: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One row with its forecast and its comparisons."""

    entry: Entry
    prediction: Prediction | None = None
    speed: Compared | None = None
    memory: Compared | None = None
    skipped: str = ""
    """Why nothing of the row is compared, where that is of the row as a whole."""
    why_no_speed: str = ""
    why_no_memory: str = ""
    in_sample: bool = False
    """Whether the priors that forecast the row were fitted to it: its errors are those of a fit."""

    @property
    def reason(self) -> str | None:
        """Why the row, or half of it, is not scored, in words; None when both halves are."""
        if self.skipped and self.prediction is not None:
            return f"{self.skipped}; the forecast says {self.prediction.verdict}"
        halves = (("speed", self.why_no_speed), ("memory", self.why_no_memory))
        return self.skipped or "; ".join(f"{what}: {why}" for what, why in halves if why) or None

    @property
    def doubt(self) -> str:
        """That the row's own peak memory, whatever its counter, speaks of other settings than were read; else nothing.

        Tensors are forecast within percents, so a peak far above the process of this reading, or below its tensors, is
        hardly the allocator's: weights stored wider, other losses, other checkpoints.
        """
        peak = None if self.entry.run is None else self.entry.run.peak_bytes
        if peak is None or self.prediction is None or self.entry.out_of_memory:
            return ""
        view = self.prediction.memory
        tensors, process = view.allocated_bytes.value, (view.process_bytes or view.allocated_bytes).value
        if peak > ABOVE_PROCESS * process:
            told = f"{peak / process - 1.0:.0%} above the process of this reading ({gib(process):.1f} GiB)"
        elif peak < BELOW_TENSORS * tensors:
            told = f"{1.0 - peak / tensors:.0%} below the tensors of this reading ({gib(tensors):.1f} GiB)"
        else:
            return ""
        return f"its peak of {gib(peak):.1f} GiB is {told}: other settings may have run"

    @property
    def whole_time(self) -> str:
        """That the speed compared is of the whole wall time, in a sentence; else nothing."""
        return self.entry.run.whole_time if self.entry.run is not None and self.speed is not None else ""

    @property
    def scored(self) -> bool:
        """Whether anything of the row is compared."""
        return self.speed is not None or self.memory is not None


def read_entries(rows: Iterable[dict[str, str]]) -> list[Entry]:
    """Every row of the table, in its order."""
    return [_entry(row) for row in rows]


def _entry(row: dict[str, str]) -> Entry:
    with contextlib.suppress(SkipRowError):
        row = out_of_memory(row)
    ran_out = _out_of_memory(row)
    if row.get("set") == "auxiliary" and row.get("confidence") != "low":
        return Entry(id=row["id"], run=None, reason=AUXILIARY, out_of_memory=ran_out)
    plain = {**with_mean(row), "notes": row.get("notes", "").removeprefix(OUT_OF_MEMORY)}
    if ran_out:
        plain.pop("total_time_h", None)
    run, reason = _read(plain)
    if plain.get(COLUMN):
        run, reason = in_samples(plain, run, reason, _read)
    elif run is None and is_padded(reason) and "packed" in row:
        run, other = padded_memory(plain, _read)
        reason = other or reason
    return Entry(id=row["id"], run=run, reason=reason, out_of_memory=ran_out, measured=not nothing_measured(row))


def _read(row: dict[str, str]) -> tuple[PublishedRun | None, str]:
    runs, skipped = read_runs([row])
    return (runs[0], "") if runs else (None, skipped[0].reason)


def _out_of_memory(row: dict[str, str]) -> str:
    notes = row.get("notes", "")
    if notes.startswith(PRESUMED):
        return "presumed"
    return "stated" if notes.startswith(OUT_OF_MEMORY) else ""


def judge_all(entries: Iterable[Entry], priors_of: PriorsOf) -> list[Judged]:
    """Every row forecast and compared, in the order given."""
    return [judge(entry, priors_of) for entry in entries]


def judge(entry: Entry, priors_of: PriorsOf) -> Judged:
    """One row: forecast it, then compare what can be compared."""
    if entry.run is None:
        return Judged(entry=entry, skipped=entry.reason)
    try:
        prediction = predict(entry.run, priors_of(entry.run))
    except TunecastError as error:
        return Judged(entry=entry, skipped=in_columns(str(error)))
    if entry.out_of_memory:
        told = f"ran out of memory ({entry.out_of_memory}): a test of fit"
        return Judged(entry=entry, prediction=prediction, skipped=told)
    speed, memory = _speed(entry, prediction), _memory(entry.run, prediction)
    return Judged(
        entry=entry,
        prediction=prediction,
        speed=None if isinstance(speed, str) else speed,
        memory=None if isinstance(memory, str) else memory,
        why_no_speed=speed if isinstance(speed, str) else "",
        why_no_memory=memory if isinstance(memory, str) else "",
    )


def predict(run: PublishedRun, priors: Priors) -> Prediction:
    """The forecast of one published run on its card, from these priors."""
    gpu = load_gpus()[run.gpu]
    labelled = replace(run.run, stack=run.stack)
    reached = priors["efficiency"]["link"]
    own = prior_factors(gpu, labelled, priors, attention_kernel=run.attention_kernel)
    own = as_other_code(own, priors) if run.own_loop else own
    factors = with_network(own, run.run, gpu, run.network, reached=reached)
    factors = with_host(factors, run.architecture, run.run, gpu, reached=reached)
    share = start_up_share(run.notes)
    factors = with_start_up(factors, share, priors)

    def step_of(asked: Run) -> StepTime:
        operations = step_operations(run.architecture, asked)
        return as_sure(linked_step(run.architecture, asked, operations, factors), share, priors)

    rows = None if run.mean_tokens is None else rows_of(run.run, run.mean_tokens, grouped=run.grouped)
    step = step_of(run.run) if rows is None else timed(step_of, run.run, rows)
    counted = run.run if rows is None else own_run(run.run, rows)
    target = Target(id=gpu.id, gpu=gpu, usable_bytes=gpu.usable_bytes, peaks=gpu.peaks)
    largest = run.run if rows is None or rows.peak is None else replace(run.run, max_length=rows.peak)
    view = memory_view(run.architecture, largest, target, factors)
    return Prediction(
        step=step,
        tokens_per_s=step.step_time_s.inverse(counted.tokens_per_step),
        memory=view,
        verdict=fit_verdict(view, fit_probability(view)),
    )


def _speed(entry: Entry, prediction: Prediction) -> Compared | str:
    run = entry.run
    assert run is not None
    if run.tokens_per_s is None or run.tokens_per_s <= 0:
        return entry.reason or run.why_no_speed or NO_SPEED
    return Compared(measured=run.tokens_per_s, predicted=prediction.tokens_per_s)


def _memory(run: PublishedRun, prediction: Prediction) -> Compared | str:
    if run.peak_bytes is None or run.peak_bytes <= 0:
        return run.why_no_memory or "no peak memory is stated"
    if run.counter.startswith("allocated"):
        return Compared(measured=run.peak_bytes, predicted=prediction.memory.allocated_bytes)
    if OF_PROCESS.match(run.counter):
        if prediction.memory.process_bytes is None:
            return "the process beyond the tensors is not known on this card"
        return Compared(measured=run.peak_bytes, predicted=prediction.memory.process_bytes)
    if not run.counter.startswith("reserved"):
        return _no_counter(run.counter)
    if prediction.memory.reserved_bytes is None:
        return "no published run says how much more than the tensors an allocator reserves"
    return Compared(measured=run.peak_bytes, predicted=prediction.memory.reserved_bytes)


def _no_counter(counter: str) -> str:
    """Why a peak cannot be compared: its row names no counter, or one that no forecast is of."""
    told = f"the counter is {counter!r}, neither allocated nor reserved"
    if any(rule.get("counter") == counter for rule in vocabulary()["rules"]):
        return told
    if counter.lower() in NOTHING:
        return f"{COUNTER} is not stated: {WRITE_COUNTER}"
    return f"{told}: {WRITE_COUNTER}, into {COUNTER}"
