"""tunecast: measure a GPU for minutes, forecast the whole fine-tuning run.

    >>> import tunecast
    >>> tunecast.estimate("meta-llama/Llama-3.1-8B", method="qlora", gpu="h100-sxm5-80gb", tokens="10M")

Names load when first used, so that importing the package costs nothing. `calibrate_device` is not
called `calibrate` because that is the package of the measuring code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunecast.api import calibrate_device, estimate, fit, measure
    from tunecast.calibrate.watch.callback import TunecastCallback
    from tunecast.catalogs.errors import DeviceError, InputError, NotSupportedError, TunecastError, UnknownNameError
    from tunecast.frames import frame
    from tunecast.measurement import OutOfMemoryError
    from tunecast.model.architectures import load_architecture
    from tunecast.model.forecast import Forecast
    from tunecast.model.run import Run
    from tunecast.model.value import Value
    from tunecast.recommender import recommend

    __version__: str

__all__ = [
    "DeviceError",
    "Forecast",
    "InputError",
    "NotSupportedError",
    "OutOfMemoryError",
    "Run",
    "TunecastCallback",
    "TunecastError",
    "UnknownNameError",
    "Value",
    "__version__",
    "calibrate_device",
    "estimate",
    "fit",
    "frame",
    "load_architecture",
    "measure",
    "recommend",
]

_HOME = {
    "calibrate_device": "tunecast.api",
    "estimate": "tunecast.api",
    "fit": "tunecast.api",
    "measure": "tunecast.api",
    "recommend": "tunecast.recommender",
    "frame": "tunecast.frames",
    "TunecastCallback": "tunecast.calibrate.watch.callback",
    "DeviceError": "tunecast.catalogs.errors",
    "InputError": "tunecast.catalogs.errors",
    "NotSupportedError": "tunecast.catalogs.errors",
    "OutOfMemoryError": "tunecast.measurement",
    "TunecastError": "tunecast.catalogs.errors",
    "UnknownNameError": "tunecast.catalogs.errors",
    "load_architecture": "tunecast.model.architectures",
    "Forecast": "tunecast.model.forecast",
    "Run": "tunecast.model.run",
    "Value": "tunecast.model.value",
}
"""Public name to the module that has it."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tunecast")
    if name not in _HOME:
        raise AttributeError(f"module 'tunecast' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
