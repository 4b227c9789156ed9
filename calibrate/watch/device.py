"""The device a job runs on, looked at without touching the job: facts, peaks of memory, throttling."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunecast.calibrate.devices.protocol import Hardware, MemoryReading, Sensors
from tunecast.calibrate.flags import THROTTLE_FLAGS
from tunecast.catalogs.errors import NotSupportedError


class WatchedCpu:
    """This processor. Peaks are those of the whole process, since its start."""

    def hardware(self) -> Hardware:
        """Facts of the processor."""
        from tunecast.calibrate.devices.cpu_memory import available_bytes
        from tunecast.calibrate.environment import cpu_model, host_facts

        return Hardware(
            device="cpu",
            gpu="cpu",
            name=cpu_model() or "unknown CPU",
            memory_bytes=available_bytes(),
            host=host_facts(),
        )

    def memory(self) -> MemoryReading:
        """Peak resident set."""
        from tunecast.calibrate.devices.cpu_memory import status_bytes

        return MemoryReading(process_bytes=status_bytes("VmHWM"))

    def sensors(self) -> Sensors:
        """None of a graphics card's."""
        return Sensors()

    def software(self) -> dict[str, str | None]:
        """Versions that move the result."""
        from tunecast.calibrate.environment import software_versions

        return software_versions()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""


class WatchedGpu:
    """One CUDA device of the running process. Peaks are torch's, since the job last reset them."""

    def __init__(self, index: int) -> None:
        from tunecast.calibrate.devices.nvidia import open_nvidia

        self._device = open_nvidia(f"cuda:{index}")

    def hardware(self) -> Hardware:
        """Facts of the card."""
        return self._device.hardware()

    def memory(self) -> MemoryReading:
        """Peaks of allocated, reserved and process memory."""
        return self._device.backend.memory()

    def sensors(self) -> Sensors:
        """One NVML reading, without the PCIe counters: they take 40 ms (`NvmlCard.pcie_bytes_per_s`)."""
        return self._device.quick_sensors()

    def software(self) -> dict[str, str | None]:
        """Versions that move the result."""
        return self._device.software()

    def synchronize(self) -> None:
        """Wait for everything that was issued."""
        self._device.backend.synchronize()

    def close(self) -> None:
        """Give NVML back."""
        self._device.close()


Watched = WatchedCpu | WatchedGpu


def watched_device(torch_device: Any) -> Watched:
    """The device of a ``torch.device``; raises NotSupportedError for one that is neither an NVIDIA card nor the CPU."""
    if torch_device.type == "cuda":
        return WatchedGpu(torch_device.index or 0)
    if torch_device.type == "cpu":
        return WatchedCpu()
    raise NotSupportedError(f"The job runs on {torch_device.type}, and only NVIDIA cards and the CPU are watched.")


def throttle_flags(sensors: Sensors) -> set[str]:
    """``throttled``, ``power_capped``, ``shared_gpu``: what one reading says."""
    found = {THROTTLE_FLAGS[reason] for reason in sensors.throttle_reasons or () if reason in THROTTLE_FLAGS}
    return found | ({"shared_gpu"} if sensors.other_processes else set())


def plain(reading: Any) -> dict[str, Any]:
    """A dataclass of the protocol as JSON data."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(reading).items()}
