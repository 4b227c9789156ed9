"""The report as Markdown: the same figures, without pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tunecast.model.units import gib
from tunecast.report import words
from tunecast.report.page import grid_cells, plan_rows
from tunecast.tables import DASH, digits, seconds

if TYPE_CHECKING:
    from tunecast.report.gather import Report


def markdown_page(report: Report) -> str:
    """The whole page."""
    plan = words.plan_title(report)
    parts = [
        f"# {words.title(report)}\n",
        f"**{words.answer(report)}**\n",
        *(f"{sentence}\n" for sentence in words.run_sentences(report)),
        f"Made {report.made_at} by tunecast {report.version}: `{report.command}`. Ranges are 80% intervals.\n",
        *_plans(report),
        "## Every card\n",
        _cards(report),
        f"## Where time and memory go: {plan}\n",
        _phases(report),
        _operations(report),
        _memory(report),
        *_catalog(report),
        f"## What the answer depends on: {plan}\n",
        _tornado(report),
        _grid(report),
        "## Where every number comes from\n",
        f"{plan[0].upper()}{plan[1:]}: {words.origin_counts(report.plan)}.\n",
        _table(("factor", "origin"), ((f"`{name}`", origin) for name, origin in words.origin_rows(report.plan))),
        "Notes:\n",
        "\n".join(f"- {note}" for note in words.all_notes(report)) + "\n",
    ]
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars inside cells are escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |\n" for line in lines)


def _with_span(value: str, span: str) -> str:
    return f"{value} ({span})" if span else value


def _plans(report: Report) -> list[str]:
    plans = plan_rows(report)
    if not plans:
        return []
    rows = (
        (
            p["gpu"],
            p["how"],
            _with_span(p["time"], p["time_span"]),
            _with_span(p["cost"], p["cost_span"]),
            f"{p['offer']} {p['date']}",
        )
        for p in plans
    )
    return ["## Money against time: plans that no other beats in both\n",
            _table(("plan", "train with", "whole run", "cost", "offer"), rows)]  # fmt: skip


def _cards(report: Report) -> str:
    cards = map(words.card_row, report.forecasts)
    rows = (
        (
            c["gpu"], c["verdict_words"], c["memory"], _with_span(c["step"], c["step_span"]), c["speed"],
            _with_span(c["time"], c["time_span"]), _with_span(c["cost"], c["cost_span"]), f"{c['offer']} {c['date']}",
        )
        for c in cards
    )  # fmt: skip
    return _table(("card", "fits", "GiB", "step", "tokens/s", "whole run", "cost", "offer"), rows)


def _phases(report: Report) -> str:
    return _table(("phase", "time", "what, and where its rate came from"), words.phase_lines(report.plan))


def _operations(report: Report) -> str:
    best = report.plan
    step = best.step_time_s.value
    parts = sorted(best.time_parts_s.items(), key=lambda item: -item[1])
    rows = ((name, seconds(part), f"{part / step:.0%}") for name, part in parts if part > 0)
    return f"Bound by {best.bound_by}.\n\n" + _table(("operation", "of one step", "share"), rows)


def _memory(report: Report) -> str:
    view = report.plan.memory
    rows = [(name, f"{gib(n_bytes):.2f}") for name, n_bytes in view.parts_bytes.items() if n_bytes > 0]
    rows.append(("**allocated**", f"{gib(view.allocated_bytes.value):.2f}"))
    for name, value in (("reserved", view.reserved_bytes), ("process", view.process_bytes)):
        if value is not None:
            rows.append((f"**{name}**", f"{gib(value.value):.2f}"))
    usable = DASH if view.usable_bytes is None else f"{gib(view.usable_bytes):.2f}"
    return f"Peak at: {view.peak_moment}.\n\n" + _table(("memory", "GiB"), [*rows, ("usable", usable)])


def _catalog(report: Report) -> list[str]:
    parts = []
    for comparison in report.comparisons:
        rows = [
            (q.name, f"{digits(q.measured)} {q.unit}", digits(q.catalog) if q.catalog else DASH,
             DASH if q.share is None else f"{q.share:.0%}")
            for q in comparison.quantities
        ]  # fmt: skip
        parts += [f"## {comparison.device}: measured against the catalog\n",
                  _table(("quantity", "measured", "catalog", "share"), rows)]  # fmt: skip
    return parts


def _tornado(report: Report) -> str:
    from tunecast.sweep_table import DOES_NOT_FIT, MAY_NOT_FIT, no_fit, shown

    sweep = report.tornado
    rows = (
        (
            bar.name,
            bar.kind,
            f"{bar.low_setting} to {bar.high_setting}",
            shown(sweep, bar.low) + no_fit(bar.low_verdict),
            shown(sweep, bar.high) + no_fit(bar.high_verdict),
        )
        for bar in sweep.bars
        if bar.swing > 0
    )
    told = f"{DOES_NOT_FIT} does not fit there: computed as if it did; {MAY_NOT_FIT} may not fit.\n"
    return _table(("input", "kind", "from, to", f"{sweep.metric.title}, low end", "high end"), rows) + "\n" + told


def _grid(report: Report) -> str:
    grid = grid_cells(report.grid)
    rows = ([str(row["name"]), *(cell["words"] for cell in row["cells"])] for row in grid["rows"])
    return f"{grid['caption']}:\n\n" + _table([grid["corner"], *map(str, grid["columns"])], rows)
