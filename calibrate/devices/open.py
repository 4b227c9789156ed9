"""From a device's name to the device."""

from __future__ import annotations

from tunecast.calibrate.devices.protocol import Device
from tunecast.catalogs.errors import DeviceError, InputError

KNOWN_NAMES = "cuda:0 (a GPU of this machine), cpu, or mock:<gpu-id>"


def open_device(name: str, *, ignore_memory: bool = False) -> Device:
    """The device called ``cuda``, ``cuda:N``, ``cpu`` or ``mock:<id>[#seed]``; raises InputError for another name.

    `ignore_memory` lets a mock simulate what would not fit; a real device has no such choice.
    """
    wanted = name.strip()
    if ignore_memory and not wanted.startswith("mock:"):
        raise InputError(
            f"--ignore-memory was asked for on {wanted!r}, but only a mock can ignore its memory; leave it out, or "
            "type --device mock:<gpu-id>."
        )
    if wanted == "cpu":
        from tunecast.calibrate.devices.cpu import CpuDevice

        return CpuDevice()
    if wanted == "cuda" or wanted.startswith("cuda:"):
        from tunecast.calibrate.devices.nvidia import open_nvidia

        return open_nvidia(wanted)
    if wanted.startswith("mock:"):
        from tunecast.calibrate.mock.device import open_mock

        return open_mock(wanted, ignore_memory=ignore_memory)
    raise InputError(f"Unknown device {name!r}; type {KNOWN_NAMES}.")


def default_device_name() -> str:
    """The first GPU that torch can use, else this CPU; raises DeviceError where one is there that torch cannot use."""
    from tunecast.calibrate.devices.nvidia import list_cuda_devices, unusable_gpu

    found = list_cuda_devices()
    if found:
        return found[0].id
    unusable = unusable_gpu()
    if unusable is not None:
        raise DeviceError(f"{unusable} (--device cpu measures the processor in its place).")
    return "cpu"
