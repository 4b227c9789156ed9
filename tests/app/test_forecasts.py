"""What a notebook gets: a list that shows itself and becomes a table."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import tunecast

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


def test_nothing_in_a_notebook_is_taken_for_markup() -> None:
    found = tunecast.estimate(MODEL, gpu="l40s", tokens="1M")
    found[0] = type(found[0])(**{name: getattr(found[0], name) for name in found[0].__slots__} | {"model": "<b>x</b>"})
    assert "<b>x" not in found._repr_html_()
    assert re.search("&lt;b&gt;x", found._repr_html_())
