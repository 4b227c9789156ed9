#!/usr/bin/env python3
"""Evidence on a real GPU: a calibration, held-out runs, and a page that compares them with the forecasts.

    python scripts/gpu_evidence.py run --out DIR --minutes 9      on the rented machine; again until it exits with 0
    python scripts/gpu_evidence.py judge DIR                      at home
    python scripts/gpu_evidence.py judge results/validation/gpu --record results/records/<card>.json      anew

`run` calibrates (without the fit) and then measures the runs of `evidence.py`, each written at once into DIR/runs, so
that it may be cut off anywhere and goes on where it was. Nothing is downloaded: the models have random weights. It
needs torch, transformers, peft, bitsandbytes, accelerate, nvidia-ml-py, numpy, pydantic and PyYAML, neither scipy nor
pandas. A tiny step by each method comes first: what is installed but does not work says so before anything is
written. A run that does not fit or fails is written down as that. Exit codes: 0 all is measured, 1 the device or the
calibration failed, 2 bad input or a tiny step that does not run, 3 time was up first (type the same again).

`judge` fits the calibration, forecasts every measured run from it, and writes the page. Exit codes: 0 every target is
met, 2 bad input, 3 a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from evidence import RECORDS, ROOT, HeldOut, runs_for

BAD_INPUT, FAILED, LEFT = 2, 1, 3
GRACE_S = 5.0
"""Kept back of the minutes: ending a process and writing what it had."""
POLL_S = 0.2
PACKAGES = {
    "numpy": "numpy", "pydantic": "pydantic", "yaml": "pyyaml", "torch": "torch", "transformers": "transformers",
    "peft": "peft", "bitsandbytes": "bitsandbytes", "accelerate": "accelerate",
}  # fmt: skip
"""What `run` imports, by module, with the name to install."""
CUDA_PACKAGES = PACKAGES | {"pynvml": "nvidia-ml-py"}


def told_input(message: str) -> int:
    """One sentence, and the exit code of bad input."""
    print(f"gpu_evidence: {message}", file=sys.stderr)
    return BAD_INPUT


def missing_packages(device: str) -> str | None:
    """A sentence when the machine lacks something that `run` needs."""
    needed = CUDA_PACKAGES if device.startswith("cuda") else PACKAGES
    absent = [pip for module, pip in needed.items() if importlib.util.find_spec(module) is None]
    if importlib.util.find_spec("tunecast") is None:
        return "tunecast is not installed here; type: pip install --no-deps --no-build-isolation ."
    return f"{', '.join(absent)} is missing here; type: pip install {' '.join(absent)}" if absent else None


def calibration_in(folder: Path) -> list[Path]:
    """Calibration records of a folder."""
    from tunecast.calibrate.record import SCHEMA

    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("schema") == SCHEMA:
            found.append(path)
    return found


class Supervised:
    """One worker process at a time, ended when the minutes are over or its run hangs."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    def run(self, command: Sequence[str], running: Path) -> int:
        """The worker's exit code; `LEFT` when time was up, 124 when its run hung."""
        worker = subprocess.Popen(command)
        try:
            while (code := worker.poll()) is None:
                if time.time() > self.ends_at:
                    return LEFT
                if time.time() > until(running):
                    return 124
                time.sleep(POLL_S)
            return code
        finally:
            stop(worker)


def stop(worker: subprocess.Popen[bytes]) -> None:
    """End the worker, by force when it does not heed; what it held on the device is free afterwards."""
    if worker.poll() is None:
        worker.terminate()
        try:
            worker.wait(timeout=GRACE_S / 2)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def until(running: Path) -> float:
    """When the run that is being measured counts as hung; never when none is."""
    try:
        return float(json.loads(running.read_text(encoding="utf-8"))["until"])
    except (OSError, ValueError, KeyError):
        return math.inf


def write_lost(out: Path, runs: Sequence[HeldOut], code: int) -> bool:
    """Write the run that its process did not survive as failed; False when there was none."""
    from gpu_worker import RUNNING, write_run

    running = out / RUNNING
    if not running.exists():
        return False
    name = json.loads(running.read_text(encoding="utf-8"))["name"]
    why = f"ended by signal {-code}" if code < 0 else "took far longer than foreseen" if code == 124 else f"exit {code}"
    (lost,) = [run for run in runs if run.name == name]
    write_run(out / "runs", lost, {"outcome": "failed", "message": f"its process did not survive it: {why}"})
    running.unlink()
    return True


def worker_command(task: str, out: Path, device: str, *more: str) -> list[str]:
    """How a worker is started."""
    script = str(Path(__file__).with_name("gpu_worker.py"))
    return [sys.executable, script, task, "--out", str(out), "--device", device, *more]


def measure(out: Path, device: str, runs: Sequence[HeldOut], ends_at: float) -> int:
    """Measure what has no file yet, in a fresh process after every failure."""
    from gpu_worker import AGAIN_CODE, RUNNING

    (out / RUNNING).unlink(missing_ok=True)
    names = ",".join(run.name for run in runs)
    command = worker_command("measure", out, device, "--runs", names, "--ends-at", str(ends_at))
    while True:
        code = Supervised(ends_at).run(command, out / RUNNING)
        if code in (0, BAD_INPUT, LEFT):
            (out / RUNNING).unlink(missing_ok=True)
            return code
        if code != AGAIN_CODE and not write_lost(out, runs, code):
            return FAILED


def run(asked: argparse.Namespace) -> int:
    """Calibrate, then measure; 0 when nothing is left to do."""
    from gpu_worker import RUNNING, tell

    from tunecast.calibrate.partial import prepare_folder
    from tunecast.catalogs.errors import InputError

    began, out, device = time.time(), asked.out, asked.device
    listed = runs_for(device)
    names = [name for name in (asked.runs or "").split(",") if name]
    unknown = [name for name in names if name not in {run.name for run in listed}]
    if unknown:
        return told_input(f"there is no run {unknown[0]!r} for {device}; take of {', '.join(r.name for r in listed)}.")
    if not asked.minutes > 0:
        return told_input(f"--minutes is {asked.minutes:g}, but it must be above 0; type --minutes 9 or leave it out.")
    try:
        prepare_folder(out)
        prepare_folder(out / "runs")
    except InputError as error:
        return told_input(str(error))
    ends_at = began + asked.minutes * 60 - min(GRACE_S, asked.minutes * 6)
    code = 0
    found = calibration_in(out)
    if found:
        tell(f"calibration: {found[0].name} is there")
    elif asked.only != "measure":
        mode = "quick" if asked.quick else "full"
        code = Supervised(ends_at).run(worker_command("calibrate", out, device, "--mode", mode), out / RUNNING)
        if code in (BAD_INPUT, LEFT):
            return code
    chosen = [run for run in listed if not names or run.name in names]
    measured = 0 if asked.only == "calibrate" else measure(out, device, chosen, ends_at)
    there = sum((out / "runs" / f"{one.name}.json").exists() for one in chosen)
    tell(f"{there} of {len(chosen)} runs are written, {(time.time() - began) / 60:.1f} minutes")
    return measured or (FAILED if code else 0)


def judge(asked: argparse.Namespace) -> int:
    """The page of a folder that `run` filled."""
    from gpu_page import judged

    from tunecast.catalogs.errors import TunecastError

    try:
        calibrations = [asked.record] if asked.record else calibration_in(asked.folder)
        return judged(asked.folder, calibrations, page=asked.page, records=asked.records)
    except TunecastError as error:
        return told_input(str(error))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("run", help="on the rented machine")
    one.add_argument("--out", type=Path, required=True, help="folder for the records; the same again goes on")
    one.add_argument("--minutes", type=float, default=math.inf, help="stop before so many minutes are over")
    one.add_argument("--only", choices=["calibrate", "measure"])
    one.add_argument("--quick", action="store_true", help="a quick calibration instead of a full one")
    one.add_argument("--device", default="cuda:0", help="cuda:N, mock:<gpu-id>[#seed] or cpu")
    one.add_argument("--runs", help="names of runs, with commas between; all of the list without it")
    two = parts.add_parser("judge", help="at home")
    two.add_argument("folder", type=Path, help="what `run` filled; its runs-2, runs-3 ... hold repetitions")
    two.add_argument("--record", type=Path, help="the calibration, where it is not in the folder")
    two.add_argument("--page", type=Path, default=ROOT / "results" / "validation" / "gpu" / "README.md")
    two.add_argument("--records", type=Path, default=RECORDS, help="where the fitted calibration goes")
    return parser.parse_args(arguments)


def ended(number: int, frame: FrameType | None) -> None:
    """Told to end, end the worker too."""
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """One of the two parts."""
    asked = parsed(arguments)
    if asked.part == "judge":
        return judge(asked)
    lacking = missing_packages(asked.device)
    if lacking is not None:
        return told_input(lacking)
    signal.signal(signal.SIGTERM, ended)
    return run(asked)


if __name__ == "__main__":
    sys.exit(main())
