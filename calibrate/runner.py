"""The calibration: plan, resume, settle, measure, write one record, fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunecast.calibrate.devices.protocol import Device, Hardware, TrialResult, TrialSpec
from tunecast.calibrate.flags import record_flags
from tunecast.calibrate.partial import Partial, prepare_folder
from tunecast.calibrate.plan import STORAGE_BENCHES, budget, calibration_plan
from tunecast.calibrate.record import (
    PARTIAL_SUFFIX,
    SCHEMA,
    SCHEMA_VERSION,
    add_fitted,
    file_slug,
    read_record,
    utc_now,
    write_record,
)
from tunecast.calibrate.rehearsal import require_steps
from tunecast.catalogs.errors import InputError, TunecastError

PROTOCOL_VERSION = 1
"""Raised whenever a trial of the same key would measure something else: such trials do not compare."""

KIND = ("op", "dtype", "pass", "kernel", "direction", "masked", "pinned")
"""Parameters of a trial that say more than how large it is."""

Progress = Callable[[int, int, str, float | None], None]
"""Told (trials done, trials in all, what runs now, seconds left or None) before every trial and at the end."""


@dataclass(slots=True)
class _Clock:
    """How long trials of each bench took, to foresee the rest and to stop in time."""

    started_s: float
    spent_s: dict[str, list[float]]

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def note(self, bench: str, seconds: float) -> None:
        self.spent_s.setdefault(bench, []).append(seconds)

    def left_s(self, remaining: Sequence[TrialSpec]) -> float | None:
        """Seconds the remaining trials should take: the mean of their bench, else of all; None before the first."""
        everything = [seconds for found in self.spent_s.values() for seconds in found]
        if not everything:
            return None
        overall = sum(everything) / len(everything)
        means = {bench: sum(found) / len(found) for bench, found in self.spent_s.items()}
        return sum(means.get(spec.bench, overall) for spec in remaining)


def calibrate(
    device: Device,
    *,
    mode: str = "quick",
    out_dir: Path | str = "tunecast-records",
    fresh: bool = False,
    fit: bool = True,
    num_gpus: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Measure everything the plan asks of `device` and write one record into `out_dir`; its path.

    Collectives are measured between `num_gpus` GPUs of the machine (processes of a CPU): by default all that are
    the same card, 1 leaves them out.

    Interrupted (by the user or a lost device), the partial file stays and the next call resumes it,
    unless `fresh`. Out-of-memory and failed trials are recorded and the rest goes on. The device stays open.
    """
    hardware = device.hardware()
    plan = calibration_plan(hardware, mode, checked_gpus(device, num_gpus))
    folder = prepare_folder(Path(out_dir))
    software = device.software()
    partial = Partial(folder / f"{partial_slug(hardware, mode)}{PARTIAL_SUFFIX}", _identity(hardware, software, mode))
    if not fresh:
        partial.resume()
    partial.start()
    kept = sum(spec.key in partial.trials for spec in plan)
    require_steps(device)
    started_s = time.monotonic()
    limits = budget(hardware, mode)
    settled = device.settle(limits.settle_s)
    cut_short = _interruptible(partial, lambda: _run_plan(device, plan, partial, limits.trials_s, progress))
    trials = [partial.trials[spec.key] | {"id": index} for index, spec in enumerate(plan) if spec.key in partial.trials]
    record = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "tunecast": software.get("tunecast"),
        "created_at": utc_now(),
        "duration_s": time.monotonic() - started_s,
        "protocol": {"version": PROTOCOL_VERSION, "mode": mode, "resumed_trials": kept},
        "hardware": asdict(hardware),
        "software": software,
        "trials": trials,
        "flags": record_flags(device, hardware, trials, settled=settled, cut_short=cut_short),
        "fitted": None,
    }
    path = write_record(record, folder)
    partial.remove()
    if fit:
        _fit_after(path)
    return path


def _interruptible(partial: Partial, run: Callable[[], bool]) -> bool:
    """Run the plan; an interruption says that what was measured is kept."""
    try:
        return run()
    except KeyboardInterrupt as error:
        if not partial.trials:
            raise
        kept = f"{len(partial.trials)} trials are kept in {partial.path}: the same command goes on from there"
        raise KeyboardInterrupt(kept) from error


FEWEST_PROCESSES = 2
"""Processes that every CPU may run for collectives, a single core too."""


def checked_gpus(device: Device, asked: int | None) -> int:
    """Between how many GPUs collectives are measured; more than there are is refused."""
    peers = getattr(device, "peers", None)
    there = 1 if peers is None else int(peers())
    if asked is None:
        return there
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise InputError(f"--num-gpus is {asked!r}, but it must be at least 1; 1 measures no collectives.")
    cores = max(os.cpu_count() or 1, FEWEST_PROCESSES)
    if peers is None and asked > cores and device.hardware().device == "cpu":
        raise InputError(
            f"--num-gpus {asked} was asked for, but this CPU runs at most {cores} processes, one per core."
        )
    if peers is not None and asked > there:
        raise InputError(f"--num-gpus {asked} was asked for, but this machine has {there} of {device.id}'s kind.")
    return asked


def _fit_after(path: Path) -> None:
    """Fit what was just written; whatever goes wrong, the measurements are safe and the user is told where."""
    try:
        fit_file(path)
    except (TunecastError, ImportError, ValueError) as error:
        raise TunecastError(
            f"The record {path} was measured and written, but its fit failed ({error}); type: tunecast fit {path}"
        ) from error
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(
            f"the record {path} was measured and written; to fit it, type: tunecast fit {path}"
        ) from error


def fit_file(path: Path) -> dict[str, Any]:
    """Fit a record and put the result into its file; the fitted section."""
    from tunecast.calibrate.fit import fit_record

    fitted = fit_record(read_record(path))
    add_fitted(path, fitted)
    return fitted


def partial_slug(hardware: Hardware, mode: str = "quick") -> str:
    """Name of the partial file: the catalog id, with the device's index where there may be several; a mode that is not
    the usual one has a file of its own, so that neither overwrites what the other has measured."""
    named = file_slug(str(hardware.gpu or hardware.name))
    index = f"-{file_slug(hardware.device)}" if hardware.device.startswith("cuda:") else ""
    return f"{named}{index}" if mode == "quick" else f"{named}{index}.{mode}"


def _identity(hardware: Hardware, software: dict[str, str | None], mode: str) -> dict[str, Any]:
    """What must match for finished trials to be used again: device, protocol, mode and versions."""
    return {
        "protocol": PROTOCOL_VERSION,
        "mode": mode,
        "device": hardware.device,
        "gpu": hardware.gpu,
        "name": hardware.name,
        "driver": hardware.driver,
        "threads": hardware.host.get("threads"),
        "software": software,
    }


def _run_plan(
    device: Device, plan: Sequence[TrialSpec], partial: Partial, limit_s: float | None, progress: Progress | None
) -> bool:
    """Run every trial that is not finished yet; True when time ran out before the end.

    Collectives are few, short, and asked for: they are measured even then. So is the first trial of every kind, without
    which a fit may lack a curve, but for the disk's.
    """
    clock = _Clock(started_s=time.monotonic(), spent_s={})
    tell = progress or _untold
    todo = [spec for spec in plan if spec.key not in partial.trials]
    done = len(plan) - len(todo)
    cut_short = False
    kinds = {kind_of(trial["bench"], trial["params"]) for trial in partial.trials.values() if trial["outcome"] == "ok"}
    for index, spec in enumerate(todo):
        late = limit_s is not None and clock.elapsed_s() > limit_s
        known = spec.bench in STORAGE_BENCHES or kind_of(spec.bench, spec.params) in kinds
        if late and known and spec.bench != "collective":
            cut_short = True
            continue
        tell(done + index, len(plan), label(spec), clock.left_s(todo[index:]))
        before_s = clock.elapsed_s()
        result = _run_one(device, spec)
        partial.add(spec.key, trial_entry(spec, result))
        if result.outcome == "ok":
            kinds.add(kind_of(spec.bench, spec.params))
        clock.note(spec.bench, clock.elapsed_s() - before_s)
    tell(len(plan), len(plan), "done", 0.0)
    return cut_short


def kind_of(bench: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Trials of a kind differ in size alone, and serve one curve."""
    return (bench, *(str(params.get(name)) for name in KIND))


def _run_one(device: Device, spec: TrialSpec) -> TrialResult:
    if device.supports(spec):
        return device.run(spec)
    return TrialResult(outcome="unsupported", message=f"{device.id} cannot run {spec.bench} with these parameters.")


def trial_entry(spec: TrialSpec, result: TrialResult) -> dict[str, Any]:
    """One trial as it stands in a record, but for its number."""
    values = asdict(result)
    return {
        "bench": spec.bench,
        "params": spec.params,
        "repeats": spec.repeats,
        "warmup": spec.warmup,
        "outcome": values["outcome"],
        "message": values["message"],
        "samples_s": list(values["samples_s"]),
        "warmup_s": list(values["warmup_s"]),
        "memory": values["memory"],
        "sensors_before": _listed(values["sensors_before"]),
        "sensors_after": _listed(values["sensors_after"]),
        "extra": values["extra"],
    }


def _listed(reading: dict[str, Any] | None) -> dict[str, Any] | None:
    """Sensors as JSON has them: the tuple of reasons as a list."""
    if reading is None or reading["throttle_reasons"] is None:
        return reading
    return reading | {"throttle_reasons": list(reading["throttle_reasons"])}


def label(spec: TrialSpec) -> str:
    """A short name of a trial for the progress bar."""
    if spec.bench != "step":
        shown = [str(spec.params[name]) for name in ("op", "direction", "m", "n", "k", "length") if name in spec.params]
        return " ".join((spec.bench, *shown))
    architecture, run = spec.params["architecture"], spec.params["run"]
    layers = sum(group["count"] for group in architecture["groups"])
    return f"step {run['method']} {architecture['hidden_size']} x {layers} layers"


def _untold(done: int, total: int, what: str, left_s: float | None) -> None:
    """The progress of a calibration nobody watches."""
