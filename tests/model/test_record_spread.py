"""Intervals of a calibration allow for runs unlike its steps: by as much as simulated cards say, and no real one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tunecast.calibrate.fitted_records import fitted_records
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.on_device import target_factors
from tunecast.model.record_spread import UNLIKE_LOG_SD
from tunecast.model.target import resolve_targets

RESULTS = Path(__file__).parents[2] / "results"
PAGE = RESULTS / "validation" / "mock" / "diverse.json"
RECORDS = sorted((RESULTS / "records").glob("h100-*.json"))
CARD = "h100-sxm5-80gb"


def test_the_spread_is_that_of_the_page() -> None:
    found = json.loads(PAGE.read_text(encoding="utf-8"))["summary"]["unlike"]
    assert pytest.approx(found["log_sd"], abs=5e-4) == UNLIKE_LOG_SD


def test_eight_of_ten_runs_on_cards_that_had_no_say_are_inside() -> None:
    """Each card's runs by the spread of the other seven; without it too few are."""
    found = json.loads(PAGE.read_text(encoding="utf-8"))["summary"]["unlike"]
    assert 0.75 <= found["coverage_by_others"] <= 0.85
    assert found["coverage_without"] < 0.72


def test_a_record_forecasts_with_it() -> None:
    (target,) = resolve_targets([CARD], fitted_records(RECORDS[:1]))
    assert target.record is not None
    own = factor_set_from_record(target.record)
    assert target_factors(target).step_log_sd == pytest.approx(math.hypot(own.step_log_sd, UNLIKE_LOG_SD))
