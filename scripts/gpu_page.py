"""The page of `gpu_evidence.py judge`: what was forecast, measured and missed, and the files beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence import ROOT
from gpu_judge import (
    LEAST_RUNS,
    REPEATED,
    RUNS,
    STEADY_FRAC,
    TARGETS,
    Judged,
    check_runs,
    compare,
    met,
    read_repeats,
    read_runs,
    trainer_rows,
)

from tunecast.calibrate.flags import flags_of
from tunecast.calibrate.partial import prepare_folder
from tunecast.calibrate.priors_records import shipped_records
from tunecast.calibrate.record import read_record, write_text
from tunecast.calibrate.runner import fit_file
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.model.priors import load_priors

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


def trainer_section(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Jobs of the Trainer; nothing where none ran."""
    if not rows:
        return []
    table = [
        f"| {row['run']} | {row['bare_s'][0]:.4g}, {row['bare_s'][1]:.4g} | {row['forecast_bare_s']['value']:.4g} "
        f"| {row['trainer_s']:.4g} | {row['forecast_s']['value']:.4g} ({row['forecast_s']['low']:.4g} to "
        f"{row['forecast_s']['high']:.4g}) | {row['error']:+.1%} |"
        for row in rows
    ]
    return [
        "",
        "## By the Trainer",
        "",
        "transformers' own Trainer between bare steps of the same model, in one process (`scripts/gpu_trainer.py`).",
        "What its loop adds was set by such jobs (`model/trainer_loop.py`), so what is tested here is the sum.",
        "",
        "| run | bare s | forecast s | by the Trainer s | forecast s (80%) | error |",
        "|---|---|---|---|---|---|",
        *table,
    ]


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


def priors_line(record_name: str, gpu: str, elsewhere: Mapping[str, Any]) -> str:
    """Whether the priors have seen the card, and what they say without."""
    name = record_name.removesuffix(".json")
    records, steps = shipped_records()[0], load_priors()["records_used"].get(name)
    alike = [one.name for one in records if one.runs[0].gpu == gpu and one.name != name]
    bounded = sum(len(one.runs) - len(one.waiting) for one in records if one.name == name)
    seen = (
        "nothing of this card"
        if steps is None
        else f"{steps} whole steps of the calibration, {bounded} of which the card bounds, none of the runs below,"
    )
    joined = ", but" if steps is None else " and"
    beside = f"{joined} the record of another machine with this card ({', '.join(alike)})" if alike else ""
    told = f"The priors have {seen}{beside} among what they were fitted to."
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
        priors_line(judged.record_name, hardware["gpu"], judged.elsewhere),
        "Made by `scripts/gpu_evidence.py`, which is also how to repeat it.",
        "",
        *targets_table(judged),
        "",
        "## Runs",
        "",
        *runs_table(judged.rows),
        *others_section(judged.others),
        *trainer_section(judged.by_trainer),
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
    found = compare(record_path, runs, read_repeats(folder, runs), trainer_rows(folder, runs, record_path))
    keep_runs(folder, page)
    verdicts = met(found.figures)
    result = {
        "card": found.record["hardware"]["name"], "record": record_path.name, "summary": found.figures,
        "priors": found.priors, "priors_without_this_card": found.elsewhere, "met": verdicts, "rows": found.rows,
        "others": found.others, "by_trainer": found.by_trainer,
    }  # fmt: skip
    write_text(page.parent / "gpu.json", json.dumps(result, indent=1, sort_keys=True) + "\n")
    write_text(page, page_text(found))
    for line in targets_table(found):
        print(line)
    print(f"page: {page.relative_to(ROOT) if page.is_relative_to(ROOT) else page}")
    return 0 if all(verdicts.values()) else 3
