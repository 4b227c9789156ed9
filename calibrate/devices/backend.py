"""What the torch microbenchmarks and the real training steps need from a torch device, and no more.

One set of benchmarks (`tunecast.calibrate.bench`) and of steps (`tunecast.calibrate.steps`) serves every
torch device: they are written against `Backend`. `CudaBackend` is in `cuda_backend.py`, the CPU one in
`cpu.py`. A backend measures; it never decides what to measure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tunecast.calibrate.devices.protocol import MemoryReading


class Backend(Protocol):
    """One torch device: where tensors live, how time passes there, how much memory is held."""

    torch_device: str
    """What ``torch.device`` and ``Module.to`` take: ``cuda:0`` or ``cpu``."""
    l2_bytes: int | None
    """Last-level cache, so that buffers can be rotated past it; None when unknown."""
    extra: dict[str, Any]
    """Facts about the trial now running (``events_vs_wall_frac``...). The device empties it before each
    trial and merges it into `TrialResult.extra` after; benches may add to it."""

    def ranks(self, world_size: int) -> tuple[str, ...]:
        """The devices that so many processes of a collective run on, this one first."""
        ...

    def synchronize(self) -> None:
        """Wait until all work issued to the device is done."""
        ...

    def timed(
        self, fn: Callable[[], object], *, repeats: int, warmup: int, fed: bool = False
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each call of `fn`: (warm-up calls, counted calls).

        On CUDA the counted calls are issued back to back with an event between each two, so that the
        device stays fed and a sample is what the call costs in a stream of such calls; the sum is checked
        against one synchronised wall clock and the disagreement goes into `extra`. On a CPU each call is
        timed by ``time.perf_counter``. `fn` may raise; out of memory passes through untouched.

        With `fed`, a call that takes the host longer to issue than the device to run is issued while the device is
        kept busy with something else, so that a sample is the device's time alone (``lead_s`` in `extra`).
        """
        ...

    def reset_peak_memory(self) -> None:
        """Start a new peak: readings of `memory` afterwards cover only what came after this call."""
        ...

    def memory(self) -> MemoryReading:
        """Peaks since `reset_peak_memory`; `at_rest_bytes` is left to the caller, who knows the moment."""
        ...

    def empty_cache(self) -> None:
        """Give cached blocks back to the device, so that one trial cannot starve the next."""
        ...

    def is_oom(self, exception: BaseException) -> bool:
        """Whether this exception means that the device ran out of memory (an outcome, not a failure)."""
        ...
