"""How often forecasts without a calibration held for published runs of sources that nothing was fitted to."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from tunecast.model.question import Question
from tunecast.model.target import Target


def unseen_notes(target: Target, question: Question) -> tuple[str, ...]:
    """What share of strangers' runs intervals as this one held; none where a record or the user says the speed.

    The figures are those of the committed page, results/validation/unseen.md, on whose rows the speed itself and its
    width are not fitted: the interval stands as it is, and this says what it is worth.
    """
    calibrated = target.record is not None or target.is_mock
    return () if calibrated or question.achieved_tflops is not None else (_note(),)


@cache
def _note() -> str:
    text = resources.files("tunecast.results").joinpath("validation/unseen.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows)
    slower = sum(row["measured"] < row["low"] for row in rows) / len(rows)
    return (
        f"80% intervals of speed without a calibration held {inside:.0%} of {len(rows)} published runs whose sources "
        f"nothing was fitted to, and {slower:.0%} were slower (results/validation/unseen.md): plan with the slow end, "
        "or calibrate the card"
    )
