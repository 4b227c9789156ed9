"""How often forecasts without a calibration held for published runs of sources that nothing was fitted to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from tunecast.model.question import Question
from tunecast.model.target import Target


def unseen_notes(target: Target, question: Question) -> tuple[str, ...]:
    """What share of strangers' runs intervals as this one held; none where a record or the user says the speed.

    The figures are those of the committed page, results/validation/unseen.md, to whose rows nothing is fitted: the
    interval stands as it is, and this says what it is worth, for all methods and for the one that is asked about.
    """
    calibrated = target.record is not None or target.is_mock
    told = calibrated or question.achieved_tflops is not None
    return () if told else (_note(str(question.options.get("method", ""))),)


@cache
def _note(method: str) -> str:
    text = resources.files("tunecast.results").joinpath("validation/unseen.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    slower = sum(row["measured"] < row["low"] for row in rows) / len(rows)
    alike = [row for row in rows if row["method"] == method]
    own = f" ({_inside(alike):.0%} of {len(alike)} by {method})" if alike else ""
    return (
        f"80% intervals of speed without a calibration held {_inside(rows):.0%} of {len(rows)} published runs whose "
        f"sources nothing was fitted to{own}, and {slower:.0%} were slower (results/validation/unseen.md): plan with "
        "the slow end, or calibrate the card"
    )


def _inside(rows: Sequence[Mapping[str, float]]) -> float:
    """Share of the rows that their interval held."""
    return sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows)
