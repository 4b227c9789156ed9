"""Whether other programs computed on the processors that a measurement ran on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

SHARED_CPU = "shared_cpu"
"""The flag of a record that was measured beside them."""
TOLERATED_CPUS = 0.25
"""Processors that others may keep busy beside those that a measurement leaves free: a desktop's background work."""
SHORTEST_S = 2.0
"""Of a shorter time the kernel's clock ticks tell nothing."""


class Reading(NamedTuple):
    """Seconds since boot or start, over all processors that this process may run on."""

    clock_s: float
    busy_s: float
    """By anybody, and what a hypervisor gave to others."""
    own_s: float
    """By this process and its children, past and present."""


def read_processors() -> Reading:
    """What the kernel has counted until now."""
    import psutil

    allowed = processors()
    times = [t for index, t in enumerate(psutil.cpu_times(percpu=True)) if index in allowed]
    idle = [t.idle + getattr(t, "iowait", 0.0) for t in times]
    whole = [sum(t) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0) for t in times]  # guests are in user
    own = psutil.Process().cpu_times()
    spent = own.user + own.system + getattr(own, "children_user", 0.0) + getattr(own, "children_system", 0.0)
    for child in psutil.Process().children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:2])
        except psutil.Error:  # it ended
            continue
    return Reading(clock_s=time.monotonic(), busy_s=sum(whole) - sum(idle), own_s=spent)


def processors() -> set[int]:
    """Processors that this process may run on, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class OtherWork:
    """Watches others from its making on; without psutil it sees nothing."""

    def __init__(self, *, threads: int, cpus: int | None = None, read: Callable[[], Reading] = read_processors) -> None:
        """`threads` are those that the measurement computes with; `cpus` and `read` are for tests."""
        self._free = max((cpus or len(processors())) - threads, 0)
        self._read = read
        self._first = self._now()

    def _now(self) -> Reading | None:
        """A reading; None where there is none to be had, which stops no measurement."""
        try:
            return self._read()
        except Exception:  # psutil's errors are no OSError, and counters of a container may be forbidden
            return None

    def busy_cpus(self) -> float | None:
        """Processors that others kept busy on average; None where that is not known."""
        now = self._now()
        if self._first is None or now is None:
            return None
        clock_s, busy_s, own_s = (later - before for later, before in zip(now, self._first, strict=True))
        return max(busy_s - own_s, 0.0) / clock_s if clock_s >= SHORTEST_S else None

    def flags(self) -> tuple[str, ...]:
        """``shared_cpu`` where others kept more busy than the measurement left free."""
        busy = self.busy_cpus()
        return (SHARED_CPU,) if busy is not None and busy > self._free + TOLERATED_CPUS else ()
