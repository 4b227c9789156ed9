"""What a notebook gets: a list that shows itself and becomes a table."""

from __future__ import annotations

import copy
import re
from dataclasses import fields, replace
from html.parser import HTMLParser

import tunecast
from tunecast.model.forecast import Forecast

MODEL = "meta-llama/Llama-3.2-1B"


class Cells(HTMLParser):
    """Rows of a table as lists of cell texts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_forecasts_are_a_list_with_a_frame_and_a_table() -> None:
    found = tunecast.estimate(MODEL, gpu=["l40s", "rtx-3090"], method="qlora", tokens="1M")
    assert isinstance(found, list)
    assert [one.gpu for one in found] == ["l40s-48gb", "rtx-3090-24gb"]
    frame = found.to_frame()
    assert list(frame.gpu) == [one.gpu for one in found]
    assert list(frame.step_time_s) == [one.step_time_s.value for one in found]
    shown = Cells()
    shown.feed(found._repr_html_())
    heads, *rows = shown.rows
    assert heads[0] == "GPU"
    assert [row[0] for row in rows] == ["1 x l40s-48gb", "1 x rtx-3090-24gb"]
    assert all(len(row) == len(heads) for row in rows)
    assert "no price" in rows[1][heads.index("offer")] or "$" in rows[1][heads.index("cost")]


def test_without_an_amount_the_money_shown_is_that_of_a_million_tokens() -> None:
    from tunecast.tables import dollars

    (one,) = tunecast.estimate(MODEL, gpu="l40s")
    shown = Cells()
    shown.feed(one._repr_html_())  # type: ignore[attr-defined]
    heads, row = shown.rows
    assert not {"whole run", "cost"} & set(heads)
    assert one.cost_per_million_tokens_usd is not None
    assert row[heads.index("$/M tokens")].startswith(dollars(one.cost_per_million_tokens_usd.value))


def test_a_single_forecast_shows_itself_too_and_is_the_same_forecast() -> None:
    found = tunecast.estimate(MODEL, gpu=["l40s", "rtx-3090"], tokens="1M")
    one = found[0]
    shown = Cells()
    shown.feed(one._repr_html_())  # type: ignore[attr-defined]
    assert [row[0] for row in shown.rows] == ["GPU", "1 x l40s-48gb"]
    assert one.to_frame().equals(found.to_frame()[:1])  # type: ignore[attr-defined]
    plain = Forecast(**{field.name: getattr(one, field.name) for field in fields(Forecast)})
    assert plain == one == plain
    assert copy.deepcopy(one) == one
    assert replace(one, gpu="other") != one
    assert isinstance(one, Forecast)


def test_nothing_in_a_notebook_is_taken_for_markup() -> None:
    found = tunecast.estimate(MODEL, gpu="l40s", tokens="1M")
    found[0] = replace(found[0], model="<b>x</b>")
    assert "<b>x" not in found._repr_html_()
    assert re.search("&lt;b&gt;x", found._repr_html_())
