"""The clock of a running job, driven by a scripted one: what counts as a step and what does not."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from tunecast.calibrate.watch.clock import StepClock, Window, predicted_mean, settled


class ScriptedTime:
    """Seconds that pass when the script says so; every synchronisation is counted."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits = 0

    def __call__(self) -> float:
        return self.now_s

    def wait(self) -> None:
        self.waits += 1


def run_steps(clock: StepClock, time: ScriptedTime, seconds: list[float], *, asides: dict[int, float]) -> None:
    """Steps of these seconds; after step i the job spends `asides[i]` on something else."""
    for index, step_s in enumerate(seconds):
        clock.step_begins()
        time.now_s += step_s
        clock.step_ends(1000, followed_by="save" if index in asides else "")
        time.now_s += asides.get(index, 0.0)
    clock.finish()


def test_warm_up_evaluations_and_saves_are_no_part_of_a_step() -> None:
    time = ScriptedTime()
    clock = StepClock(synchronize=time.wait, now=time)
    run_steps(clock, time, [9.0, 5.0, 2.0, *[1.0] * 9], asides={5: 30.0, 8: 10.0})
    step = clock.step_time_s()
    assert step is not None
    assert step.value == pytest.approx(1.0)
    assert sum(window.steps for window in clock.windows) == 9
    assert clock.aside_s == pytest.approx(40.0)
    assert clock.asides == 2


def test_what_follows_the_last_step_counts() -> None:
    time = ScriptedTime()
    clock = StepClock(synchronize=time.wait, now=time)
    run_steps(clock, time, [1.0] * 9, asides={4: 30.0, 8: 10.0})
    assert (clock.aside_s, clock.asides) == (pytest.approx(40.0), 2)
    assert sum(window.steps for window in clock.windows) == 6


def test_every_timed_step_counts_once_with_its_tokens() -> None:
    time = ScriptedTime()
    clock = StepClock(synchronize=time.wait, now=time)
    durations = [1.0, 1.0, 1.0, *(0.3 + 0.1 * (i % 4) for i in range(40))]
    run_steps(clock, time, durations, asides={})
    assert sum(window.seconds for window in clock.windows) == pytest.approx(sum(durations[3:]))
    assert sum(window.tokens for window in clock.windows) == 40 * 1000


def test_the_device_is_waited_for_at_the_ends_of_windows_only() -> None:
    time = ScriptedTime()
    clock = StepClock(synchronize=time.wait, now=time)
    run_steps(clock, time, [0.01] * 1000, asides={})
    assert len(clock.windows) == pytest.approx(997 * 0.01 / clock.window_s, abs=1)
    assert time.waits <= 2 * len(clock.windows) + 2


def test_too_few_steps_give_no_figure() -> None:
    time = ScriptedTime()
    clock = StepClock(synchronize=time.wait, now=time)
    run_steps(clock, time, [1.0, 1.0], asides={})
    assert clock.step_time_s() is None


def windows_of(rates: list[float]) -> list[Window]:
    return [Window(steps=10, seconds=10 * rate, tokens=0) for rate in rates]


def test_the_interval_of_the_mean_is_students() -> None:
    rates = [1.0, 1.1, 0.9, 1.05, 0.95]
    found = predicted_mean(windows_of(rates), ahead=None)
    assert found is not None
    half = 1.533 * statistics.stdev(rates) / math.sqrt(5)  # 90% quantile of t with 4 degrees of freedom
    assert found.high - found.value == pytest.approx(half)
    assert found.value - found.low == pytest.approx(half)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_four_in_five_predictions_of_the_rest_hold_for_steady_noise(n: int) -> None:
    rng = np.random.default_rng(n)
    inside = 0
    for _ in range(2000):
        seen, rest = 1 + 0.05 * rng.standard_normal(n), 1 + 0.05 * rng.standard_normal(20)
        found = predicted_mean(windows_of(list(seen)), ahead=20)
        assert found is not None
        inside += found.low <= rest.mean() <= found.high
    assert inside / 2000 == pytest.approx(0.8, abs=0.035)  # 3.9 standard deviations of 2,000 draws


def test_first_windows_that_are_much_slower_are_start_up() -> None:
    """As seen on a busy CPU: 3.5, 2.7 and 3.6 s a step, then 0.09 and 0.07; the steps of a job are the later ones."""
    seen = [(2, 7.1), (1, 2.7), (1, 3.6), (13, 1.19), (20, 1.40)]
    windows = [Window(steps=steps, seconds=seconds, tokens=steps) for steps, seconds in seen]
    assert settled(windows) == windows[3:]
    found = predicted_mean(windows, ahead=None)
    assert found is not None
    assert found.value == pytest.approx((1.19 + 1.40) / 33)


@pytest.mark.parametrize("rates", [[1.0], [9.0], [1.4, 1.0, 1.0], [1.0, 1.0, 4.0, 1.0], [1.0, 2.0, 3.0]])
def test_windows_that_scatter_or_slow_down_all_count(rates: list[float]) -> None:
    windows = windows_of(rates)
    assert settled(windows) == windows


def test_what_slows_a_job_for_good_is_no_start_up() -> None:
    """One fast window at the end leaves the others the usual ones."""
    windows = [Window(steps=10, seconds=20.0, tokens=1) for _ in range(5)] + [Window(steps=2, seconds=1.0, tokens=1)]
    assert settled(windows) == windows
