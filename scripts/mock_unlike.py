"""What forecasts by a record need beside its own spread, for runs unlike its steps: for `mock_diverse.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunecast.model.record_spread import UNLIKE_LOG_SD
from tunecast.model.value import INTERVAL_LEVEL, Z80

Row = Mapping[str, Any]


def own_log_sd(row: Row) -> float:
    """Standard deviation of the log of a forecast by its interval, without what runs unlike a record's steps add."""
    side = row["high_s"] if row["simulated_s"] > row["predicted_s"] else row["low_s"]
    whole = math.log(side / row["predicted_s"]) / Z80
    return math.sqrt(max(whole**2 - UNLIKE_LOG_SD**2, 0.0))


def unlike_log_sd(rows: Sequence[Row]) -> float:
    """The least that 80% intervals lack to hold 80% of these rows."""
    missed = [math.log(row["simulated_s"] / row["predicted_s"]) / Z80 for row in rows]
    lacking = sorted(
        math.sqrt(max(error**2 - own_log_sd(row) ** 2, 0.0)) for error, row in zip(missed, rows, strict=True)
    )
    return lacking[math.ceil(INTERVAL_LEVEL * len(lacking)) - 1]


def held(rows: Sequence[Row], unlike: float) -> int:
    """Rows inside intervals that allow for so much beside their own."""
    errors = (abs(math.log(row["simulated_s"] / row["predicted_s"])) for row in rows)
    return sum(e <= Z80 * math.hypot(own_log_sd(row), unlike) for e, row in zip(errors, rows, strict=True))


def of_unlike(cards: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """What runs unlike a record's steps need, by all cards and by the others of each, and how many of each card's runs
    are inside by what the others need."""
    rows = [row for own in cards.values() for row in own]
    others = {
        card: unlike_log_sd([row for other, own in cards.items() if other != card for row in own]) for card in cards
    }
    inside = sum(held(own, others[card]) for card, own in cards.items())
    return {
        "log_sd": round(unlike_log_sd(rows), 4),
        "log_sd_by_others": {card: round(value, 4) for card, value in others.items()},
        "coverage_by_others": inside / len(rows),
        "coverage_without": held(rows, 0.0) / len(rows),
    }


def told_of_unlike(found: Mapping[str, Any]) -> str:
    """The same in words."""
    least, most = (f"{edge(found['log_sd_by_others'].values()):.3f}" for edge in (min, max))
    return (
        f"These runs are unlike the steps of a calibration, which left {found['coverage_without']:.0%} of them inside. "
        f"Intervals allow for that (`UNLIKE_LOG_SD` of `model/record_spread.py`): with a standard deviation of "
        f"{found['log_sd']:.3f} in the log of the step time beside all else 80% of them are inside. By the other seven "
        f"cards it is {least} to {most}, and {found['coverage_by_others']:.0%} are inside by these."
    )
