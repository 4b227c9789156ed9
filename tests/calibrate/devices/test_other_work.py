"""Other programs beside a measurement, by readings of processors and by a program that really computes."""

from __future__ import annotations

import multiprocessing
import time

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


def compute(until: float) -> None:
    while time.monotonic() < until:
        sum(range(10_000))


def test_own_children_are_no_others_and_a_stranger_is() -> None:
    """The kernel's counters: what this process's child computes is its own; only the readings' own share is asserted,
    since other tests run beside this one."""
    before = read_processors()
    child = multiprocessing.get_context("spawn").Process(target=compute, args=(time.monotonic() + 30.0,))
    child.start()
    while (now := read_processors()).own_s - before.own_s < 1.0:
        time.sleep(0.05)
    child.kill()
    child.join()
    assert now.busy_s > before.busy_s
    assert now.own_s - before.own_s <= (now.clock_s - before.clock_s) * (len(processors()) + 1)


def test_the_cpu_tells_who_computed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    assert set(device.flags()) <= {"shared_cpu"}
    monkeypatch.setattr(device, "_others", watched(threads=2, cpus=2, others=0.8, own=0.2))
    assert device.flags() == ("shared_cpu",)
    device.close()
