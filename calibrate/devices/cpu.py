"""This machine's processor as a device: real kernels, real steps, no simulation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunecast.calibrate.bench import run_bench
from tunecast.calibrate.bench.collectives import close_groups
from tunecast.calibrate.devices import cpu_memory
from tunecast.calibrate.devices.other_work import OtherWork
from tunecast.calibrate.devices.protocol import Hardware, MemoryReading, Sensors, TrialResult, TrialSpec
from tunecast.calibrate.devices.settle import SettleRule, matrix_work, settle
from tunecast.calibrate.environment import cpu_model, host_facts, in_container, software_versions
from tunecast.catalogs.errors import DeviceError
from tunecast.model.units import KIB, MIB

OOM_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory")
"""How torch's CPU allocator, the C++ library and the kernel say that there is no memory."""
FAST_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Processor flags of instructions that multiply bf16; without them torch emulates and fp32 is faster."""
PROBE_SIZE, EMULATED_TIMES = 192, 2.5
"""Width of the products that tell, and how many times the fp32 one the bf16 one takes from which it is emulated: with
instructions of its own it takes no longer, with AVX-512 alone 4.6 to 5.7 times, without 80 times (measured)."""
UNSUPPORTED = ("sync", "transfer")
"""Benches that mean nothing where host and device are one."""
CACHE_ROOT = Path("/sys/devices/system/cpu/cpu0/cache")
CPU_SETTLE = SettleRule(size=1024, chunk_s=0.05, window_s=0.3, clock_band_frac=0.05, pace_band_frac=0.10)
"""A CPU reaches its clock within milliseconds; short windows show whether someone else is using it."""


def last_level_cache_bytes(root: Path = CACHE_ROOT) -> int | None:
    """Size of the largest cache of the first core, None where the kernel does not tell."""
    units = {"K": KIB, "M": MIB}
    sizes = [text.read_text().strip() for text in root.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)


def has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether the processor multiplies bf16 in hardware; None where it does not tell its features."""
    if not cpuinfo.is_file():
        return None
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    return None if found is None else any(flag in found.group(1).split() for flag in FAST_BF16_FLAGS)


def emulates_bf16(torch: Any, backend: CpuBackend) -> bool:
    """Whether a product in bf16 takes several times one in fp32: without instructions for it oneDNN converts, and
    without AVX-512 PyTorch multiplies number by number. By one thread, which other programs slow alike in both."""

    def seconds(dtype: Any) -> float:
        square = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
        return min(backend.timed(lambda: torch.mm(square, square), repeats=5, warmup=1)[1])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return seconds(torch.bfloat16) > EMULATED_TIMES * seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


class CpuBackend:
    """The processor for the benchmarks and steps of `tunecast.calibrate`."""

    torch_device = "cpu"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is for tests."""
        self._clock = clock
        self.extra: dict[str, Any] = {}
        self.l2_bytes = last_level_cache_bytes()
        self._peak_is_ours = False

    def ranks(self, world_size: int) -> tuple[str, ...]:
        """This processor, shared."""
        return (self.torch_device,) * world_size

    def synchronize(self) -> None:
        """Nothing to wait for: operators return when they are done."""

    def timed(
        self, fn: Callable[[], object], *, repeats: int, warmup: int, fed: bool = False
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of each call: (warm-up, counted); nothing feeds a CPU but itself."""
        return self._seconds(fn, warmup), self._seconds(fn, repeats)

    def _seconds(self, fn: Callable[[], object], calls: int) -> tuple[float, ...]:
        seconds = []
        for _ in range(calls):
            start_s = self._clock()
            fn()
            seconds.append(self._clock() - start_s)
        return tuple(seconds)

    def reset_peak_memory(self) -> None:
        """Start a new peak of the resident set, where the kernel allows it."""
        self._peak_is_ours = cpu_memory.reset_resident_peak()

    def memory(self) -> MemoryReading:
        """Peak resident set since `reset_peak_memory`; there is no allocator whose reserve could be told."""
        return MemoryReading(process_bytes=cpu_memory.status_bytes("VmHWM") if self._peak_is_ours else None)

    def empty_cache(self) -> None:
        """Give freed heap pages back to the kernel."""
        cpu_memory.return_freed_memory()

    def is_oom(self, exception: BaseException) -> bool:
        """A failed allocation, by its class or by what the allocator says."""
        text = str(exception).lower()
        return isinstance(exception, MemoryError) or any(word in text for word in OOM_WORDS)


class CpuDevice:
    """`Device` over `CpuBackend`."""

    id = "cpu"

    def __init__(self) -> None:
        """Refuses where torch is not installed."""
        try:
            import torch
        except ImportError as error:
            raise DeviceError(
                "Measuring this CPU needs torch, which is not installed; type: pip install 'tunecast[calibrate]'"
            ) from error
        self._torch = torch
        self._keeps_memory = cpu_memory.keep_freed_memory()
        self.backend = CpuBackend()
        self._emulates_bf16 = emulates_bf16(torch, self.backend)
        self._others = OtherWork(threads=torch.get_num_threads())

    def flags(self) -> tuple[str, ...]:
        """``shared_cpu`` where other programs computed on these processors since the device was opened."""
        return self._others.flags()

    def hardware(self) -> Hardware:
        """Facts of the processor; `memory_bytes` is the RAM available now."""
        return Hardware(
            device="cpu",
            gpu="cpu",
            name=cpu_model() or "unknown CPU",
            memory_bytes=cpu_memory.available_bytes(),
            container=in_container(),
            host={
                **host_facts(),
                "threads": self._torch.get_num_threads(),
                "fast_bf16": has_fast_bf16(),
                "emulates_bf16": self._emulates_bf16,
                "instructions": self._torch.backends.cpu.get_cpu_capability(),
                "last_level_cache_bytes": self.backend.l2_bytes,
                "allocator_keeps_memory": self._keeps_memory,
            },
        )

    def software(self) -> dict[str, str | None]:
        """Versions that move the result."""
        return software_versions()

    def sensors(self) -> Sensors:
        """A CPU reports none of a graphics card's sensors."""
        return Sensors()

    def supports(self, spec: TrialSpec) -> bool:
        """No transfers to a device that is the host, no waiting for it."""
        return spec.bench not in UNSUPPORTED

    def run(self, spec: TrialSpec) -> TrialResult:
        """Measure; running out of memory and failing are outcomes."""
        self.backend.extra.clear()
        try:
            with cpu_memory.data_limited_to_ram():
                return run_bench(spec, self.backend)
        except RuntimeError as error:
            return TrialResult(outcome="error", message=" ".join(str(error).split()))

    def settle(self, max_seconds: float) -> bool:
        """Multiply matrices until the pace is steady; an unsteady one means that others use the machine."""
        work = matrix_work(self._torch, self.backend, "float32", CPU_SETTLE.size)
        return settle(work, self.backend, lambda: (None, None), max_seconds, rule=CPU_SETTLE)

    def close(self) -> None:
        """Give freed memory back, and end the processes of collectives."""
        close_groups()
        self.backend.empty_cache()
