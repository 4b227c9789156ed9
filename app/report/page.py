"""The report as one HTML page: self-contained, readable without script, light and dark, printable."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import TunecastError
from tunecast.model.fits import chance_said
from tunecast.report import charts, words
from tunecast.report.write import MISSING
from tunecast.tables import DASH, dollars, duration

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.recommendation import Picked
    from tunecast.report.gather import Report
    from tunecast.sweep_result import Sweep

HEADS = (
    ("card", False), ("fits", False), ("GiB", True), ("step", True), ("tokens/s", True), ("whole run", True),
    ("cost", True), ("offer", False),
)  # fmt: skip
MOST_DETAILS = 12
"""Cards with charts of their own: the best ones; the others are in the table."""
COLD, HOT = (219, 234, 247), (244, 180, 132)
"""Cell colours from cheap to dear, light enough for dark text."""


def html_page(report: Report) -> str:
    """The whole page; raises TunecastError that names the extra when jinja2 is missing."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError as error:
        raise TunecastError(MISSING) from error
    source = (files("tunecast.report") / "page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(**page_data(report, Markup))


def page_data(report: Report, markup: Any) -> dict[str, Any]:
    """What the template lays out. `markup` marks our own SVG as safe."""
    details = report.forecasts[:MOST_DETAILS]
    drawn = {forecast.gpu for forecast in details}
    cards = [words.card_row(forecast) for forecast in report.forecasts]
    for card, forecast in zip(cards, report.forecasts, strict=True):
        card["anchor"] = card["anchor"] if forecast.gpu in drawn else "h-where"
    plan = report.recommended
    recommended = [] if plan is None else [detail(plan, markup, recommended=True)]
    scatter = charts.money_against_time(report)
    tornado = charts.tornado(report.tornado)
    return {
        "title": words.title(report),
        "answer": words.answer(report),
        "run": [sentence.replace("`", "") for sentence in words.run_sentences(report)],
        "made_at": report.made_at,
        "version": report.version,
        "command": report.command,
        "scatter": None if scatter is None else markup(scatter),
        "plans": plan_rows(report),
        "balance": balance(report),
        "tokens": f"{words.tokens_of(report) or 0:.0f}",
        "heads": HEADS,
        "cards": cards,
        "details": [*recommended, *(detail(forecast, markup) for forecast in details)],
        "comparisons": comparisons(report, markup),
        "tornado": None if tornado is None else markup(tornado),
        "grid": grid_cells(report.grid),
        "plan": words.plan_title(report),
        "origin_counts": words.origin_counts(report.plan),
        "origins": words.origin_rows(report.plan),
        "notes": words.all_notes(report),
    }


def plan_rows(report: Report) -> list[dict[str, str]]:
    """Plans of the front."""
    return [] if report.recommendation is None else [plan_row(picked) for picked in report.recommendation.front]


def plan_row(picked: Picked) -> dict[str, str]:
    """One plan in words, with the star of a card that no run of its maker speaks for."""
    from tunecast.recommend_table import STAR, unproven

    forecast = picked.forecast
    time, cost = forecast.total_time_h, forecast.cost_usd
    return {
        "gpu": charts.plan_name(forecast) + (STAR if unproven(picked) else ""),
        "how": words.layout(forecast),
        "time": DASH if time is None else duration(time.value),
        "time_span": charts.time_span(time),
        "cost": DASH if cost is None else dollars(cost.value),
        "cost_span": "" if cost is None else f"{dollars(cost.low)} to {dollars(cost.high)}",
        "offer": words.offer_words(forecast),
        "date": words.offer_date(forecast),
    }


def balance(report: Report) -> str | None:
    """Name of the balanced plan."""
    found = report.recommendation
    return None if found is None or found.balance is None else charts.plan_name(found.balance.forecast)


def detail(forecast: Forecast, markup: Any, *, recommended: bool = False) -> dict[str, Any]:
    """Charts and figures of one card as asked, or of the recommended plan."""
    row, key = words.card_row(forecast), forecast.gpu.replace(":", "-").replace("#", "-")
    name = f"{row['gpu']}, {words.layout(forecast)}"
    if recommended:
        row["anchor"], key = "card-recommended", "recommended"
    return {
        **row,
        "heading": f"Recommended: {name}" if recommended else f"As asked: {name}",
        "option": f"recommended: {row['gpu']}" if recommended else row["gpu"],
        "bound_by": forecast.bound_by,
        "moment": forecast.memory.peak_moment,
        "probability": DASH if forecast.fit_probability is None else chance_said(forecast.fit_probability),
        "phases": words.phase_lines(forecast),
        "memory_chart": markup(charts.memory_bar(forecast, f"m-{key}")),
        "phases_chart": markup(charts.phases_bar(forecast, f"p-{key}")),
        "operations_chart": markup(charts.operations_bars(forecast, f"o-{key}")),
    }


def comparisons(report: Report, markup: Any) -> list[dict[str, Any]]:
    """A chart per calibrated device that has a datasheet."""
    found = []
    for index, comparison in enumerate(report.comparisons):
        chart = charts.catalog_bars(comparison, f"c-{index}")
        if chart is not None:
            flags = ", ".join(comparison.flags)
            found.append({"svg": markup(chart), "record": comparison.record, "flags": flags})
    return found


def grid_cells(grid: Sweep) -> dict[str, Any]:
    """The heat map as a table: figures first, colour beside."""
    from tunecast.sweep_table import grid_mark, shown

    (down, rows), (across, columns) = grid.dimensions
    values = [grid.value(at) for at in grid.points]
    known = [math.log(value) for value in values if value]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    width, out = len(columns), []
    for i, name in enumerate(rows):
        cells = []
        for at, value in zip(grid.points[i * width :][:width], values[i * width :][:width], strict=True):
            heat = 0.0 if not value or high == low else (math.log(value) - low) / (high - low)
            cells.append({"words": shown(grid, value) + grid_mark(at), "colour": colour(heat)})
        out.append({"name": name, "cells": cells})
    plan = charts.plan_name(grid.base)
    caption = f"{grid.metric.title} on {plan} by {down} (down) and {across} (across); * does not fit, ~ may not"
    return {"caption": caption, "corner": f"{down} \\ {across}", "columns": columns, "rows": out}


def colour(heat: float) -> str:
    """A colour between cheap (0) and dear (1)."""
    mixed = (round(cold + heat * (hot - cold)) for cold, hot in zip(COLD, HOT, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
