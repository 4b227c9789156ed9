"""The report's charts from its data: what is drawn, not how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunecast.model.units import gib
from tunecast.report import svg
from tunecast.tables import digits, dollars, duration, seconds

if TYPE_CHECKING:
    from tunecast.against_catalog import CatalogComparison
    from tunecast.model.forecast import Forecast
    from tunecast.model.value import Value
    from tunecast.report.gather import Report
    from tunecast.sweep_result import Sweep

MOST_BARS = 14
SMALLEST_PART = 0.002
"""Parts below this share of the whole would not be seen."""


def plan_name(forecast: Forecast) -> str:
    """``2 x h100-sxm5-80gb``."""
    return f"{forecast.run.num_gpus} x {forecast.gpu}"


def money_against_time(report: Report) -> str | None:
    """Every card that fits and has a price, and the front of all plans; None where nothing has a price."""
    front = [] if report.recommendation is None else [picked.forecast for picked in report.recommendation.front]
    others = [f for f in report.forecasts if f.fits and f.cost_usd is not None]
    if not front and not others:
        return None
    marks = named_plans(report)
    dots = [_dot(forecast, front=False) for forecast in others]
    dots += [_dot(forecast, front=True, mark=marks.get(id(forecast), "")) for forecast in front]
    axes = {"x_label": "whole run, hours (log)", "y_label": "cost, USD (log)", "title": "Money against time"}
    return svg.at_both_widths(lambda width, name: svg.scatter(dots, width=width, name=name, **axes), "money")


def named_plans(report: Report) -> dict[int, str]:
    """What plans of the front are, by their forecast's id: cheapest, balance, fastest, or several of these."""
    found = report.recommendation
    names: dict[int, list[str]] = {}
    if found is not None:
        balance = found.balance if len(found.front) > 1 else None
        for word, picked in (("cheapest", found.cheapest), ("balance", balance), ("fastest", found.fastest)):
            if picked is not None:
                names.setdefault(id(picked.forecast), []).append(word)
    return {key: " and ".join(words) for key, words in names.items()}


def _dot(forecast: Forecast, *, front: bool, mark: str = "") -> svg.Dot:
    time, cost = forecast.total_time_h, forecast.cost_usd
    assert time is not None
    assert cost is not None
    return svg.Dot(
        name=plan_name(forecast),
        x=time.value,
        y=cost.value,
        told=f"{duration(time.value)}, {dollars(cost.value)}",
        front=front,
        mark=mark,
        x_range=(time.low, time.high) if front else None,
        y_range=(cost.low, cost.high) if front else None,
    )


def memory_bar(forecast: Forecast, name: str = "memory") -> str:
    """Parts of the allocated peak, what the process holds beyond, and the card."""
    view = forecast.memory
    whole = sum(view.parts_bytes.values())
    parts = [
        svg.Part(name=part.replace("_", " "), value=gib(n_bytes), told=f"{gib(n_bytes):.1f}")
        for part, n_bytes in sorted(view.parts_bytes.items(), key=lambda item: -item[1])
        if n_bytes > SMALLEST_PART * whole
    ]
    if view.process_bytes is not None and view.process_bytes.value > view.allocated_bytes.value:
        beyond = gib(view.process_bytes.value - view.allocated_bytes.value)
        parts.append(svg.Part(name="allocator and context", value=beyond, told=f"{beyond:.1f}"))
    limit = None if view.usable_bytes is None else gib(view.usable_bytes)
    title = f"Memory of one GPU of {plan_name(forecast)} at its peak ({view.peak_moment}), GiB"
    shown = "" if limit is None else f"the card: {limit:.1f}"
    return svg.at_both_widths(
        lambda width, own: svg.stacked(parts, width=width, limit=limit, limit_name=shown, title=title, name=own), name
    )


def phases_bar(forecast: Forecast, name: str = "phases") -> str:
    """Hours of every phase of the whole run."""
    phases = forecast.phases_h
    parts = [svg.Part(name=phase, value=hours, told=duration(hours)) for phase, hours in phases.items() if hours > 0]
    title = "The whole run by phase"
    return svg.at_both_widths(
        lambda width, own: svg.stacked(parts, width=width, limit=None, limit_name="", title=title, name=own), name
    )


def operations_bars(forecast: Forecast, name: str = "operations") -> str:
    """Seconds of a step by kind of operation."""
    step = forecast.step_time_s.value
    parts = sorted(forecast.time_parts_s.items(), key=lambda item: -item[1])
    rows = [
        svg.Row(label=part, low=0.0, high=part_s, told=f"{seconds(part_s)} ({part_s / step:.0%})")
        for part, part_s in parts
        if part_s > SMALLEST_PART * step
    ]
    return _bars(rows, base=None, title=f"One optimizer step of {seconds(step)} by operation", name=name)


def _bars(rows: Sequence[svg.Row], *, base: float | None, title: str, name: str) -> str:
    return svg.at_both_widths(lambda width, own: svg.bars(rows, width=width, base=base, title=title, name=own), name)


def tornado(sweep: Sweep) -> str | None:
    """The widest swings; None where nothing moves anything."""
    from tunecast.sweep_table import no_fit, shown

    moving = [bar for bar in sweep.bars if bar.swing > 0][:MOST_BARS]
    if not moving:
        return None
    rows = []
    for bar in moving:
        low, high = (bar.base if end is None else end for end in (bar.low, bar.high))
        kind = "choice" if bar.kind == "choice" else "unsure"
        over = "no" in (bar.low_verdict, bar.high_verdict)
        told = f"{shown(sweep, low)}{no_fit(bar.low_verdict)} to {shown(sweep, high)}{no_fit(bar.high_verdict)}"
        told += " does not fit" if over else ""
        rows.append(svg.Row(label=bar.name[:32], low=low, high=high, told=told, kind=kind))
    title = f"What moves the {sweep.metric.title} of {sweep.base.gpu}"
    return _bars(rows, base=moving[0].base, title=title, name="tornado")


def catalog_bars(comparison: CatalogComparison, name: str) -> str | None:
    """Measured as a share of the catalog, quantity by quantity."""
    rows = [
        svg.Row(
            label=quantity.name[:34],
            low=0.0,
            high=quantity.share,
            told=f"{quantity.share:.0%}: {digits(quantity.measured)} of {digits(quantity.catalog)} {quantity.unit}",
        )
        for quantity in comparison.quantities
        if quantity.share is not None and quantity.catalog is not None
    ]
    if not rows:
        return None
    return _bars(rows, base=None, title=f"{comparison.device}: measured against its datasheet", name=name)


def time_span(value: Value | None) -> str:
    """An interval of hours, each end in its own unit."""
    if value is None or value.low == value.high:
        return ""
    return f"{duration(value.low)} to {duration(value.high)}"


def span(value: Value | None, unit: str = "") -> str:
    """``low to high`` of an interval."""
    if value is None or value.low == value.high:
        return ""
    return f"{digits(value.low)} to {digits(value.high)}{unit}"
