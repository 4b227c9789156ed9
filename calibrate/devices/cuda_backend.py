"""`Backend` over torch.cuda: events for time, the allocator's statistics and NVML for memory.

torch is handed in, never imported here, so that the whole file runs in tests against a fake `torch.cuda`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from tunecast.calibrate.devices.protocol import MemoryReading
from tunecast.model.units import MILLISECOND_S

CLOCK_TOLERANCE_FRAC = 0.05
"""Events and wall clock may differ by this share before the trial is marked: issuing the first call and
waiting for the last are in the wall clock only."""

CLOCK_TOLERANCE_S = 200e-6
"""...and by this much at least: a launch and a synchronisation cost tens of microseconds each."""

HOST_BOUND_FRAC = 0.8
"""A sample of which issuing takes this share is timed at the host's pace."""
LEAD_FACTOR = 2.0
"""The device is kept busy for so many times what issuing took: it must not end before the last call is issued."""
MAX_LEAD_S = 0.02
"""...and no longer than this before each sample: what takes longer to issue is the host's pace in any case."""
ASSUMED_CLOCK_HZ = 2e9
"""Of cards whose driver does not tell; a faster card is kept busy for less."""

OOM_WORDS = (
    "out of memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""How libraries below torch say that the device is full (torch itself has a class for it)."""

RETRIES_STATISTIC = "num_alloc_retries"
"""Statistic of torch's allocator: how often it had to flush its cache to serve a request."""


def exception_text(exception: BaseException) -> str:
    """The exception's message on one line, with its type where the message is empty."""
    return " ".join(str(exception).split()) or type(exception).__name__


def holds_context(torch: Any, index: int) -> bool:
    """Whether our process has a CUDA context on the device (some 500 MB); asking does not make one.

    Without torch's private question, memory held by the allocator is the sign.
    """
    if not torch.cuda.is_initialized():
        return False
    has_primary_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_primary_context is not None:
        return bool(has_primary_context(index))
    return bool(torch.cuda.memory_reserved(index) > 0)


class CudaBackend:
    """One CUDA device for the benchmarks and steps of `tunecast.calibrate`."""

    def __init__(
        self,
        torch: Any,
        index: int,
        *,
        process_bytes: Callable[[], int | None],
        torch_device: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`process_bytes` says what our process holds on the device now; `torch_device` and `clock` are for tests."""
        self._torch = torch
        self._index = index
        self._process_bytes = process_bytes
        self._clock = clock
        self.torch_device = torch_device or f"cuda:{index}"
        self.extra: dict[str, Any] = {}
        self.under_load: Callable[[], None] | None = None
        """Called once in a trial, when the warm-up is issued and the device still works on it."""
        self.l2_bytes: int | None = getattr(torch.cuda.get_device_properties(index), "L2_cache_size", None)
        self._retries_before = 0

    def peers(self) -> tuple[int, ...]:
        """Devices that torch sees and that are the same card, this one first."""
        cuda, here = self._torch.cuda, self._index
        name = cuda.get_device_properties(here).name
        others = (index for index in range(cuda.device_count()) if index != here)
        return (here, *(index for index in others if cuda.get_device_properties(index).name == name))

    def ranks(self, world_size: int) -> tuple[str, ...]:
        """This card and as many of its `peers` as it takes: the others may be slower."""
        return tuple(f"cuda:{index}" for index in self.peers()[:world_size])

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._torch.cuda.synchronize(self._index)

    def timed(
        self, fn: Callable[[], object], *, repeats: int, warmup: int, fed: bool = False
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each call: (warm-up, counted). See `Backend.timed`."""
        warmup_s, _ = self._between_events(fn, warmup, meanwhile=self.under_load)
        lead_s = self._lead_s(fn) if fed and repeats else 0.0
        if lead_s:
            self.extra["lead_s"] = lead_s
            return warmup_s, self._behind_a_wait(fn, repeats, lead_s)
        samples_s, wall_s = self._between_events(fn, repeats)
        if samples_s:
            self._check_clocks(sum(samples_s), wall_s)
        return warmup_s, samples_s

    def _between_events(
        self, fn: Callable[[], object], calls: int, *, meanwhile: Callable[[], None] | None = None
    ) -> tuple[tuple[float, ...], float]:
        """Issue `calls` calls back to back with an event between each two: (device seconds of each, wall seconds).

        `meanwhile` runs on the host once they are issued, which moves no event.
        """
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        self.synchronize()
        start_s = self._clock()
        events[0].record()
        for event in events[1:]:
            fn()
            event.record()
        if calls and meanwhile is not None:
            meanwhile()
        self.synchronize()
        wall_s = self._clock() - start_s
        pairs = pairwise(events)
        return tuple(first.elapsed_time(second) * MILLISECOND_S for first, second in pairs), wall_s

    def _lead_s(self, fn: Callable[[], object]) -> float:
        """How long the device has to be busy for a call to be issued meanwhile; 0 where issuing is not what takes long,
        or torch cannot keep it busy."""
        if getattr(self._torch.cuda, "_sleep", None) is None:
            return 0.0
        self.synchronize()
        start_s = self._clock()
        fn()
        issued_s = self._clock() - start_s
        self.synchronize()
        whole_s = self._clock() - start_s
        return min(LEAD_FACTOR * issued_s, MAX_LEAD_S) if issued_s > HOST_BOUND_FRAC * whole_s else 0.0

    def _behind_a_wait(self, fn: Callable[[], object], calls: int, lead_s: float) -> tuple[float, ...]:
        """Device seconds of each call, all of whose kernels are issued while the device still waits: its own pace."""
        clock_hz = 1000.0 * getattr(self._torch.cuda.get_device_properties(self._index), "clock_rate", 0)
        cycles = int(lead_s * (clock_hz or ASSUMED_CLOCK_HZ))
        pairs = []
        self.synchronize()
        for _ in range(calls):
            first, second = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._torch.cuda._sleep(cycles)
            first.record()
            fn()
            second.record()
            pairs.append((first, second))
        self.synchronize()
        return tuple(first.elapsed_time(second) * MILLISECOND_S for first, second in pairs)

    def _check_clocks(self, events_s: float, wall_s: float) -> None:
        """Record how far the events' sum is from the synchronised wall clock, as a share of the wall clock."""
        off_s = wall_s - events_s
        disagree = abs(off_s) > max(CLOCK_TOLERANCE_FRAC * wall_s, CLOCK_TOLERANCE_S)
        self.extra["wall_s"] = wall_s
        self.extra["events_vs_wall_frac"] = off_s / wall_s if wall_s > 0 else 0.0
        self.extra["clocks_disagree"] = bool(self.extra.get("clocks_disagree", False) or disagree)

    def reset_peak_memory(self) -> None:
        """Start new peaks of allocated and reserved memory."""
        self._torch.cuda.reset_peak_memory_stats(self._index)
        self._retries_before = self._retries()

    def _retries(self) -> int:
        return int(self._torch.cuda.memory_stats(self._index).get(RETRIES_STATISTIC, 0))

    def memory(self) -> MemoryReading:
        """Peaks since `reset_peak_memory`.

        process peak = reserved peak + what the process holds beyond the allocator now (context, kernels,
        library workspaces), which does not shrink during a trial. NVML reports only the present.
        """
        cuda = self._torch.cuda
        reserved_peak = int(cuda.max_memory_reserved(self._index))
        process_now = self._process_bytes()
        beyond = None if process_now is None else max(process_now - int(cuda.memory_reserved(self._index)), 0)
        self.extra["alloc_retries"] = self._retries() - self._retries_before
        if beyond is not None:
            self.extra["context_bytes"] = beyond
        return MemoryReading(
            allocated_bytes=int(cuda.max_memory_allocated(self._index)),
            reserved_bytes=reserved_peak,
            process_bytes=None if beyond is None else reserved_peak + beyond,
        )

    def empty_cache(self) -> None:
        """Return cached blocks to the device."""
        self._torch.cuda.empty_cache()

    def is_oom(self, exception: BaseException) -> bool:
        """torch's own class, or a RuntimeError of a library below in which the device says it is full."""
        own = getattr(self._torch, "OutOfMemoryError", None) or self._torch.cuda.OutOfMemoryError
        if isinstance(exception, own):
            return True
        text = exception_text(exception).lower()
        return isinstance(exception, RuntimeError) and any(word in text for word in OOM_WORDS)

    def context_is_dead(self) -> bool:
        """Whether nothing more can be measured in this process, asked by one synchronisation.

        After an illegal access, a hardware fault or a lost card every later call fails; a kernel that was
        merely refused leaves the context usable.
        """
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False
