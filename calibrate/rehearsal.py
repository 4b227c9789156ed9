"""One tiny step of every method before anything is measured: what fails every trial alike is said at once."""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.calibrate.devices.protocol import Device
from tunecast.calibrate.measure import step_spec
from tunecast.calibrate.plan import step_architecture, training_dtype
from tunecast.calibrate.plan_tables import W576
from tunecast.catalogs.errors import DeviceError
from tunecast.model.resolve import resolve_run

REHEARSED = ("lora", "qlora", "full")
"""Methods of which one tiny step is taken."""
IN_16_BITS = ("lora", "full")


def rehearse(device: Device, methods: Sequence[str] = REHEARSED) -> str | None:
    """Why a step of a tiny model does not run here; None when those of all `methods` do.

    A package that does not fit the others fails every run alike, and each would be written as measured.
    """
    architecture = step_architecture(W576, depth=1, vocab=1024)
    has_bf16 = training_dtype(device.hardware()) == "bf16"
    for method in methods:
        run = resolve_run(architecture, {"method": method, "max_length": 64}, gpu_has_bf16=has_bf16).run
        result = device.run(step_spec(architecture, run, steps=1, warmup=1))
        if result.outcome != "ok":
            why = " ".join(result.message.split()) or result.outcome
            return f"A tiny {method} step does not run on {device.id} ({why}); mend that, then type the same again."
    return None


def require_steps(device: Device) -> None:
    """Raise DeviceError where tiny steps in 16 bits do not run on a GPU; a CPU's errors and a mock's show themselves.

    One in 4 bits may fail: a record without it still serves LoRA and full fine-tuning.
    """
    broken = rehearse(device, IN_16_BITS) if device.hardware().device.startswith("cuda") else None
    if broken is not None:
        raise DeviceError(broken)
