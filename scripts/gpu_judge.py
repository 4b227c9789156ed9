"""The second part of `gpu_evidence.py`: forecasts of the measured runs from the calibration alone, and their errors."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import AGAIN, ROOT, HeldOut, row, runs_for, summary

from tunecast.calibrate.priors_fit import as_shipped, priors_of
from tunecast.calibrate.priors_problem import read_training, rows_of_records
from tunecast.calibrate.priors_records import shipped_records
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.record import read_record
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.calibrate.validate import predict
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.units import gib

SCHEMA = "tunecast.heldout/1"
PUBLISHED = ROOT / "results" / "published" / "published-runs.csv"
LEAST_RUNS = 12
STEADY_FRAC = 0.02
"""A run whose steps scatter by no more (robustly), nor differ more from its repetitions where it was measured again,
says more of a forecast than of its machine."""
RUNS, REPEATED, BY_TRAINER = "runs", "runs-*", "trainer"
"""Folders of held-out records: the first measurement of each, later ones of some, and the Trainer's."""
TARGETS = {
    "median_abs_error": 0.05,
    "worst_abs_error": 0.12,
    "allocated_worst_abs_error": 0.02,
    "process_worst_abs_error": 0.04,
}
"""Largest absolute errors that the project asks of a calibrated card, each over every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """All that the page says."""

    record: dict[str, Any]
    record_name: str
    rows: list[dict[str, Any]]
    """By the calibration; `priors_error` beside it."""
    others: list[dict[str, Any]]
    """Runs without a step time: what became of them and what the forecast says."""
    figures: dict[str, Any]
    priors: dict[str, Any]
    elsewhere: dict[str, Any]
    """Step times by priors that have read no record of this card."""
    by_trainer: list[dict[str, Any]]
    """Jobs of transformers' Trainer between bare steps of the same model (`gpu_trainer.py`), with their forecasts."""


def read_runs(folder: Path, within: str = RUNS) -> dict[str, dict[str, Any]]:
    """Every held-out record of the folder by name, in the order of the list."""
    found = {}
    for path in sorted((folder / within).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            good = isinstance(content, dict) and content.get("schema") == SCHEMA
        except (OSError, ValueError):
            good = False
        if not good:
            raise InputError(f"{path} is no record of a held-out run ({SCHEMA}); remove it, or measure it again.")
        found[content["name"]] = content
    order = [run.name for run in (*runs_for("cuda"), *runs_for("cpu")) if run.name in found]
    return {name: found[name] for name in (*order, *sorted(set(found) - set(order)))}


def read_repeats(folder: Path, runs: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Further measurements by the name of the run, those without a step time left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    listed = [item for item in runs.items() if item[0].endswith(AGAIN)]
    for later in sorted(path.name for path in folder.glob(REPEATED)):
        listed += read_runs(folder, later).items()
    for name, content in listed:
        if content["outcome"] == "ok":
            found.setdefault(name.removesuffix(AGAIN), []).append(content)
    return found


def is_steady(measurements: Sequence[dict[str, Any]]) -> bool:
    """Whether the steps of a run, and its repetitions, differ by `STEADY_FRAC` at most."""
    steps = [content["measured"]["step_time_s"]["value"] for content in measurements]
    scatter = max(content["measured"]["spread_frac"] for content in measurements)
    return scatter <= STEADY_FRAC and max(steps) / min(steps) - 1.0 <= STEADY_FRAC


def steady_figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The errors of steady runs, and how many there are."""
    steady = [row for row in rows if row["steady"]]
    if not steady:
        return {"steady_runs": 0}
    errors = [abs(row["error"]) for row in steady]
    inside = statistics.mean(row["inside_interval"] for row in steady)
    return {"steady_runs": len(errors), "steady_median_abs_error": statistics.median(errors),
            "steady_worst_abs_error": max(errors), "steady_inside_80_interval": inside}  # fmt: skip


def averaged_figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The errors against the mean of a run's measurements, which says more of it than one of them."""
    means = [statistics.mean([row["measured_s"], *row["measured_again_s"]]) for row in rows]
    errors = [abs(row["forecast_s"]["value"] / mean - 1.0) for row, mean in zip(rows, means, strict=True)]
    return {"averaged_median_abs_error": statistics.median(errors), "averaged_worst_abs_error": max(errors)}


def as_answer(content: dict[str, Any]) -> dict[str, Any]:
    """A measured run in the shape of a forecast's JSON."""
    measured = content["measured"]
    views = {name: measured[f"{name}_bytes"] for name in ("allocated", "reserved", "process")}
    return {
        "step_time_s": measured["step_time_s"],
        "memory": {f"{name}_gib": None if n is None else {"value": gib(n)} for name, n in views.items()},
    }


def forecast(
    content: dict[str, Any], gpu: str, records: list[Path], *, by_trainer: bool = False
) -> dict[str, Any] | None:
    """The measured run forecast with these records, its steps one after another or by the Trainer; None where there is
    no prior to forecast it by (a CPU)."""
    from tunecast.run_validation import forecast_anew

    run = content["run"] | {"trainer_loop": by_trainer}
    asked = {**content, "hardware": {"gpu": gpu}, "max_steps": 1, "run": run}
    try:
        return forecast_anew(asked, records)
    except InputError:
        if records:
            raise
        return None


def priors_of_others(gpu: str) -> dict[str, Any]:
    """The priors as published runs and the records of other cards make them."""
    records = [record for record in shipped_records()[0] if record.runs[0].gpu != gpu]
    rows = [*read_training(PUBLISHED).rows, *rows_of_records(records)]
    return {"memory_overhead_bytes": {}, **as_shipped(priors_of(rows))}


def forecast_elsewhere(contents: Sequence[dict[str, Any]], gpu: str) -> dict[str, Any]:
    """Figures of the step times of measured runs, forecast by priors that have no record of the card."""
    priors, errors, inside = priors_of_others(gpu), [], []
    for content in contents:
        asked = run_from_dict(content["run"])
        run = PublishedRun(
            id=content["name"], source="held out", stack=asked.stack, gpu=gpu, run=asked, counter="",
            architecture=architecture_from_dict(content["architecture"]), tokens_per_s=None, peak_bytes=None,
        )  # fmt: skip
        told, real = predict(run, priors).step.step_time_s, content["measured"]["step_time_s"]["value"]
        errors.append(abs(told.value / real - 1.0))
        inside.append(told.low <= real <= told.high)
    return {"runs": len(errors), "median_abs_error": statistics.median(errors), "worst_abs_error": max(errors),
            "inside_80_interval": statistics.mean(inside)}  # fmt: skip


def check_runs(record: dict[str, Any], runs: dict[str, dict[str, Any]]) -> None:
    """Refuse, before anything is fitted or written, what cannot be compared."""
    gpu, name = record["hardware"]["gpu"], record["hardware"]["name"]
    if gpu is None:
        raise InputError(f"The calibration is of {name}, which is in no catalog; add it to gpus.csv.")
    for run, content in runs.items():
        there = content["measured"]["gpu"] if "measured" in content else gpu
        if there != gpu:
            raise InputError(f"{run} was measured on {there}, the calibration on {gpu}; judge one card at a time.")
    if not any(content["outcome"] == "ok" for run, content in runs.items() if not run.endswith(AGAIN)):
        raise InputError("None of the runs has a step time, so there is nothing to judge; measure more of them.")


def trainer_rows(folder: Path, runs: Mapping[str, dict[str, Any]], record_path: Path) -> list[dict[str, Any]]:
    """Steps of the Trainer beside bare ones, each as forecast from the record."""
    gpu, found = read_record(record_path)["hardware"]["gpu"], []
    for path in sorted((folder / BY_TRAINER).glob("*.json")):
        job = json.loads(path.read_text(encoding="utf-8"))
        bare, driven = (forecast(runs[job["name"]], gpu, [record_path], by_trainer=on) for on in (False, True))
        if bare is None or driven is None:
            continue
        told, real_s = driven["step_time_s"], job["trainer_step_s"]
        found.append({
            "run": job["name"], "bare_s": [job["before_s"], job["after_s"]], "trainer_s": real_s,
            "forecast_bare_s": bare["step_time_s"], "forecast_s": told, "error": told["value"] / real_s - 1.0,
            "inside_interval": told["low"] <= real_s <= told["high"],
        })  # fmt: skip
    return found


def compare(
    record_path: Path,
    runs: dict[str, dict[str, Any]],
    repeats: Mapping[str, list[dict[str, Any]]],
    by_trainer: list[dict[str, Any]],
) -> Judged:
    """Forecast every run and subtract."""
    record = read_record(record_path)
    gpu = record["hardware"]["gpu"]
    rows, prior_rows, others, timed = [], [], [], []
    for name, content in runs.items():
        if name.endswith(AGAIN):
            continue
        run = HeldOut(name, content["model"], content["options"])
        told = forecast(content, gpu, [record_path]) if "run" in content else None
        if content["outcome"] != "ok" or told is None:
            others.append({"run": name, "outcome": content["outcome"], "message": content["message"],
                           "verdict": None if told is None else told["verdict"]})  # fmt: skip
            continue
        real, again = as_answer(content), repeats.get(name, [])
        steady = is_steady([content, *again])
        by_priors = forecast(content, gpu, [])
        if by_priors is not None:
            timed.append(content)
            prior_rows.append(row(run, real, by_priors) | {"steady": steady})
        extra = {"priors_error": prior_rows[-1]["error"] if by_priors is not None else None,
                 "steady": steady, "bound_by": told["bound_by"],
                 "verdict": told["verdict"], "flags": content["measured"]["flags"]}  # fmt: skip
        rows.append(row(run, real, told, [as_answer(one) for one in again]) | extra)
    return Judged(
        record=record, record_name=record_path.name, rows=rows, others=others, by_trainer=by_trainer,
        figures=summary(rows) | steady_figures(rows) | averaged_figures(rows)
        | {"repeated_runs": sum(r["noise"] is not None for r in rows)},
        priors=summary(prior_rows) | steady_figures(prior_rows) if prior_rows else {},
        elsewhere=forecast_elsewhere(timed, gpu) if timed and gpu in load_gpus() else {},
    )  # fmt: skip


def met(figures: dict[str, Any]) -> dict[str, bool]:
    """Each target; one whose figure nobody could measure is not met."""
    found = {name: figures.get(name, 1.0) <= bar for name, bar in TARGETS.items()}
    return {"runs": figures["runs"] >= LEAST_RUNS, **found}
