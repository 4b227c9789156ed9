"""Watched runs move forecasts: by how much, how sure that leaves them, and that 80% stays 80%."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from tunecast.model.observed import APART_LOG_SD, CHANCE_APART, SURPRISE_LOG_SD, chance_apart, shift

OWN, TOTAL = 0.15, 0.30


def test_by_hand_for_two_runs() -> None:
    shared = TOTAL**2 - OWN**2
    weight = shared / (shared + OWN**2 / 2)
    found = shift([0.2, 0.3], log_sd=TOTAL, own_log_sd=OWN)
    assert found.apart < 0.01, "runs that agree with the forecast and with each other"
    assert found.log_ratio == pytest.approx(weight * 0.25, rel=0.01)
    assert found.log_sd == pytest.approx(math.sqrt(shared * (1 - weight) + OWN**2), rel=0.02)


@pytest.mark.parametrize("ratios", [[0.2], [0.2, 0.3], [-0.5, 0.4, 2.0], [2.1] * 4])
def test_the_chance_of_saying_nothing_is_bayes_rule_over_two_normal_models(ratios: list[float]) -> None:
    """Against scipy's densities."""
    n, own, shared = len(ratios), OWN**2, SURPRISE_LOG_SD**2
    together = multivariate_normal.pdf(ratios, cov=shared * np.ones((n, n)) + own * np.eye(n))
    apart = multivariate_normal.pdf(ratios, cov=(shared + own + APART_LOG_SD**2) * np.eye(n))
    expected = CHANCE_APART * apart / (CHANCE_APART * apart + (1 - CHANCE_APART) * together)
    assert chance_apart(ratios, shared=TOTAL**2 - own, own=own) == pytest.approx(expected, rel=1e-6)


def test_a_run_that_is_far_from_its_forecast_moves_little_until_others_agree() -> None:
    """Fourteen times as long as forecast: a busy machine is likelier than such a card. Twice as long is a slow one."""
    slow = shift([math.log(2.0)], log_sd=TOTAL, own_log_sd=OWN)
    assert slow.log_ratio > 0.9 * (1.0 - (OWN / TOTAL) ** 2) * math.log(2.0)
    one, eight = (shift([math.log(14.0)] * n, log_sd=TOTAL, own_log_sd=OWN) for n in (1, 8))
    assert one.apart > 0.99
    assert abs(one.log_ratio) < 0.1
    assert one.log_sd == pytest.approx(TOTAL, rel=0.2)
    assert eight.apart < 0.01
    assert eight.log_ratio == pytest.approx(math.log(14.0), rel=0.05)


def test_what_is_known_as_well_as_another_run_could_tell_is_not_moved() -> None:
    found = shift([0.5], log_sd=0.05, own_log_sd=0.06)
    assert found.log_ratio == 0.0
    assert found.log_sd == pytest.approx(0.05)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(0.01, 1.0), st.floats(0.005, 0.5))
@example([0.5], 0.015625, 0.0078125)
def test_a_run_makes_less_sure_by_no_more_than_its_doubt_nor_moves_beyond_itself(
    ratios: list[float], total: float, own: float
) -> None:
    """Two intervals that hold 80% of the mixture, whatever its parts: that of the runs that are shared, widened until
    it holds 80% of everything alone, and one that holds 80% of each part. Neither part is wider than the forecast."""
    found = shift(ratios, log_sd=total, own_log_sd=own)
    mean, z80 = abs(sum(ratios)) / len(ratios), norm.ppf(0.9)
    off = found.apart * mean
    each = total + max(abs(found.log_ratio), off) / z80
    held = min(0.8 / (1.0 - found.apart), 1.0) if found.apart < 1.0 else 1.0
    alone = (off + total * norm.ppf((1.0 + held) / 2.0)) / z80
    assert found.log_sd <= min(each, alone) * (1.0 + 1e-6)
    assert abs(found.log_ratio) <= mean + 1e-12


@pytest.mark.parametrize("n", [1, 3])
def test_eighty_per_cent_of_devices_drawn_from_the_model_stay_inside(n: int) -> None:
    """Devices with a shared error, runs with one of their own: the posterior holds the next run as often as it says."""
    rng = np.random.default_rng(n)
    inside, draws = 0, 4000
    shared_sd = math.sqrt(TOTAL**2 - OWN**2)
    for _ in range(draws):
        device = shared_sd * rng.standard_normal()
        seen, then = device + OWN * rng.standard_normal(n), device + OWN * rng.standard_normal()
        found = shift(list(seen), log_sd=TOTAL, own_log_sd=OWN)
        inside += abs(then - found.log_ratio) <= 1.2815515655 * found.log_sd
    assert inside / draws == pytest.approx(0.8, abs=0.025)  # 4 standard deviations of 4,000 draws
