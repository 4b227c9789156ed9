"""Interruptions: the closed form against hand arithmetic, and against a simulation coded apart from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError
from tunecast.model.interruption_simulation import simulate
from tunecast.model.interruptions import (
    NEVER_H,
    Stretches,
    break_even_rate,
    daly_h,
    expected_h,
    expected_interruptions,
    monthly_share,
    proposed_interval_h,
    rate_per_h,
    with_proposed,
)

DRAWS = 200_000
JOB = Stretches(startup_h=0.2, work_h=10.3, save_h=0.05, tail_h=0.1, restart_h=0.25, interval_h=1.0, final_save_h=0.04)
CASES = {
    "a last segment that is shorter": (JOB, 0.05),
    "failures during saves": (replace(JOB, save_h=0.5, interval_h=0.8), 0.3),
    "failures during restarts": (replace(JOB, restart_h=2.0, startup_h=1.5), 0.2),
    "a long final save": (replace(JOB, final_save_h=2.0, tail_h=1.0), 0.2),
    "no checkpoints": (replace(JOB, interval_h=None), 0.15),
    "an interval that divides the work": (replace(JOB, work_h=9.0, interval_h=3.0), 0.1),
    "rare": (replace(JOB, work_h=50.0, interval_h=5.0), 0.0003),
    "often, short segments": (replace(JOB, interval_h=0.1, save_h=0.01), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_simulation_agrees_with_the_exact_expectation_within_one_percent(name: str) -> None:
    job, rate = CASES[name]
    played = simulate(
        startup_h=job.startup_h,
        work_h=job.work_h,
        save_h=job.save_h,
        final_save_h=job.final_save_h,
        tail_h=job.tail_h,
        restart_h=job.restart_h,
        interval_h=job.interval_h,
        cuts_per_h=rate,
        draws=DRAWS,
        seed=1,
    )
    assert played.mean_h == pytest.approx(expected_h(job, rate), rel=0.01)
    assert played.cuts.mean() == pytest.approx(expected_interruptions(job, rate), rel=0.02, abs=0.002)
    low, middle, high = played.percentiles_h()
    assert job.uncut_h <= low * (1 + 1e-9)
    assert low <= middle <= high


def test_the_share_of_runs_that_are_never_cut_is_exponential() -> None:
    """P(no cut) = e^{-λL} of the whole length; those runs take exactly their own time."""
    played = simulate(
        startup_h=0.5,
        work_h=8.0,
        save_h=0.1,
        tail_h=0.5,
        restart_h=1.0,
        interval_h=2.0,
        cuts_per_h=0.07,
        draws=DRAWS,
        seed=2,
    )
    length_h = 0.5 + 8.0 + 3 * 0.1 + 0.5
    never = played.cuts == 0
    assert never.mean() == pytest.approx(math.exp(-0.07 * length_h), abs=0.005)
    assert played.hours[never] == pytest.approx(length_h)
    again = simulate(
        startup_h=0.5,
        work_h=8.0,
        save_h=0.1,
        tail_h=0.5,
        restart_h=1.0,
        interval_h=2.0,
        cuts_per_h=0.07,
        draws=DRAWS,
        seed=2,
    )
    assert (again.hours == played.hours).all()


def test_one_stretch_by_hand() -> None:
    """No start-up, save or restart: (e^{λW} - 1)/λ; with λW = ln 2 the expectation is 1/λ."""
    job = Stretches(startup_h=0, work_h=10, save_h=0, tail_h=0, restart_h=0, interval_h=None)
    rate = math.log(2) / 10
    assert expected_h(job, rate) == pytest.approx(1 / rate)
    assert expected_interruptions(job, rate) == pytest.approx(1.0)
    # A restart of R multiplies by e^{λR}: with R = W it doubles.
    assert expected_h(replace(job, restart_h=10.0), rate) == pytest.approx(2 / rate)


def test_segments_by_hand() -> None:
    """10.3 h in steps of 1 h: ten segments with a save, and 0.3 h."""
    assert JOB.full_segments == 10
    assert JOB.last_h == pytest.approx(0.3)
    assert JOB.uncut_h == pytest.approx(0.2 + 10.3 + 10 * 0.05 + 0.04 + 0.1)
    assert replace(JOB, work_h=9.0, interval_h=3.0).full_segments == 2
    assert replace(JOB, interval_h=20.0).full_segments == 0


def test_without_interruptions_a_job_takes_its_own_time() -> None:
    assert expected_h(JOB, 0.0) == pytest.approx(JOB.uncut_h)
    assert expected_h(JOB, 1e-9) == pytest.approx(JOB.uncut_h, rel=1e-6)


def test_monthly_shares_and_hourly_rates() -> None:
    """63.2% within a month is one interruption per month."""
    assert rate_per_h(1 - math.exp(-1)) == pytest.approx(1 / 730)
    assert monthly_share(rate_per_h(0.15)) == pytest.approx(0.15)
    assert rate_per_h(0.0) == 0.0


@pytest.mark.parametrize("bad", [-0.1, 1.0, 15.0, float("nan")])
def test_a_monthly_share_is_below_one(bad: float) -> None:
    with pytest.raises(InputError, match=r"--interruption-rate-per-month.*0\.15"):
        rate_per_h(bad)


def test_dalys_interval() -> None:
    """Save 5 min, one failure per 24 h: the square root of 2 x 5 x 1440 is 120 min; his is a little longer, less the
    save. A save of twice the time between failures and more is made as often as they come."""
    assert daly_h(5 / 60, 1 / 24) * 60 == pytest.approx(120 * (1 + math.sqrt(5 / 2880) / 3 + 5 / 2880 / 9) - 5)
    assert daly_h(10.0, 1.0) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    work=st.floats(1.0, 100.0),
    save=st.floats(0.005, 0.2),
    rate=st.floats(0.001, 0.5),
    factor=st.sampled_from([0.3, 3.0]),
)
def test_the_proposed_interval_is_near_the_best(work: float, save: float, rate: float, factor: float) -> None:
    """A third or three times the proposed interval is never better by more than 1%, up to whole segments."""
    job = Stretches(startup_h=0.0, work_h=work, save_h=save, tail_h=0.0, restart_h=0.1, interval_h=None)
    taken = proposed_interval_h(job, rate)
    other = replace(job, interval_h=factor * (taken or work))
    assert expected_h(with_proposed(job, rate), rate) <= expected_h(other, rate) * 1.01


def test_more_interruptions_take_longer_and_checkpoints_pay_off() -> None:
    rates = [0.0, 0.01, 0.1, 0.5]
    hours = [expected_h(JOB, rate) for rate in rates]
    assert hours == sorted(hours)
    assert expected_h(replace(JOB, interval_h=None), 0.5) > 5 * expected_h(JOB, 0.5)


@pytest.mark.parametrize("propose", [True, False])
def test_at_the_break_even_rate_both_cost_the_same(propose: bool) -> None:
    on_demand_usd = 2.0 * JOB.uncut_h
    rate = break_even_rate(JOB, 1.0, on_demand_usd, propose=propose)
    assert rate is not None
    job = with_proposed(JOB, rate) if propose else JOB
    assert expected_h(job, rate) * 1.0 == pytest.approx(on_demand_usd, rel=1e-3)
    assert break_even_rate(JOB, 3.0, on_demand_usd, propose=propose) is None


def test_a_job_that_never_ends_is_capped_not_an_overflow() -> None:
    endless = expected_h(replace(JOB, work_h=1e6, interval_h=None), 1.0)
    assert NEVER_H <= endless < math.inf
