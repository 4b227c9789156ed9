"""From the name of a bench to the code that runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from tunecast.calibrate.bench.collectives import run_collective
from tunecast.calibrate.bench.files import run_checkpoint, run_disk, run_load
from tunecast.calibrate.bench.host_ops import prepare_sync, run_launch
from tunecast.calibrate.bench.lasting import run_lasting
from tunecast.calibrate.bench.math_ops import (
    prepare_attention,
    prepare_gemm,
    prepare_grouped,
    prepare_loss,
    prepare_matmul_4bit,
)
from tunecast.calibrate.bench.memory_ops import prepare_dequant, prepare_memory, prepare_optimizer, prepare_transfer
from tunecast.calibrate.bench.timing import Prepared, time_prepared
from tunecast.calibrate.bench.walk_ops import prepare_walk
from tunecast.calibrate.bitsandbytes_setup import quiet_bitsandbytes
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

PREPARED: dict[str, Callable[[dict[str, Any], Backend], Prepared]] = {
    "gemm": prepare_gemm,
    "grouped": prepare_grouped,
    "memory": prepare_memory,
    "walk": prepare_walk,
    "dequant": prepare_dequant,
    "matmul_4bit": prepare_matmul_4bit,
    "attention": prepare_attention,
    "masked": prepare_attention,
    "loss": prepare_loss,
    "optimizer": prepare_optimizer,
    "sync": prepare_sync,
    "transfer": prepare_transfer,
}
"""Benches that are one repeated call."""


def run_step_late(spec: TrialSpec, backend: Backend) -> TrialResult:
    """The ``step`` bench, whose module is imported when asked for."""
    from tunecast.calibrate.steps import run_step

    return run_step(spec, backend)


def run_modules_late(spec: TrialSpec, backend: Backend) -> TrialResult:
    """The ``modules`` bench, likewise."""
    from tunecast.calibrate.bench.module_walks import run_modules

    return run_modules(spec, backend)


WHOLE: dict[str, Callable[[TrialSpec, Backend], TrialResult]] = {
    "lasting": run_lasting,
    "launch": run_launch,
    "disk": run_disk,
    "load": run_load,
    "checkpoint": run_checkpoint,
    "step": run_step_late,
    "modules": run_modules_late,
    "collective": run_collective,
}
"""Benches that take their own times."""


def run_bench(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Measure one trial. Out of memory and unsupported are outcomes; every other exception is the device's to judge."""
    quiet_bitsandbytes()
    if spec.bench not in PREPARED and spec.bench not in WHOLE:
        message = f"The bench {spec.bench!r} does not exist."
        return TrialResult(outcome="unsupported", message=message)
    try:
        backend.reset_peak_memory()
        return _measured(spec, backend)
    except (RuntimeError, MemoryError) as error:
        if not backend.is_oom(error):
            raise
        return TrialResult(outcome="oom", message=" ".join(str(error).split()))
    finally:
        if spec.bench in ("step", "modules"):
            gc.collect()  # Models hold themselves in cycles; the buffers of the other benches do not.
        backend.empty_cache()


def _measured(spec: TrialSpec, backend: Backend) -> TrialResult:
    if spec.bench in WHOLE:
        return WHOLE[spec.bench](spec, backend)
    return time_prepared(spec, PREPARED[spec.bench](spec.params, backend), backend)
