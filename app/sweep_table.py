"""Sweeps as tables and CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.forecast_table import verdict
from tunecast.model.fits import TIGHT_BELOW
from tunecast.sweep_result import SCHEMA, Bar, Sweep
from tunecast.sweeping import METRICS, Point
from tunecast.tables import DASH, digits, dollars, duration, keep_whole, plain_table, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tunecast.model.forecast import Forecast

BAR_COLUMNS = 10
"""Characters of the widest bar of a tornado in a terminal."""
DOES_NOT_FIT = "†"
MAY_NOT_FIT = "~"
MARKS = {"no": "*", "tight": MAY_NOT_FIT}
"""What stands behind a figure of a grid by its verdict; of a tornado, whose stars say another thing, `DOES_NOT_FIT`."""
MARKED = {
    "no": "does not fit this card: computed as if it did",
    "tight": f"may not fit, or hardly (less than {TIGHT_BELOW:.0%} likely)",
}
SLIM = 96
"""Columns below which both ends of an input stand under one another."""


def sweep_report(found: Sweep, width: int) -> list[RenderableType]:
    """What the command prints, into so many columns."""
    from tunecast.run_line import run_line

    metric = found.metric
    narrow = width < SLIM
    by_kind = {"tornado": slim_tornado if narrow else tornado_table, "grid": grid_table, "what-if": what_if_table}
    table = by_kind[found.kind](found)
    at_base = metric.of(found.base)
    said = f"{metric.title} on {found.base.gpu}"
    told = said if found.kind == "grid" or at_base is None else f"{said}: {shown(found, at_base)} as asked"
    return [run_line(found.base), told, table, *starred(found), *(f"- {note}" for note in found.notes)]


def shown(found: Sweep, value: float | None) -> str:
    """A value of the metric with its unit."""
    if value is None:
        return DASH
    by_unit = {"$": dollars, "h": duration, "s": seconds}
    unit = found.metric.unit
    return by_unit[unit](value) if unit in by_unit else f"{digits(value)} {unit}"


def tornado_table(found: Sweep) -> Table:
    """One line per input that moves anything, widest first, with a bar to scale."""
    moving = [bar for bar in found.bars if bar.swing > 0]
    widest = max((bar.swing for bar in moving), default=1.0)
    table = plain_table("input", "from", "to", "low end", "high end", "swing", right=("low end", "high end"))
    for bar in moving:
        table.add_row(
            f"{bar.name}{' *' if bar.kind == 'uncertain' else ''}",
            bar.low_setting,
            bar.high_setting,
            shown(found, bar.low) + no_fit(bar.low_verdict),
            shown(found, bar.high) + no_fit(bar.high_verdict),
            drawn(bar, widest),
        )
    return keep_whole(_explained(table, found), shrinking="to")


def slim_tornado(found: Sweep) -> Table:
    """The same where columns are few: both ends of an input under one another."""
    moving = [bar for bar in found.bars if bar.swing > 0]
    widest = max((bar.swing for bar in moving), default=1.0)
    table = plain_table("input", "from, to", found.metric.title, "swing", right=(found.metric.title,))
    for bar in moving:
        ends = ((bar.low, bar.low_verdict), (bar.high, bar.high_verdict))
        table.add_row(
            f"{bar.name}{' *' if bar.kind == 'uncertain' else ''}",
            f"{bar.low_setting}\n{bar.high_setting}",
            "\n".join(shown(found, value) + no_fit(verdict) for value, verdict in ends),
            drawn(bar, widest),
        )
    return keep_whole(_explained(table, found), shrinking="from, to")


def _explained(table: Table, found: Sweep) -> Table:
    """The table with what its marks mean, and what moves nothing."""
    still = [bar.name for bar in found.bars if bar.swing == 0]
    verdicts = {verdict for bar in found.bars if bar.swing > 0 for verdict in (bar.low_verdict, bar.high_verdict)}
    does_not = "".join(f" {no_fit(verdict)} {words}." for verdict, words in MARKED.items() if verdict in verdicts)
    ends = "* not yours to choose: an 80% interval with all else as it is, or the median offer."
    table.caption = f"{ends}{does_not}{_without(still)}"
    table.caption_justify = "left"
    return table


def no_fit(verdict: str | None) -> str:
    """The mark of a value at which the run does not fit, or may not."""
    return DOES_NOT_FIT if verdict == "no" else MARKS.get(verdict or "", "")


def grid_mark(at: Point) -> str:
    """The same in a grid."""
    return "" if at.forecast is None else MARKS.get(at.forecast.verdict or "", "")


def _without(still: Sequence[str]) -> str:
    return f" Without effect: {', '.join(still)}." if still else ""


def drawn(bar: Bar, widest: float) -> str:
    """The swing as a bar of blocks, at least one."""
    return "█" * max(round(BAR_COLUMNS * bar.swing / widest), 1)


def setting(value: object) -> str:
    """A value of an option as one types it: whole numbers without a point."""
    return f"{value:g}" if isinstance(value, float) and value.is_integer() and abs(value) < 1e6 else str(value)


def grid_table(found: Sweep) -> Table:
    """One input down, the other across, marked where the run does not fit or may not."""
    (down, rows), *rest = found.dimensions
    across, columns = rest[0] if rest else (found.metric.title, ("",))
    headers = [setting(value) if rest else across for value in columns]
    table = plain_table(f"{down} \\ {across}" if rest else down, *headers, right=tuple(headers))
    for i, row in enumerate(rows):
        cells = found.points[i * len(columns) : (i + 1) * len(columns)]
        table.add_row(setting(row), *(f"{shown(found, found.value(at))}{grid_mark(at)}" for at in cells))
    return keep_whole(table)


def starred(found: Sweep) -> list[str]:
    """What the marks of a grid mean, where there are any."""
    verdicts = {at.forecast.verdict for at in found.points if at.forecast is not None}
    told = [f"{MARKS[verdict]} {words}" for verdict, words in MARKED.items() if verdict in verdicts]
    return told if found.kind == "grid" else []


def what_if_table(found: Sweep) -> Table:
    """Memory, step, time and cost of each technique, with what it changes."""
    numbers = ("GiB", "tokens/s", "time", "cost")
    table = plain_table("what if", "fits", *numbers, right=numbers)
    base = found.base
    for at in found.points:
        told = at.forecast
        if told is None:
            table.add_row(str(at.settings["what if"]), *[DASH] * 5)
            continue
        memory, base_memory = (memory_gib(f) for f in (told, base))
        speed = told.tokens_per_s.value
        hours, cost = told.total_time_h, told.cost_usd
        table.add_row(
            str(at.settings["what if"]),
            verdict(told),
            f"{memory:.1f} {change(memory, base_memory):>5}",
            f"{digits(speed)} {change(speed, base.tokens_per_s.value):>5}",
            duration(hours.value) if hours else DASH,
            dollars(cost.value) if cost else DASH,
        )
    return keep_whole(table)


def memory_gib(forecast: Forecast) -> float:
    """Memory of the process, which every forecast has."""
    found = METRICS["memory"].of(forecast)
    assert found is not None
    return found


def change(value: float, base: float) -> str:
    """Relative change, or how many times as much when it is a multiple."""
    ratio = value / base
    return "" if abs(ratio - 1) < 0.005 else f"x{ratio:.1f}" if ratio >= 2 else f"{ratio - 1:+.0%}"


def rows_of(found: Sweep) -> list[dict[str, Any]]:
    """One flat row per combination or end, for CSV and JSON."""
    if found.kind == "tornado":
        return [
            {
                "input": bar.name, "kind": bar.kind, "from": bar.low_setting, "to": bar.high_setting,
                "low_end": bar.low, "high_end": bar.high, "base": bar.base, "swing": bar.swing,
                "low_verdict": bar.low_verdict, "high_verdict": bar.high_verdict,
            }
            for bar in found.bars
        ]  # fmt: skip
    rows = []
    for at in found.points:
        told = at.forecast
        figures = {name: None if told is None else metric.of(told) for name, metric in METRICS.items()}
        verdict = None if told is None else told.verdict
        rows.append({**at.settings, "verdict": verdict, **figures, "why_not": at.why_not})
    return rows


def sweep_to_dict(found: Sweep) -> dict[str, Any]:
    """``tunecast.sweep/1``."""
    from tunecast.model.forecast_json import forecast_to_dict

    return {
        "schema": SCHEMA,
        "kind": found.kind,
        "metric": found.metric_name,
        "unit": found.metric.unit,
        "units": {name: METRICS[name].unit for name in METRICS},
        "dimensions": [{"name": name, "values": list(values)} for name, values in found.dimensions],
        "base": forecast_to_dict(found.base),
        "rows": rows_of(found),
        "notes": list(found.notes),
    }


def write_csv(found: Sweep, path: Path) -> Path:
    """The rows as CSV; raises InputError when the file cannot be written."""
    rows = rows_of(found)
    try:
        with path.open("w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputError(f"The table {path} cannot be written ({error.strerror}); name another file.") from error
    return path
