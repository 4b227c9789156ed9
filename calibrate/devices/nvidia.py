"""Find and open CUDA devices; every way in which that can fail is one sentence with a remedy.

The device itself is in `nvidia_device.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.devices.cuda_backend import holds_context
from tunecast.calibrate.devices.nvidia_device import NvidiaDevice, Runner, default_runner
from tunecast.calibrate.devices.nvml import Nvml, NvmlUnavailableError
from tunecast.calibrate.devices.nvml_card import CardAddress, NvmlCard, Occupation, find_card, occupations
from tunecast.calibrate.devices.other_work import OtherWork
from tunecast.calibrate.devices.settle import SettleRule
from tunecast.catalogs.errors import DeviceError, InputError, NotSupportedError

__all__ = ["CudaDeviceName", "NvidiaDevice", "list_cuda_devices", "open_nvidia", "unusable_gpu"]

HOST_THREADS = 1
"""Threads of the host that launch kernels."""
TORCH_HELP = "https://pytorch.org/get-started/locally has the command for this machine"
WHEELS = "https://download.pytorch.org/whl"
OLDER_CARD = f"pip install --force-reinstall torch --index-url {WHEELS}/cu126"
"""Builds for CUDA 12.6 are the last that have kernels for Volta and Pascal."""
OLDER_DRIVER = f"pip install --force-reinstall torch --index-url {WHEELS}/cu128"
"""Builds for CUDA 12.8 run with drivers older than 580, and have kernels from Turing to Blackwell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDeviceName:
    """One CUDA device that torch can see."""

    id: str
    name: str
    memory_bytes: int


def list_cuda_devices(torch: Any = None) -> list[CudaDeviceName]:
    """CUDA devices of this machine; CUDA is not initialised when there is none. Empty also without torch."""
    torch = torch or _installed_torch()
    if torch is None or not torch.version.cuda or not _is_available(torch)[0]:
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = _asked(torch.cuda.get_device_properties, index)
        found.append(CudaDeviceName(id=f"cuda:{index}", name=properties.name, memory_bytes=properties.total_memory))
    return found


def unusable_gpu(torch: Any = None, pynvml: Any = None) -> str | None:
    """Which NVIDIA GPU is here that torch cannot use, why, and what to type; None where there is none, or none is seen.

    For callers that found no CUDA device. Arguments are for tests.
    """
    try:
        with Nvml.start(pynvml) as nvml:
            names = [name for board in nvml.boards() if (name := NvmlCard(nvml, board).name)]
    except DeviceError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not names or visible in ("", "-1"):
        return None
    here = f"This machine has a GPU ({names[0]})"
    torch = torch or _installed_torch()
    if torch is None:
        return f"{here}, but torch is not installed: pip install 'tunecast[calibrate]'"
    if not torch.version.cuda:
        return f"{here}, but this torch ({torch.__version__}) is built without CUDA: {TORCH_HELP}"
    said = _is_available(torch)[1] or "it does not say why; check `nvidia-smi`"
    limited = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    older = f"For a driver before 580: {OLDER_DRIVER}"
    return f"{here}, but torch {torch.__version__} cannot use it{limited}: {said} {older}"


def open_nvidia(
    device_id: str = "cuda:0",
    *,
    torch: Any = None,
    pynvml: Any = None,
    runner: Runner = default_runner,
    torch_device: str | None = None,
    rule: SettleRule | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> NvidiaDevice:
    """Open ``cuda`` or ``cuda:N``; raises DeviceError with a remedy. All keyword arguments are for tests.

    Where torch sees the GPU but NVML cannot start (some sandboxes), the device works without sensors and
    carries the flag ``no_nvml``; a missing or wrong NVML package is an error, since one command repairs it.
    """
    index = parse_index(device_id)
    others = OtherWork(threads=HOST_THREADS) if torch is None else None
    torch = torch if torch is not None else _import_torch()
    _require_cuda_build(torch)
    nvml, why_not = _start_nvml(pynvml)
    try:
        _require_device(torch, index, why_not)
        before = occupations(nvml) if nvml and not holds_context(torch, index) else {}
        _asked(torch.cuda.set_device, index)
        properties = _asked(torch.cuda.get_device_properties, index)
        _require_kernels(torch, index, properties)
        card = find_card(nvml, card_address(properties, index)) if nvml else None
        return NvidiaDevice(
            torch,
            index,
            nvml=nvml,
            card=card,
            before=_occupation_of(card, before),
            others=others,
            runner=runner,
            torch_device=torch_device,
            rule=rule,
            clock=clock,
        )
    except BaseException:
        if nvml is not None:
            nvml.close()
        raise


def parse_index(device_id: str) -> int:
    """``cuda`` is device 0, ``cuda:3`` device 3."""
    found = re.fullmatch(r"cuda(?::(\d+))?", device_id)
    if not found:
        raise InputError(f"Unknown CUDA device {device_id!r}: type cuda, or cuda:0 for the first GPU.")
    return int(found.group(1) or 0)


def _installed_torch() -> Any | None:
    """torch, None where it is not installed."""
    return None if importlib.util.find_spec("torch") is None else importlib.import_module("torch")


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceError(
            "Measuring a GPU needs torch, which is not installed: pip install 'tunecast[calibrate]'"
        ) from error


def _require_cuda_build(torch: Any) -> None:
    if getattr(torch.version, "hip", None):
        raise NotSupportedError(f"This torch ({torch.__version__}) is for AMD GPUs, which tunecast cannot measure yet.")
    if not torch.version.cuda:
        raise DeviceError(f"This torch has no CUDA: {torch.__version__}; install a CUDA build ({TORCH_HELP}).")


def _start_nvml(module: Any) -> tuple[Nvml | None, NvmlUnavailableError | None]:
    """The session, or why there is none; a wrong package raises."""
    try:
        return Nvml.start(module), None
    except NvmlUnavailableError as error:
        return None, error


def _is_available(torch: Any) -> tuple[bool, str]:
    """Whether CUDA works, and what torch had to say about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    return available, " ".join(str(warning.message) for warning in caught)


def _require_device(torch: Any, index: int, why_no_nvml: NvmlUnavailableError | None) -> None:
    """Raise DeviceError unless CUDA works and has this many devices."""
    available, said = _is_available(torch)
    if not available:
        reason = said or (str(why_no_nvml) if why_no_nvml else "torch does not say why; check `nvidia-smi`")
        raise DeviceError(f"cuda:{index} was asked for, but CUDA does not work here: {reason}")
    count = int(torch.cuda.device_count())
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        known = ", ".join(f"cuda:{i}" for i in range(count))
        raise DeviceError(f"cuda:{index} was asked for, but torch sees only {known}{limited}.")


def _asked(function: Callable[[int], Any], index: int) -> Any:
    """What torch answers of a device; raises DeviceError where CUDA cannot start on it."""
    try:
        return function(index)
    except RuntimeError as error:
        said = " ".join(str(error).split("\n")[0].split())
        raise DeviceError(
            f"cuda:{index} cannot be opened ({said}): `nvidia-smi` shows who holds its memory, or whether it takes one "
            "process alone."
        ) from error


def _require_kernels(torch: Any, index: int, properties: Any) -> None:
    """Raise DeviceError where torch was built without kernels for this GPU.

    A binary runs on cards of its own major version and the same or a later minor one; intermediate code
    (``compute_90``) is compiled for any later card (CUDA C++ Programming Guide, binary and PTX compatibility).
    """
    names = _architectures(torch)
    built = [int(name.removeprefix("sm_").rstrip("af")) for name in names if name.startswith("sm_")]
    code = [int(name.removeprefix("compute_").rstrip("af")) for name in names if name.startswith("compute_")]
    own = 10 * properties.major + properties.minor
    runs = any(each // 10 == properties.major and each <= own for each in built) or any(each <= own for each in code)
    if names and not runs:
        raise DeviceError(
            f"cuda:{index} is a {properties.name} of compute capability {properties.major}.{properties.minor}, but "
            f"torch {torch.__version__} has kernels for {', '.join(names)}; type: "
            f"{OLDER_CARD if own < min(built, default=own + 1) else OLDER_DRIVER}"
        )


def _architectures(torch: Any) -> list[str]:
    """What torch was built for (``sm_90``); empty where it does not tell."""
    listed = getattr(torch.cuda, "get_arch_list", None)
    return list(listed()) if listed is not None else []


def card_address(properties: Any, index: int) -> CardAddress:
    """How NVML can find the device with these properties; torch releases differ in what they tell."""
    uuid = getattr(properties, "uuid", None)
    bus = getattr(properties, "pci_bus_id", None)
    pci = None
    if bus is not None:
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        pci = f"{domain:08X}:{bus:02X}:{device:02X}.0"
    plain = str(uuid).removeprefix("GPU-").removeprefix("MIG-") if uuid else None
    return CardAddress(uuid=plain, pci_bus_id=pci, visible_mig=visible_mig(index))


def visible_mig(index: int) -> str | None:
    """The MIG UUID at this position of CUDA_VISIBLE_DEVICES, None when the entry is no MIG instance."""
    entries = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return entries[index] if index < len(entries) and entries[index].startswith("MIG-") else None


def _occupation_of(card: NvmlCard | None, before: dict[str, Occupation]) -> Occupation | None:
    return before.get(card.uuid) if card is not None and card.uuid else None
