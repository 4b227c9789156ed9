"""Other programs beside a measurement, by readings of processors and by a program that really computes."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tunecast.calibrate.devices.cpu import CpuDevice
from tunecast.calibrate.devices.other_work import OtherWork, Reading, processors, read_processors


def watched(*, threads: int, cpus: int, others: float, own: float, seconds: float = 10.0) -> OtherWork:
    """One whose second reading comes `seconds` later, `others` and `own` processors busy between."""
    readings = iter(
        [Reading(5.0, 700.0, 30.0), Reading(5.0 + seconds, 700.0 + (others + own) * seconds, 30.0 + own * seconds)]
    )
    return OtherWork(threads=threads, cpus=cpus, read=lambda: next(readings))


CASES = [
    (watched(threads=2, cpus=2, others=0.05, own=1.9), False),
    (watched(threads=2, cpus=2, others=0.8, own=1.2), True),
    (watched(threads=2, cpus=16, others=8.0, own=2.0), False),
    (watched(threads=2, cpus=16, others=15.0, own=1.0), True),
    (watched(threads=8, cpus=4, others=0.5, own=3.5), True),
    (watched(threads=2, cpus=2, others=1.0, own=1.0, seconds=0.5), False),
]


@pytest.mark.parametrize(("watch", "is_shared"), CASES)
def test_others_matter_where_they_take_what_is_measured(watch: OtherWork, is_shared: bool) -> None:
    assert watch.flags() == (("shared_cpu",) if is_shared else ())


def test_without_what_counts_nothing_is_said() -> None:
    def fails() -> Reading:
        raise ImportError("psutil")

    assert OtherWork(threads=1, read=fails).flags() == ()


def test_a_reading_that_fails_at_the_end_says_nothing_and_ends_nothing() -> None:
    readings = iter([Reading(5.0, 700.0, 30.0)])

    def fails_later() -> Reading:
        return next(readings)  # StopIteration, as unforeseen as psutil's own errors

    assert OtherWork(threads=1, read=fails_later).flags() == ()


COMPUTES = "import time\nwhile time.process_time() < 30.0:\n    sum(range(10_000))"


def test_own_children_are_no_others_and_a_stranger_is() -> None:
    """The kernel's counters: what this process's child computes is its own, and what a process of another parent
    computes is somebody's. Other tests run beside this one, so that no share of others is asserted."""
    before = read_processors()
    with subprocess.Popen([sys.executable, "-c", COMPUTES]) as child:
        theirs = psutil.Process(child.pid)
        while sum(theirs.cpu_times()[:2]) < 1.0:
            time.sleep(0.05)
        now = read_processors()
        child.kill()
    assert now.own_s - before.own_s >= 1.0
    assert now.own_s - before.own_s <= (now.clock_s - before.clock_s) * (len(processors()) + 1)
    assert now.busy_s - before.busy_s > 0.5
    orphaning = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {COMPUTES!r}]).pid)"
    with subprocess.Popen([sys.executable, "-c", orphaning], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        stranger = psutil.Process(int(parent.stdout.readline()))
    try:
        before, spent = read_processors(), sum(stranger.cpu_times()[:2])
        while sum(stranger.cpu_times()[:2]) - spent < 1.0:
            time.sleep(0.05)
        now = read_processors()
    finally:
        stranger.kill()
    assert now.own_s - before.own_s < 0.5
    assert now.busy_s - before.busy_s > 0.5


def test_the_cpu_tells_who_computed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    assert set(device.flags()) <= {"shared_cpu"}
    monkeypatch.setattr(device, "_others", watched(threads=2, cpus=2, others=0.8, own=0.2))
    assert device.flags() == ("shared_cpu",)
    device.close()
