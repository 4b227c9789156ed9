#!/usr/bin/env python3
"""Evidence on this CPU: calibrate, measure runs that the calibration has not, and compare with the forecast.

Usage: python scripts/cpu_evidence.py [--record FILE [--forecast-only]]      on a quiet machine, about 20 minutes

Every step is the command a user would type. Writes the calibration record into results/records/, the
measured runs and forecasts into results/validation/cpu/, and a table beside them. Runs measured twice
give the noise floor. Nothing of the held-out runs reaches the fit. With --forecast-only what was measured is kept and
forecast with today's code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from evidence import CPU_RUNS, RECORDS, ROOT, row, summary

OUT = ROOT / "results" / "validation" / "cpu"
REPEATED = ("smollm2-135m-lora-ck", "qwen2.5-0.5b-qlora-ck", "tinyllama-1.1b-lora-ck", "llama-3.2-1b-qlora-ck")


def tunecast(*arguments: str) -> Any:
    """Run the command line; its JSON, or stop with what it said."""
    done = subprocess.run([sys.executable, "-m", "tunecast", *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        sys.exit(f"tunecast {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def calibrated(record: Path | None) -> Path:
    """The record given, or a new quick calibration."""
    if record is not None:
        return record
    RECORDS.mkdir(parents=True, exist_ok=True)
    before = set(RECORDS.glob("cpu_*.json"))
    tunecast("calibrate", "--device", "cpu", "--quick", "--fresh", "--out", str(RECORDS), "--json")
    (new,) = set(RECORDS.glob("cpu_*.json")) - before
    return new


def measured(name: str, model: str, options: str, suffix: str = "") -> Any:
    """Real steps of one run; kept in a file of its own at once, so that nothing measured is lost."""
    OUT.mkdir(parents=True, exist_ok=True)
    kept = OUT / f"{name}{suffix}.json"
    answer = tunecast("measure", model, *options.split(), "--device", "cpu", "--steps", "5", "--json")[0]
    kept.write_text(json.dumps(answer, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{name}: {answer['step_time_s']['value']:.3f} s", flush=True)
    return answer


def kept(name: str, model: str, options: str, suffix: str = "") -> Any:
    """The same as it was measured before, with this record."""
    del model, options
    return json.loads((OUT / f"{name}{suffix}.json").read_text(encoding="utf-8"))


def markdown(rows: list[dict[str, Any]], figures: dict[str, float], record: Path) -> str:
    """The table as a page."""
    lines = [
        "# This CPU: forecast against measurement",
        "",
        f"Calibration: `{record.relative_to(ROOT)}` (quick). Runs outside it, measured in the same hour;",
        "made by `scripts/cpu_evidence.py`, which is also how to repeat it.",
        "",
        *(f"- {name.replace('_', ' ')}: {value:.1%}" for name, value in figures.items() if name != "runs"),
        "",
        "| run | options | measured s | forecast s (80%) | error | again | allocated error |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        f = r["forecast_s"]
        again = "" if r["noise"] is None else f"{r['noise']:+.1%}"
        lines.append(
            f"| {r['run']} | `{r['options']}` | {r['measured_s']:.3f} | {f['value']:.3f} ({f['low']:.3f} to "
            f"{f['high']:.3f}) | {r['error']:+.1%} | {again} | {r['allocated_error']:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Calibrate, measure, repeat, forecast, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--forecast-only", action="store_true", help="keep what was measured, forecast it anew")
    asked = parser.parse_args()
    record = calibrated(asked.record)
    measure = kept if asked.forecast_only else measured
    real = {name: measure(name, model, options) for name, model, options in CPU_RUNS}
    again = {name: measure(name, model, options, "-again") for name, model, options in CPU_RUNS if name in REPEATED}
    rows = []
    for run in CPU_RUNS:
        asked_run = (run.model, *run.options.split())
        bare = ("estimate", *asked_run, "--no-trainer-loop")
        forecast = tunecast(*bare, "--gpu", "cpu", "--record", str(record), "--json")[0]
        rows.append(row(run, real[run.name], forecast, [again[run.name]] if run.name in again else []))
    figures = summary(rows)
    result = {"record": record.name, "summary": figures, "rows": rows}
    (OUT / "cpu.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (OUT / "README.md").write_text(markdown(rows, figures, record.resolve()), encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
