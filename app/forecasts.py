"""Forecasts as a list that shows itself as a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING

from tunecast.model.forecast import Forecast

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = ("GiB", "step", "tokens/s", "whole run", "cost", "$/M tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShownForecast(Forecast):
    """A forecast that shows itself as a table in a notebook; in every other way the forecast that it was made of."""

    def to_frame(self) -> pd.DataFrame:
        """One row; units in the column names, intervals as ``_low`` and ``_high``."""
        return Forecasts([self]).to_frame()

    def _repr_html_(self) -> str:
        """What a notebook shows: the run, a table of one row, and the notes."""
        return Forecasts([self])._repr_html_()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Forecast):
            return NotImplemented
        return all(getattr(self, one.name) == getattr(other, one.name) for one in fields(Forecast))

    __hash__ = None  # type: ignore[assignment]


def shown(forecast: Forecast) -> ShownForecast:
    """The same forecast, able to show itself."""
    return ShownForecast(**{one.name: getattr(forecast, one.name) for one in fields(Forecast)})


class Forecasts(list[Forecast]):
    """One forecast per GPU, in the order asked for; a list in every other way."""

    def to_frame(self) -> pd.DataFrame:
        """One row per forecast; units in the column names, intervals as ``_low`` and ``_high``."""
        from tunecast.frames import frame

        return frame(self)

    def __repr__(self) -> str:
        """What a Python shell shows: a line per forecast."""
        from tunecast.forecast_table import memory, money_of, total, verdict
        from tunecast.tables import DASH, dollars, seconds

        lines = []
        for one in self:
            cost = money_of(one)
            money = dollars(cost.value) if cost else DASH
            card = f"{one.run.num_gpus} x {one.gpu}: {verdict(one)}, {memory(one)} GiB"
            lines.append(f"{card}, step {seconds(one.step_time_s.value)}, whole run {total(one)}, {money}")
        return "\n".join(lines) or "no forecast"

    def _repr_html_(self) -> str:
        """What a notebook shows: the run, a table with intervals, and the notes."""
        from tunecast.forecast_table import notes
        from tunecast.run_line import heading

        if not self:
            return "<p>No forecast.</p>"
        amount_known = any(one.total_time_h for one in self)
        money = ("whole run", "cost") if amount_known else ("$/M tokens",)
        heads = ("GPU", "fits", "GiB", "step", "tokens/s", *money, "offer")
        head = "".join(f'<th style="text-align:{_side(name)}">{name}</th>' for name in heads)
        body = "".join(self._rows(heads))
        told = "".join(f"<li>{escape(note.removeprefix('- '))}</li>" for note in notes(self))
        return (
            f"<p>{escape(heading(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<ul>{told}</ul>"
        )

    def _rows(self, heads: tuple[str, ...]) -> Iterator[str]:
        from tunecast.forecast_table import memory, money_of, offer, span, span_h, span_s, total, verdict
        from tunecast.tables import DASH, digits, dollars, seconds

        for one in self:
            cost = money_of(one)
            whole_run = (total(one), span_h(one.total_time_h) if one.total_time_h else "")
            cells = (
                (f"{one.run.num_gpus} x {one.gpu}", ""),
                (verdict(one), ""),
                (memory(one), ""),
                (seconds(one.step_time_s.value), span_s(one.step_time_s)),
                (digits(one.tokens_per_s.value), span(one.tokens_per_s)),
                *((whole_run,) if "whole run" in heads else ()),
                (dollars(cost.value) if cost else DASH, span(cost) if cost else ""),
                (offer(one), ""),
            )
            yield "<tr>" + "".join(map(_cell, heads, cells)) + "</tr>"


def _side(name: str) -> str:
    return "right" if name in NUMBERS else "left"


def _cell(head: str, words: tuple[str, str]) -> str:
    """A cell with its interval, if it has one, in small print below."""
    value, below = (escape(word) for word in words)
    small = f'<br><small style="opacity:.7">{below}</small>' if below else ""
    return f'<td data-l="{head}" style="text-align:{_side(head)}">{value}{small}</td>'
