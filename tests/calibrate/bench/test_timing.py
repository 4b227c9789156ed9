"""Inner loops and rotation, on a clock of our own."""

import pytest

from tunecast.calibrate.bench import timing
from tunecast.calibrate.bench.timing import MAX_COPIES, MIN_SAMPLE_S, Prepared, copies_to_rotate, time_prepared
from tunecast.calibrate.devices.protocol import MemoryReading, TrialSpec
from tunecast.model.units import MIB


class Clock:
    """A host and device where each call takes what it is told."""

    torch_device = "cpu"
    l2_bytes = 32 * MIB

    def __init__(self):
        self.now = 0.0
        self.extra = {}

    def synchronize(self):
        return None

    def memory(self):
        return MemoryReading()

    def timed(self, fn, *, repeats, warmup, fed=False):
        def one():
            start = self.now
            fn()
            return self.now - start

        return tuple(one() for _ in range(warmup)), tuple(one() for _ in range(repeats))

    def working(self, seconds, log=None, name=None):
        def call():
            self.now += seconds
            if log is not None:
                log.append(name)

        return call


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.now)
    return made


SPEC = TrialSpec(bench="gemm", params={}, repeats=3, warmup=2)


@pytest.mark.parametrize("seconds", [1e-6, 3e-5, 1e-3, 0.5])
def test_samples_are_of_one_call_however_many_were_timed(clock, seconds):
    result = time_prepared(SPEC, Prepared(calls=[clock.working(seconds)]), clock)
    assert result.samples_s == pytest.approx([seconds] * 3)
    assert result.warmup_s == pytest.approx([seconds] * 2)
    assert result.extra["inner_loops"] * seconds >= MIN_SAMPLE_S * 0.999


def test_long_calls_are_not_repeated_within_a_sample(clock):
    assert time_prepared(SPEC, Prepared(calls=[clock.working(0.01)]), clock).extra["inner_loops"] == 1


def test_buffers_take_turns_across_samples(clock):
    log = []
    calls = [clock.working(0.01, log, name) for name in "abc"]
    time_prepared(SPEC, Prepared(calls=calls), clock)
    assert "".join(log[-5:]) == "abcab"


@pytest.mark.parametrize(
    ("bytes_per_copy", "copies"), [(1024 * MIB, 1), (64 * MIB, 1), (16 * MIB, 4), (MIB, 64), (1, MAX_COPIES)]
)
def test_rotation_exceeds_the_cache_twice_up_to_a_limit(clock, bytes_per_copy, copies):
    assert copies_to_rotate(bytes_per_copy, clock) == copies


def test_an_unknown_cache_is_assumed_large(clock):
    clock.l2_bytes = None
    assert copies_to_rotate(16 * MIB, clock) == 8
