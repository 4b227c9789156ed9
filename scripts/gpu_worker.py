"""The process of `gpu_evidence.py run` that holds the device: a calibration, or held-out runs one after the other.

Not typed by hand. It can be ended at any moment: trials of a calibration and records of runs are on disk when the
next one starts. It needs neither scipy nor pandas nor the network.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence import HeldOut, options_of, runs_for

from tunecast.calibrate.measure import SETTLE_S
from tunecast.calibrate.record import write_text
from tunecast.calibrate.rehearsal import rehearse
from tunecast.catalogs.errors import DeviceError, TunecastError
from tunecast.model.units import GIB, gib

if TYPE_CHECKING:
    from tunecast.calibrate.devices.protocol import Device

SCHEMA = "tunecast.heldout/1"
RUNNING = "running.json"
"""What is being measured now, for whoever finds that this process died of it."""
AGAIN_CODE, LEFT_CODE = 75, 3
"""Exit codes: a run failed, so start a fresh process for the others; time was up before the end of the list."""
BROKEN_CODE = 2
"""Exit code: nothing can be measured before somebody mends what is installed."""
WARMUP_LEAST, WARMUP_MOST, WARMUP_S = 2, 10, 1.0
"""Steps before those that count: as many as fill about a second, in which a card's clock finds its pace at the power
that this run draws."""
STEPS_LEAST, STEPS_MOST, COUNTED_S = 3, 20, 3.0
"""How many steps count: as many as fill about three seconds..."""
MOST_S = 12.0
"""...and as many as fill so long, where those scatter."""

FIRST_RUN_S = 60.0
"""Assumed, only to foresee whether a run ends in time: imports, CUDA context, settling of a process's first run.
Later runs take what the slowest so far took beside its steps."""
FILL_BYTES_PER_S = 2.0 * GIB
"""Assumed, for the same purpose: random weights made on the device."""
UNKNOWN_STEP_S = 10.0
"""Assumed, for the same purpose: a step where there is no forecast by priors (a CPU, an unlisted card)."""
HANG_FACTOR = 3.0
"""A run that takes so many times what was foreseen is ended from outside."""


def tell(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


class Foresight:
    """How long a run will take, to start none that would not end in time."""

    def __init__(self) -> None:
        self.beside_s: float | None = None
        """Largest time that a run took beside its steps and the filling of its weights."""

    def needed_s(self, step_s: float, steps: int, weight_bytes: float) -> float:
        """Seconds from opening the run to its record."""
        beside_s = FIRST_RUN_S if self.beside_s is None else self.beside_s
        return beside_s + weight_bytes / FILL_BYTES_PER_S + warmup_steps(step_s) * step_s + max(steps * step_s, MOST_S)

    def note(self, wall_s: float, measured: Any) -> None:
        """Learn from a run that ended."""
        steps_s = sum(measured.get("step_times_s", ())) + sum(measured.get("warmup_s", ()))
        self.beside_s = max(self.beside_s or 0.0, wall_s - steps_s)


def step_by_priors(run: HeldOut, gpu: str | None) -> tuple[float, float]:
    """(seconds of a step, bytes of the weights): the forecast's upper end, without any record."""
    from tunecast import api

    try:
        told = api.estimate(run.model, gpu=[gpu or ""], **options_of(run.options))[0]
    except Exception:  # Only a foresight: nothing that goes wrong in it may keep a run from being measured.
        return UNKNOWN_STEP_S, 0.0
    parts = told.memory.parts_bytes
    return told.step_time_s.high, parts.get("weights", 0.0) + parts.get("quantized", 0.0)


def counted_steps(step_s: float) -> int:
    """Steps that fill about `COUNTED_S`."""
    return min(STEPS_MOST, max(STEPS_LEAST, math.ceil(COUNTED_S / step_s)))


def warmup_steps(step_s: float) -> int:
    """Steps that fill about `WARMUP_S`."""
    return min(WARMUP_MOST, max(WARMUP_LEAST, math.ceil(WARMUP_S / step_s)))


def measured_run(device: Device, run: HeldOut, step_s: float, settle_s: float | None) -> dict[str, Any]:
    """The run as `tunecast measure` resolves it, and what its steps gave; `settle_s` is None for all but the first of a
    process, which follow runs."""
    from tunecast.asked import read_asked
    from tunecast.calibrate.measure import measure
    from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
    from tunecast.measurement import resolved_on

    asked = read_asked(run.model, options_of(run.options))
    resolved = resolved_on(device, asked)
    steps, warmup = counted_steps(step_s), warmup_steps(step_s)
    measured = measure(
        device, asked.architecture, resolved.run, steps=steps, warmup=warmup, most_s=MOST_S, settle_s=settle_s
    )
    return {
        "architecture": architecture_to_dict(asked.architecture),
        "run": run_to_dict(resolved.run),
        "outcome": measured["outcome"],
        "message": measured["message"],
        "measured": measured,
    }


def outcome_of(device: Device, run: HeldOut, step_s: float, settle_s: float | None) -> dict[str, Any]:
    """What became of the run: ``ok``, ``oom``, ``refused`` or ``failed``; never an exception."""
    try:
        return measured_run(device, run, step_s, settle_s)
    except DeviceError as error:
        return {"outcome": "failed", "message": str(error)}
    except TunecastError as error:
        return {"outcome": "oom" if error.exit_code == LEFT_CODE else "refused", "message": str(error)}
    except Exception as error:  # Whatever a library raises is an outcome; the other runs go on in a fresh process.
        return {"outcome": "failed", "message": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def write_run(out: Path, run: HeldOut, found: dict[str, Any]) -> None:
    """The run's own file, whole or not at all."""
    content = {"schema": SCHEMA, "name": run.name, "model": run.model, "options": run.options, **found}
    write_text(out / f"{run.name}.json", json.dumps(content, indent=1, sort_keys=True) + "\n")


def told_outcome(found: dict[str, Any]) -> str:
    """What a line of progress says of a run."""
    if found["outcome"] != "ok":
        return f"{found['outcome']}: {found['message'][:160]}"
    measured = found["measured"]
    step_s, allocated = measured["step_time_s"]["value"], measured["allocated_bytes"]
    return f"{step_s:.4g} s a step" + ("" if allocated is None else f", {gib(allocated):.1f} GiB allocated")


def measure_all(
    device: Device, runs: Sequence[HeldOut], out: Path, ends_at: float, clock: Callable[[], float] = time.time
) -> int:
    """Measure those that have no file yet, in order, none that would end after `ends_at`; the exit code.

    A run that would be too long is passed over: a shorter one behind it may still end in time.
    """
    gpu, foresight, code = device.hardware().gpu, Foresight(), 0
    for place, run in enumerate(runs, start=1):
        if (out / f"{run.name}.json").exists():
            continue
        step_s, weight_bytes = step_by_priors(run, gpu)
        needed_s, left_s = foresight.needed_s(step_s, counted_steps(step_s), weight_bytes), ends_at - clock()
        if needed_s > left_s:
            tell(f"[{place}/{len(runs)}] {run.name}: needs about {needed_s:.0f} s, {max(left_s, 0):.0f} s are left")
            code = LEFT_CODE
            continue
        began = clock()
        running = {"name": run.name, "until": began + HANG_FACTOR * needed_s}
        write_text(out.parent / RUNNING, json.dumps(running) + "\n")
        settle_s = SETTLE_S if foresight.beside_s is None else None
        found = outcome_of(device, run, step_s, settle_s) | {"seconds": clock() - began, "foreseen_s": needed_s}
        write_run(out, run, found)
        (out.parent / RUNNING).unlink(missing_ok=True)
        foresight.note(clock() - began, found.get("measured", {}))
        tell(f"[{place}/{len(runs)}] {run.name}: {told_outcome(found)}; {clock() - began:.0f} s")
        if found["outcome"] == "failed":
            return AGAIN_CODE
    return code


def calibrate(device: Device, out: Path, mode: str) -> int:
    """One calibration without its fit, a line of progress at each tenth."""
    from tunecast.calibrate import runner

    shown = -1

    def progress(done: int, total: int, what: str, left_s: float | None) -> None:
        nonlocal shown
        if done * 10 // total > shown:
            shown = done * 10 // total
            left = "" if left_s is None else f", about {left_s:.0f} s left"
            tell(f"calibration: {done} of {total} trials{left}")

    runner.calibrate(device, mode=mode, out_dir=out, fit=False, num_gpus=1, progress=progress)
    return 0


def quiet() -> None:
    """Keep what torch and its relatives tell their developers off stderr."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    for name in ("transformers", "bitsandbytes", "accelerate", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> int:
    """What the parent process asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["calibrate", "measure"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--mode", default="full")
    parser.add_argument("--ends-at", type=float, default=math.inf)
    parser.add_argument("--runs", default="")
    asked = parser.parse_args()
    from tunecast.api import opened

    quiet()
    try:
        with opened(asked.device) as device:
            names, out = asked.runs.split(","), asked.out / "runs"
            chosen = [run for run in runs_for(device.id) if run.name in names]
            if asked.task == "calibrate" or any(not (out / f"{run.name}.json").exists() for run in chosen):
                broken = rehearse(device)
                if broken is not None:
                    tell(f"gpu_evidence: {broken}")
                    return BROKEN_CODE
            if asked.task == "calibrate":
                return calibrate(device, asked.out, asked.mode)
            return measure_all(device, chosen, out, asked.ends_at)
    except TunecastError as error:
        tell(str(error))
        return error.exit_code if error.exit_code == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
