"""The second part of `gpu_evidence.py`: forecasts of the measured runs from the calibration alone, and the page."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import AGAIN, ROOT, HeldOut, row, runs_for, summary

from tunecast.calibrate.flags import flags_of
from tunecast.calibrate.partial import prepare_folder
from tunecast.calibrate.priors_fit import priors_of
from tunecast.calibrate.priors_problem import read_training, rows_of_records
from tunecast.calibrate.priors_records import shipped_records
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.record import read_record, write_text
from tunecast.calibrate.runner import fit_file
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.calibrate.validate import predict
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.priors import load_priors
from tunecast.model.units import gib

SCHEMA = "tunecast.heldout/1"
PUBLISHED = ROOT / "results" / "published" / "published-runs.csv"
LEAST_RUNS = 12
STEADY_FRAC = 0.02
"""A run whose steps scatter by no more (robustly), nor differ more from its repetitions where it was measured again,
says more of a forecast than of its machine."""
RUNS, REPEATED = "runs", "runs-*"
"""Folders of held-out records: the first measurement of each, and later ones of some."""
TARGETS = {
    "median_abs_error": 0.05,
    "worst_abs_error": 0.12,
    "allocated_worst_abs_error": 0.02,
    "process_worst_abs_error": 0.04,
}
"""Largest absolute errors that the project asks of a calibrated card, each over every run."""
NAMES = {
    "median_abs_error": "step time, median",
    "worst_abs_error": "step time, worst",
    "allocated_worst_abs_error": "`allocated`, worst",
    "process_worst_abs_error": "`process`, worst",
    "allocated_median_abs_error": "`allocated`, median",
    "process_median_abs_error": "`process`, median",
    "noise_floor_median": "same run measured twice, median",
    "noise_floor_worst": "same run measured twice, worst",
    "averaged_median_abs_error": "against the mean of all measurements of a run, median",
    "averaged_worst_abs_error": "against the mean of all measurements of a run, worst",
    "steady_median_abs_error": "step time of steady runs, median",
    "steady_worst_abs_error": "step time of steady runs, worst",
}
FLAGS = {
    "throttled": "the card slowed down for heat or a hardware fault",
    "power_capped": "the card ran at its power limit, as a card under load does",
    "power_limit_lowered": "the power limit is below the card's own",
    "shared_gpu": "somebody else computed on the card",
    "shared_cpu": "other programs computed on the host's processors",
    "unstable": "one trial in ten or more scattered or drifted",
    "host_varied": "one whole step in four or more scattered or drifted, as it waits for the host",
    "clock_not_settled": "clock and temperature had not settled before the measurement",
    "clocks_disagree": "CUDA events and the wall clock disagreed",
    "cut_short": "the time budget ended before the plan",
    "mig": "a part of a card",
    "no_nvml": "no NVML, so neither sensors nor process memory",
}


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


def forecast(content: dict[str, Any], gpu: str, records: list[Path]) -> dict[str, Any] | None:
    """The measured run forecast with these records; None where there is no prior to forecast it by (a CPU)."""
    from tunecast.run_validation import forecast_anew

    asked = {**content, "hardware": {"gpu": gpu}, "max_steps": 1}
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
    return {"memory_overhead_bytes": {}, **priors_of(rows)}


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


def compare(record_path: Path, runs: dict[str, dict[str, Any]], repeats: Mapping[str, list[dict[str, Any]]]) -> Judged:
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
        record=record, record_name=record_path.name, rows=rows, others=others,
        figures=summary(rows) | steady_figures(rows) | averaged_figures(rows)
        | {"repeated_runs": sum(r["noise"] is not None for r in rows)},
        priors=summary(prior_rows) | steady_figures(prior_rows) if prior_rows else {},
        elsewhere=forecast_elsewhere(timed, gpu) if timed and gpu in load_gpus() else {},
    )  # fmt: skip


def met(figures: dict[str, Any]) -> dict[str, bool]:
    """Each target; one whose figure nobody could measure is not met."""
    found = {name: figures.get(name, 1.0) <= bar for name, bar in TARGETS.items()}
    return {"runs": figures["runs"] >= LEAST_RUNS, **found}


def percent(value: float | None) -> str:
    """A signed error, or a dash."""
    return "–" if value is None else f"{value:+.1%}"


def targets_table(judged: Judged) -> list[str]:
    """Figures against targets, by the calibration and by priors alone."""
    figures, verdicts = judged.figures, met(judged.figures)
    said = {True: "yes", False: "no"}
    counts = f"{figures['runs']} | {judged.priors.get('runs', 0)} | {LEAST_RUNS} or more"
    lines = [
        "| | by this calibration | by priors alone | target | met |",
        "|---|---|---|---|---|",
        f"| runs compared | {counts} | {said[verdicts['runs']]} |",
    ]
    for name, title in NAMES.items():
        if name in TARGETS or name in figures:
            digits = 2 if name in TARGETS and f"{figures.get(name, 1.0):.1%}" == f"{TARGETS[name]:.1%}" else 1
            shown = [f"{part[name]:.{digits}%}" if name in part else "–" for part in (figures, judged.priors)]
            bar = f"{TARGETS[name]:.0%}" if name in TARGETS else ""
            lines.append(f"| {title} | {shown[0]} | {shown[1]} | {bar} | {said[verdicts[name]] if bar else ''} |")
    inside = [f"{part['inside_80_interval']:.0%}" if part else "–" for part in (figures, judged.priors)]
    return [*lines, f"| step times inside the 80% interval | {inside[0]} | {inside[1]} | | |"]


def runs_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line per run."""
    heads = (
        "run", "options", "measured s", "again s", "forecast s (80%)", "error", "by priors", "bound by",
        "allocated GiB", "error of allocated", "process GiB", "error of process",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in rows:
        told = r["forecast_s"]
        memory = []
        for view in ("allocated", "process"):
            size = r[f"{view}_gib"]
            memory += ["–" if size is None else f"{size:.2f}", percent(r[f"{view}_error"])]
        steady = " (steady)" if r["steady"] else ""
        cells = (
            r["run"] + steady, f"`{r['options']}`", f"{r['measured_s']:.4g}",
            ", ".join(f"{again:.4g}" for again in r["measured_again_s"]),
            f"{told['value']:.4g} ({told['low']:.4g} to {told['high']:.4g})",
            percent(r["error"]), percent(r["priors_error"]), r["bound_by"], *memory,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def others_section(others: list[dict[str, Any]]) -> list[str]:
    """Runs that gave no step time."""
    if not others:
        return []
    lines = ["", "## Runs without a step time", "", "| run | outcome | forecast | said |", "|---|---|---|---|"]
    for other in others:
        told = " ".join(str(other["message"]).split())[:200].replace("|", "/")
        lines.append(f"| {other['run']} | {other['outcome']} | {other['verdict'] or '–'} | {told} |")
    return lines


def flag_lines(judged: Judged) -> list[str]:
    """What was wrong with the machine, of the calibration and of the runs."""
    listed = [(flag, "calibration") for flag in flags_of(judged.record)]
    listed += [(flag, row["run"]) for row in judged.rows for flag in row["flags"]]
    where: dict[str, list[str]] = {}
    for flag, place in listed:
        where.setdefault(flag, []).append(place)
    if not where:
        return ["None: nothing disturbed the calibration or the runs."]
    return [f"- `{flag}`: {FLAGS.get(flag, 'see the record')} ({', '.join(places)})" for flag, places in where.items()]


def steps_line(record: dict[str, Any]) -> str:
    """What the calibration had of whole steps."""
    steps = [trial for trial in record["trials"] if trial["bench"] == "step" and trial["outcome"] == "ok"]
    depths = [sum(group["count"] for group in trial["params"]["architecture"]["groups"]) for trial in steps]
    if not depths:
        return "The calibration has no whole step."
    return f"Its {len(steps)} whole steps have at most {max(depths)} layers, so none of the runs below is among them."


def steady_line(figures: Mapping[str, Any]) -> str:
    """How many runs repeat, and what the others follow."""
    return (
        f"Steady are those whose steps scatter by at most {STEADY_FRAC:.0%}, as do repetitions where there are any: "
        f"{figures['steady_runs']} of {figures['runs']}; {figures['repeated_runs']} were measured again. The others "
        "follow the pace of the host, which varied."
    )


def priors_line(record_name: str, elsewhere: Mapping[str, Any]) -> str:
    """Whether the priors have seen the card, and what they say without."""
    name = record_name.removesuffix(".json")
    steps = load_priors()["records_used"].get(name)
    bounded = sum(len(one.runs) - len(one.waiting) for one in shipped_records()[0] if one.name == name)
    seen = (
        "nothing of this card"
        if steps is None
        else f"{steps} whole steps of the calibration, {bounded} of which the card bounds, none of the runs below,"
    )
    told = f"The priors have {seen} among what they were fitted to."
    if steps is None or not elsewhere:
        return told
    middle, worst, inside = (elsewhere[name] for name in ("median_abs_error", "worst_abs_error", "inside_80_interval"))
    return (
        f"{told} Fitted without any record of this card they are off by {middle:.1%} in the median and {worst:.1%} at "
        f"worst, with {inside:.0%} of the step times inside."
    )


def page_text(judged: Judged) -> str:
    """The whole page."""
    record = judged.record
    hardware, software = record["hardware"], record["software"]
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    versions = ", ".join(f"{name} {software[name]}" for name in packages if software.get(name))
    made = f"{record['protocol']['mode']}, {record['created_at']}; {versions}; driver {hardware['driver'] or 'none'}"
    lines = [
        f"# {hardware['name']}: forecast against measurement",
        "",
        f"Calibration `{judged.record_name}` ({made}).",
        steps_line(record),
        "Runs are real optimizer steps on random weights; each is forecast from the calibration alone.",
        steady_line(judged.figures),
        priors_line(judged.record_name, judged.elsewhere),
        "Made by `scripts/gpu_evidence.py`, which is also how to repeat it.",
        "",
        *targets_table(judged),
        "",
        "## Runs",
        "",
        *runs_table(judged.rows),
        *others_section(judged.others),
        "",
        "## Flags",
        "",
        *flag_lines(judged),
    ]
    return "\n".join(lines) + "\n"


def keep_runs(folder: Path, page: Path) -> None:
    """The held-out records beside the page, where they are not there already."""
    for source in (folder / RUNS, *sorted(folder.glob(REPEATED))):
        target = prepare_folder(page.parent / source.name)
        if target.resolve() != source.resolve():
            for path in source.glob("*.json"):
                shutil.copy(path, target / path.name)


def judged(folder: Path, calibrations: Sequence[Path], *, page: Path, records: Path) -> int:
    """Fit, forecast, write; 0 when every target is met, else 3."""
    if len(calibrations) != 1:
        there = ", ".join(path.name for path in calibrations) or "none"
        raise InputError(
            f"{folder} must hold one calibration record, but holds {there}; finish it with `run --out {folder}`."
        )
    runs = read_runs(folder)
    if not runs:
        raise InputError(
            f"{folder}/runs holds no measured run; type: python scripts/gpu_evidence.py run --out {folder}"
        )
    check_runs(read_record(calibrations[0]), runs)
    for path in (records, page.parent):
        prepare_folder(path)
    record_path = records / calibrations[0].name
    if record_path.resolve() != calibrations[0].resolve():
        shutil.copy(calibrations[0], record_path)
    try:
        fit_file(record_path)
    except ValueError as error:
        raise TunecastError(f"{record_path.name} cannot be fitted ({error}); calibrate again.") from error
    found = compare(record_path, runs, read_repeats(folder, runs))
    keep_runs(folder, page)
    verdicts = met(found.figures)
    result = {
        "card": found.record["hardware"]["name"], "record": record_path.name, "summary": found.figures,
        "priors": found.priors, "priors_without_this_card": found.elsewhere, "met": verdicts, "rows": found.rows,
        "others": found.others,
    }  # fmt: skip
    write_text(page.parent / "gpu.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    write_text(page, page_text(found))
    for line in targets_table(found):
        print(line)
    print(f"page: {page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}")
    return 0 if all(verdicts.values()) else 3
