"""Robust statistics against hand-made samples and against simulation."""

import random

import pytest

from tunecast.calibrate.stats import (
    drift_frac,
    mad,
    median,
    median_interval,
    spread_frac,
    stability,
)


def test_median_and_mad_ignore_one_wild_sample():
    samples = [1.0, 1.1, 0.9, 1.0, 50.0]
    assert median(samples) == 1.0
    assert mad(samples) == pytest.approx(0.1)


def test_median_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        median([])


def test_spread_is_the_standard_deviation_of_normal_samples():
    draw = random.Random(3)
    samples = [draw.gauss(10.0, 0.3) for _ in range(20000)]
    assert spread_frac(samples) == pytest.approx(0.03, rel=0.03)


def test_drift_of_a_line_is_its_rise_over_the_median():
    assert drift_frac([10.0, 11.0, 12.0, 13.0, 14.0]) == pytest.approx(4 / 12)
    assert drift_frac([5.0]) == 0.0


@pytest.mark.parametrize("n", [3, 5, 9, 15])
def test_median_interval_covers_the_true_median_at_least_as_often_as_it_says(n):
    draw = random.Random(7)
    hits = 0
    for _ in range(4000):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(n)], coverage=0.8)
        hits += low <= 0.6931471805599453 <= high
    assert hits / 4000 >= min(0.8, 1 - 2 * 0.5**n) - 0.02


def test_median_interval_narrows_with_many_samples():
    low, high = median_interval([float(i) for i in range(101)])
    assert 35 < low < 50 < high < 65


@pytest.mark.parametrize(
    ("samples", "unstable"),
    [
        ([1.0, 1.001, 0.999, 1.0, 1.002], False),
        ([1.0, 1.3, 0.8, 1.2, 0.7], True),
        ([1.00, 1.02, 1.04, 1.06, 1.08], True),
        ([1.0, 9.0], False),
    ],
)
def test_stability(samples, unstable):
    assert stability(samples).unstable is unstable
