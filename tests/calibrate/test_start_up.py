"""Published means that include the start of a training: a part of it in every step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.start_up import START_UP, start_up_share
from tunecast.calibrate.validate import predict
from tunecast.model.priors import load_priors
from tunecast.model.value import Z80

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.mark.parametrize(
    ("notes", "share"),
    [
        ("Alpaca packed to 4096; 100 steps including start-up.", 0.01),
        ("mean of 20 steps, including the warm-up", 0.05),
        ("8 steps includes first step", 0.125),
        ("1,200 steps incl. startup", 1 / 1200),
        ("50 optimizer steps, including its start up", 0.02),
        ("20 training steps including compilation", 0.05),
        ("612.1 s for 60 optimizer steps (first step includes compilation/warm-up). The last column is peak.", 0.0),
        ("612.1 s for 60 optimizer steps (first step includes compilation/warm-up)", 1 / 60),
        ("1 step including start-up", 1.0),
        ("10-20 steps including start-up", 0.0),
        ("100 steps including warm-up of the learning rate", 0.0),
        ("100 steps, including warmup, cosine schedule", 0.0),
        ("mean of the last 10 steps; 100 steps including start-up were run", 0.0),
        ("100 steps after start-up", 0.0),
        ("including start-up", 0.0),
        ("0 steps including start-up", 0.0),
        ("", 0.0),
    ],
)
def test_only_a_stated_number_of_steps_shares_a_start(notes: str, share: float) -> None:
    assert start_up_share(notes) == share


def test_a_step_takes_its_share_of_the_start_and_is_less_sure() -> None:
    priors = load_priors()
    start = priors[START_UP]
    whole = published("FM-030")
    steady, tenth = replace(whole, notes=""), replace(whole, notes="10 steps including start-up")
    plain, longer = (predict(run, priors).step for run in (steady, tenth))
    added = longer.step_time_s.value - plain.step_time_s.value
    assert added == pytest.approx(start["value"] / 10, rel=1e-6)
    assert longer.parts_s["start_up"] == pytest.approx(added, rel=1e-6)
    assert "start_up" not in plain.parts_s
    assert sum(longer.parts_s.values()) == pytest.approx(longer.step_time_s.value, rel=1e-6)
    high, low = (math.log(step.step_time_s.high / step.step_time_s.value) for step in (longer, plain))
    others = Z80 * priors["beliefs"][START_UP]["log_sd"]
    unsure = math.hypot(math.log(start["high"] / start["value"]), others) * added / longer.step_time_s.value
    assert high == pytest.approx(math.hypot(low, unsure), rel=0.25)


def test_the_start_is_estimated_from_rows_that_state_it() -> None:
    """Long steps and short ones of the same means say how long the start was: no assumption any more."""
    start = load_priors()[START_UP]
    assert start["origin"] == "published"
    assert 1.0 < start["low"] < start["value"] < start["high"] < 60.0


def published(row_id: str) -> PublishedRun:
    """One run of the published table."""
    runs, _ = read_runs(row for row in read_table(PUBLISHED) if row["id"] == row_id)
    return runs[0]
