"""How a microbenchmark becomes samples: buffers rotated past the cache, calls repeated until a clock can see them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec
from tunecast.model.units import MIB, MILLISECOND_S

MIN_SAMPLE_S = 2 * MILLISECOND_S
"""A sample lasts at least this long: a thousand times the resolution of CUDA events (about 0.5 us, CUDA runtime
documentation, cudaEventElapsedTime) and far above the cost of reading a CPU clock."""
MAX_INNER_LOOPS = 10_000
"""Calls in one sample at most: 2 ms of calls of 0.2 us, less than any operator costs to issue."""
ROTATION_FACTOR = 2
"""Buffers in rotation hold this many times the last-level cache, so that none is still cached when its turn comes."""
ASSUMED_CACHE_BYTES = 64 * MIB
"""Last-level cache to rotate past when the device does not tell; the largest consumer card has 72 MB (RTX 4090)."""
MAX_COPIES = 64
"""Copies of the buffers of small operations; beyond, the set-up would cost more than the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A benchmark ready to run: equivalent calls, each on its own buffers, used in turn."""

    calls: Sequence[Callable[[], object]]
    extra: dict[str, Any] = field(default_factory=dict)


def copies_to_rotate(bytes_per_copy: int, backend: Backend) -> int:
    """How many copies of the buffers exceed the last-level cache `ROTATION_FACTOR` times."""
    cache_bytes = backend.l2_bytes or ASSUMED_CACHE_BYTES
    return max(1, min(MAX_COPIES, math.ceil(ROTATION_FACTOR * cache_bytes / max(bytes_per_copy, 1))))


def loop_over(calls: Sequence[Callable[[], object]], inner_loops: int) -> Callable[[], None]:
    """One sample: `inner_loops` calls, continuing round the rotation where the last sample stopped."""
    position = 0

    def sample() -> None:
        nonlocal position
        for _ in range(inner_loops):
            calls[position % len(calls)]()
            position += 1

    return sample


def wall_seconds(fn: Callable[[], object], backend: Backend) -> float:
    """Seconds of one call between two synchronisations, on the host's clock."""
    backend.synchronize()
    start_s = time.perf_counter()
    fn()
    backend.synchronize()
    return time.perf_counter() - start_s


def inner_loops_for(calls: Sequence[Callable[[], object]], backend: Backend, least_s: float = MIN_SAMPLE_S) -> int:
    """How many calls make a sample of `least_s`, from two looks: one call, then that many."""
    wall_seconds(calls[0], backend)
    loops = _loops(wall_seconds(calls[-1], backend), 1, least_s)
    return loops if loops == 1 else _loops(wall_seconds(loop_over(calls, loops), backend), loops, least_s)


def _loops(seconds: float, loops: int, least_s: float) -> int:
    per_call_s = max(seconds / loops, least_s / MAX_INNER_LOOPS)
    return max(1, math.ceil(least_s / per_call_s))


def time_prepared(spec: TrialSpec, prepared: Prepared, backend: Backend) -> TrialResult:
    """Seconds of one call in every sample; the inner loops are divided out and recorded."""
    loops = inner_loops_for(prepared.calls, backend)
    sample = loop_over(prepared.calls, loops)
    warmup, samples = backend.timed(sample, repeats=spec.repeats, warmup=spec.warmup, fed=True)
    return per_call(prepared, loops, warmup, samples, backend)


def per_call(
    prepared: Prepared, loops: int, warmup: Sequence[float], samples: Sequence[float], backend: Backend
) -> TrialResult:
    """The trial whose samples of so many calls these are."""
    return TrialResult(
        outcome="ok",
        samples_s=tuple(sample / loops for sample in samples),
        warmup_s=tuple(sample / loops for sample in warmup),
        memory=backend.memory(),
        extra={"inner_loops": loops, "buffers": len(prepared.calls), **prepared.extra},
    )
