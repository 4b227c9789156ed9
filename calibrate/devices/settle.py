"""Warm a device with a steady matrix product until its clocks, its heat and its pace stop moving.

A cold card scores high for the first seconds, then its clock falls with temperature and power.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.devices.backend import Backend

SHORTEST_S = 1e-6
"""Below the resolution of any clock used here; keeps a rate finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRule:
    """When a device counts as settled: every quantity it reports stays within its band for a whole window."""

    size: int = 8192
    """Rows and columns of the matrices: large enough to load every current GPU fully."""
    chunk_s: float = 0.25
    """Work issued between two readings."""
    window_s: float = 4.0
    """Longer than the second over which drivers average power and clocks react."""
    clock_band_frac: float = 0.05
    """Largest swing of the SM clock: an H200 at its power limit read 1470 to 1515 MHz for as long as it worked, at a
    pace that moved by 2.6% (results/validation/gpu/profiles)."""
    temperature_band_c: float = 1.0
    """Largest swing of the temperature, one unit of the sensor."""
    pace_band_frac: float = 0.03
    """Largest swing of the product's own pace: the only sign on cards without sensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one chunk of work showed."""

    at_s: float
    sm_clock_mhz: float | None
    temperature_c: float | None
    pace_per_s: float


def _swing(values: list[float | None]) -> float:
    """Largest minus smallest of the values that could be read; 0 when none could."""
    known = [value for value in values if value is not None]
    return max(known) - min(known) if known else 0.0


def is_settled(readings: list[Reading], rule: SettleRule) -> bool:
    """Whether these readings, all of one window, lie within the bands."""
    clocks = [reading.sm_clock_mhz for reading in readings]
    paces: list[float | None] = [reading.pace_per_s for reading in readings]
    highest_clock = max((clock for clock in clocks if clock is not None), default=0.0)
    return (
        _swing(clocks) <= rule.clock_band_frac * highest_clock
        and _swing([reading.temperature_c for reading in readings]) <= rule.temperature_band_c
        and _swing(paces) <= rule.pace_band_frac * max(reading.pace_per_s for reading in readings)
    )


def matrix_work(torch: Any, backend: Backend, dtype: str, size: int) -> Callable[[], object]:
    """One matrix product of random numbers on the device (zeros would draw less power)."""
    kind = getattr(torch, dtype)
    a, b = (torch.randn(size, size, device=backend.torch_device).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=backend.torch_device, dtype=kind)
    return lambda: torch.mm(a, b, out=out)


def settle(
    work: Callable[[], object],
    backend: Backend,
    read: Callable[[], tuple[float | None, float | None]],
    max_seconds: float,
    *,
    rule: SettleRule,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """Repeat `work` until settled or out of time; `read` gives (SM clock in MHz, temperature in Celsius).

    Readings are taken while the device is busy: after a chunk is issued, before it is waited for.
    """
    start_s = clock()
    per_chunk = _calls_per_chunk(work, backend, rule.chunk_s, clock)
    window: deque[Reading] = deque()
    while clock() - start_s < max_seconds:
        window.append(_one_chunk(work, backend, read, per_chunk, clock))
        while window[-1].at_s - window[0].at_s > rule.window_s:
            full = is_settled(list(window), rule)
            window.popleft()
            if full:
                return True
    return False


def _calls_per_chunk(work: Callable[[], object], backend: Backend, chunk_s: float, clock: Callable[[], float]) -> int:
    """How many calls fill a chunk; the first call, which loads kernels, is not counted."""
    work()
    backend.synchronize()
    start_s = clock()
    work()
    backend.synchronize()
    return max(1, round(chunk_s / max(clock() - start_s, SHORTEST_S)))


def _one_chunk(
    work: Callable[[], object],
    backend: Backend,
    read: Callable[[], tuple[float | None, float | None]],
    calls: int,
    clock: Callable[[], float],
) -> Reading:
    start_s = clock()
    for _ in range(calls):
        work()
    sm_clock_mhz, temperature_c = read()
    backend.synchronize()
    now_s = clock()
    return Reading(
        at_s=now_s,
        sm_clock_mhz=sm_clock_mhz,
        temperature_c=temperature_c,
        pace_per_s=calls / max(now_s - start_s, SHORTEST_S),
    )
