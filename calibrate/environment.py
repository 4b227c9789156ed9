"""What moves a measurement besides the device: software versions and facts of the host.

Never the host's name, its user or a path. Nothing here imports torch, so `tunecast env` stays fast.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from tunecast.model.units import KIB

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "triton",
    "flash-attn",
    "liger-kernel",
    "numpy",
)
"""Distributions whose version moves a result, by their name on the package index."""

MEASURING_PACKAGES = frozenset({"torch", "transformers", "peft", "bitsandbytes", "accelerate", "pynvml"})
"""What the extra ``calibrate`` installs, as Python imports it."""
NVML_PACKAGES = ("nvidia-ml-py", "pynvml", "nvidia-ml-py3")
"""The three distributions that answer to ``import pynvml``: NVIDIA's own, the deprecated shim, an old fork."""

CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman put into every container."""

CONTAINER_WORDS = ("docker", "kubepods", "containerd", "lxc", "libpod", "podman")
"""Words in ``/proc/1/cgroup`` of a process in a container."""


def package_version(distribution: str) -> str | None:
    """Installed version of a distribution, None when absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_cuda_version() -> str | None:
    """CUDA version that the installed torch was built for, without importing it; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version_file = Path(spec.submodule_search_locations[0]) / "version.py"
    if not version_file.is_file():
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.MULTILINE)
    return found.group(1) if found else None


def software_versions() -> dict[str, str | None]:
    """Versions that move a result, keyed as they appear in a record; None when absent."""
    versions: dict[str, str | None] = {"tunecast": package_version("tunecast"), "python": platform.python_version()}
    versions.update({name: package_version(name) for name in PACKAGES})
    versions["cuda"] = torch_cuda_version()
    versions.update({name: package_version(name) for name in NVML_PACKAGES})
    return versions


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Name of the processor as the kernel tells it, None when it does not."""
    if cpuinfo.is_file():
        found = re.search(r"^(?:model name|Hardware|Model)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or None


def cpu_cores() -> int | None:
    """Cores this process may use (respects affinity, as containers set it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def ram_bytes(meminfo: Path = Path("/proc/meminfo"), field: str = "MemTotal") -> int | None:
    """One field of ``/proc/meminfo`` (``MemTotal`` or ``MemAvailable``) in bytes, None when it cannot be read."""
    if not meminfo.is_file():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    return int(found.group(1)) * KIB if found else None


def in_container(marks: tuple[Path, ...] = CONTAINER_MARKS, cgroup: Path = Path("/proc/1/cgroup")) -> bool | None:
    """Whether this process runs in a container; None where nothing can be told (no ``/proc``)."""
    if any(mark.exists() for mark in marks) or os.environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    if not cgroup.is_file():
        return None
    return any(word in cgroup.read_text() for word in CONTAINER_WORDS)


def host_facts() -> dict[str, Any]:
    """CPU model, cores, RAM and system: facts of the machine, never its name or user."""
    return {
        "cpu": cpu_model(),
        "cores": cpu_cores(),
        "ram_bytes": ram_bytes(),
        "system": platform.system(),
        "machine": platform.machine(),
    }


def nvml_package() -> str | None:
    """Which of the three packages answers to ``import pynvml``, with versions; None when none is installed."""
    found = [f"{name} {version}" for name in NVML_PACKAGES if (version := package_version(name))]
    return " + ".join(found) if found else None
