"""NVIDIA's management library: the only module that touches `pynvml`, and the one place its errors are translated.

The module `pynvml` comes from the package nvidia-ml-py. Two other packages answer to the same name, so the
import is checked before use. Reads of one card are in `nvml_card.py`; they go through `Nvml.optional`, which
gives None for whatever this card, driver or library version does not report, and raises `DeviceError` only
when the card or the driver is gone.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from types import ModuleType, TracebackType
from typing import Any

from tunecast.calibrate.environment import nvml_package, package_version
from tunecast.catalogs.errors import DeviceError

INSTALL_COMMAND = "pip install nvidia-ml-py"
REPAIR_COMMAND = "pip uninstall -y pynvml nvidia-ml-py3 && pip install --force-reinstall nvidia-ml-py"

REQUIRED_NAMES = ("_nvmlGetFunctionPointer", "nvmlDeviceGetMigMode", "NVMLError")
"""Names that every usable nvidia-ml-py has; the old nvidia-ml-py3 fork and pynvml before 12 lack one or more."""

REMEDIES = {
    "GpuIsLost": "the GPU fell off the bus: look for Xid messages in `dmesg` and restart the machine",
    "ResetRequired": "the GPU must be reset: restart the machine (or the container's host)",
    "DriverNotLoaded": "the NVIDIA driver is not loaded: check that `nvidia-smi` works on this machine",
    "Uninitialized": "the NVML session is closed: open the device again",
    "LibraryNotFound": "libnvidia-ml is missing: install the NVIDIA driver, or start the container with `--gpus all`",
    "LibRmVersionMismatch": "driver and library differ in version: restart the machine to finish the driver's update",
}
"""NVML errors (by class name without prefix) that mean the card or the driver is gone, with what to do."""


class NvmlUnavailableError(DeviceError):
    """NVML cannot be used on this machine now (no driver, no library); torch may still see a GPU."""


class NvmlPackageError(DeviceError):
    """The Python package behind ``import pynvml`` is missing or the wrong one; one command fixes it."""


def import_pynvml() -> ModuleType:
    """Import `pynvml` and make sure it is NVIDIA's; raises NvmlPackageError with the command that repairs it."""
    try:
        with warnings.catch_warnings():
            # The deprecated shim `pynvml` warns on every import; `package_advice` says so in our own words.
            warnings.simplefilter("ignore", FutureWarning)
            module = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlPackageError(
            f"Reading the GPU's sensors needs the package nvidia-ml-py, which is not installed: {INSTALL_COMMAND}"
        ) from error
    return check_pynvml(module)


def check_pynvml(module: ModuleType) -> ModuleType:
    """Return the module if it is usable, else raise NvmlPackageError naming what is installed."""
    missing = [name for name in REQUIRED_NAMES if not hasattr(module, name)]
    if missing:
        raise NvmlPackageError(
            f"The module pynvml is not the one from nvidia-ml-py (it lacks {', '.join(missing)}; "
            f"installed: {nvml_package() or 'unknown'}): {REPAIR_COMMAND}"
        )
    return module


def package_advice() -> str | None:
    """What is wrong with the installed NVML packages and the command that repairs it; None when all is well."""
    own, shim, fork = (package_version(name) for name in ("nvidia-ml-py", "pynvml", "nvidia-ml-py3"))
    if fork:
        return f"nvidia-ml-py3 {fork} is an old fork that hides nvidia-ml-py: {REPAIR_COMMAND}"
    if shim:
        return f"The package pynvml {shim} is deprecated and only gets in the way of nvidia-ml-py: {REPAIR_COMMAND}"
    if not own:
        return f"nvidia-ml-py is not installed, so no GPU sensor can be read: {INSTALL_COMMAND}"
    return None


def error_name(error: Exception) -> str:
    """``GpuIsLost`` for ``NVMLError_GpuIsLost``; the plain class name for anything else."""
    return type(error).__name__.removeprefix("NVMLError_")


def translate(error: Exception, what: str) -> DeviceError:
    """An NVML error as a DeviceError that says what failed, why and what to try."""
    name = error_name(error)
    remedy = REMEDIES.get(name)
    return DeviceError(f"NVML failed in {what} with {name}: {remedy or error}.")


class Nvml(AbstractContextManager["Nvml"]):
    """One NVML session: a context that initialises the library and shuts it down."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._open = False

    @classmethod
    def start(cls, module: Any = None) -> Nvml:
        """Import (unless given), check and initialise.

        Raises NvmlPackageError for a wrong package, NvmlUnavailableError when driver or library is missing.
        """
        session = cls(import_pynvml() if module is None else check_pynvml(module))
        try:
            session.required("nvmlInit")
        except DeviceError as error:
            raise NvmlUnavailableError(str(error)) from error
        session._open = True
        return session

    def close(self) -> None:
        """Shut the library down; a second call does nothing, and a lost card does not stop it."""
        if self._open:
            self._open = False
            self._call("nvmlShutdown", lambda _error, _what: None)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def constant(self, name: str) -> Any:
        """A constant of the library by name; None when this version of the package lacks it."""
        return getattr(self._module, name, None)

    def required(self, name: str, *args: Any) -> Any:
        """Call a function whose answer we cannot do without; every NVML error becomes a DeviceError."""
        return self._call(name, translate, *args)

    def optional(self, name: str, *args: Any) -> Any:
        """Call a function that reads an optional sensor; None when unsupported, DeviceError when the card is gone."""
        return self._call(name, _fatal_only, *args)

    def _call(self, name: str, on_error: Callable[[Exception, str], DeviceError | None], *args: Any) -> Any:
        """The one place where NVML is called and its errors are caught."""
        function = getattr(self._module, name, None)
        if function is None:
            missing = on_error(AttributeError(f"this version of nvidia-ml-py has no {name}"), name)
            if missing is not None:
                raise missing
            return None
        try:
            return function(*args)
        except (self._module.NVMLError, self._mismatch()) as error:
            translated = on_error(error, name)
            if translated is not None:
                raise translated from error
            return None

    def _mismatch(self) -> type[Exception]:
        """What is raised of a function that an old driver's library lacks: no NVMLError (pynvml.py,
        ``throwOnVersionMismatch``)."""
        found: type[Exception] = getattr(self._module, "NVMLLibraryMismatchError", self._module.NVMLError)
        return found

    def boards(self) -> Iterator[Any]:
        """Handles of the physical GPUs of this machine, in PCI order (which is not CUDA's), lost ones left out."""
        for index in range(self.optional("nvmlDeviceGetCount") or 0):
            handle = None
            with suppress(DeviceError):
                handle = self.optional("nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                yield handle

    def mig_instances(self, board: Any) -> Iterator[Any]:
        """Handles of the MIG instances on a board."""
        for index in range(self.optional("nvmlDeviceGetMaxMigDeviceCount", board) or 0):
            handle = self.optional("nvmlDeviceGetMigDeviceHandleByIndex", board, index)
            if handle is not None:
                yield handle

    def driver_version(self) -> str | None:
        """Version of the NVIDIA driver, such as ``580.95.05``."""
        version = self.optional("nvmlSystemGetDriverVersion")
        return version.decode() if isinstance(version, bytes) else version

    def cuda_driver_version(self) -> str | None:
        """Newest CUDA version the driver supports: 13000 is written ``13.0``."""
        version = self.optional("nvmlSystemGetCudaDriverVersion")
        return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def _fatal_only(error: Exception, what: str) -> DeviceError | None:
    """Translate only the errors after which nothing more can be read."""
    return translate(error, what) if error_name(error) in REMEDIES else None
