"""Validation behind ``tunecast validate``: read a table, forecast it, compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tunecast.calibrate.run_columns import unread
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import Judged, judge, judge_all, read_entries
from tunecast.calibrate.validate_folds import Honest, Told, honest_priors
from tunecast.calibrate.validate_summary import Stats, memories, speeds, stats_of, validation_to_dict
from tunecast.calibrate.whole_time import flops_alone
from tunecast.catalogs.errors import InputError
from tunecast.model.forecast_json import memory_to_dict
from tunecast.tables import above_bar

EXPLANATION_SCHEMA = "tunecast.validation-explanation/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A table of runs with its forecasts."""

    judged: Sequence[Judged]
    notes: tuple[str, ...]
    left_out_rows: int = 0
    """Runs that the priors were fitted to, and that are forecast by priors fitted anew without their source."""

    @property
    def stats(self) -> dict[str, Stats]:
        """Overall statistics of speed and of memory."""
        return {"speed": stats_of(speeds(self.judged)), "memory": stats_of(memories(self.judged))}

    def as_dict(self) -> dict[str, Any]:
        """``tunecast.validation/1``."""
        return validation_to_dict(self.judged, self.left_out_rows) | {"notes": list(self.notes)}

    def above(self, bar: float) -> list[str]:
        """A sentence for each median error above the bar; scoring nothing is above every bar."""
        medians = {name: stats.median_abs_error for name, stats in self.stats.items()}
        if all(median is None for median in medians.values()):
            return ["no row could be scored, so the bar is not met"]
        return [
            f"the median {name} error is {above_bar(median, bar)}"
            for name, median in medians.items()
            if median is not None and median > bar
        ]


def validate(path: Path, told: Told | None = None) -> Validation:
    """Forecast every row of a table. Runs that the priors were fitted to are forecast by priors refitted without
    their source where the table holds all of them, of which `told` hears, and are in sample where it does not."""
    table = read_table(path)
    entries = read_entries(table)
    honest = honest_priors(entries, told, all_at_once=True)
    return Validation(
        judged=[_labelled(item, honest) for item in judge_all(entries, honest.priors_of)],
        notes=_ignored(unread(list(table[0])), Counter(filter(None, map(flops_alone, table)))),
        left_out_rows=len(honest.fitted) if honest.left_out else 0,
    )


def _labelled(item: Judged, honest: Honest) -> Judged:
    return replace(item, in_sample=item.entry.id in honest.in_sample)


def _ignored(columns: Sequence[str], by_flops: Mapping[str, int]) -> tuple[str, ...]:
    """Columns that say nothing to a forecast, and those that alone state the speed of rows, which it does not take."""
    told = [
        f"{names} (the speed of {rows} row{'' if rows == 1 else 's'} is stated as {names} alone, whose count of FLOPs "
        "differs between sources)"
        for names, rows in by_flops.items()
    ]
    return (f"Columns that are not read: {', '.join((*columns, *told))}.",) if columns or told else ()


def explain(path: Path, row_id: str, told: Told | None = None) -> Judged:
    """One row of the table, forecast as `validate` does."""
    entries = read_entries(read_table(path))
    entry = next((entry for entry in entries if entry.id == row_id), None)
    if entry is None:
        some = ", ".join(entry.id for entry in entries[:3])
        raise InputError(f"{path} has no row with the id {row_id!r}; its ids are {some}, ...")
    honest = honest_priors(entries, told)
    return _labelled(judge(entry, honest.priors_of), honest)


def explained(item: Judged) -> dict[str, Any]:
    """One row as JSON: its result, the run it was read as, and the forecast's parts."""
    run, prediction = item.entry.run, item.prediction
    return {
        "schema": EXPLANATION_SCHEMA,
        **validation_to_dict([item])["rows"][0],
        "run": None if run is None else asdict(run.run),
        "forecast": None
        if prediction is None
        else {
            "gpu": run.gpu if run else None,
            "verdict": prediction.verdict,
            "step_time_s": prediction.step.step_time_s.as_dict(),
            "time_parts_s": prediction.step.parts_s,
            "bound_by": prediction.step.bound_by,
            "log_sd_parts": prediction.step.log_sd_parts,
            "memory": memory_to_dict(prediction.memory),
        },
    }
