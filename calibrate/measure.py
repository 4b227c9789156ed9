"""Measure one training run on a device: real optimizer steps of exactly that run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tunecast.calibrate.devices.protocol import Device, TrialResult, TrialSpec
from tunecast.calibrate.stats import drift_frac, median, median_interval, spread_frac
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.catalogs.errors import DeviceError, InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run

SETTLE_S = 8.0
"""Longest warm-up before a measurement: a second or two until a cold card has heated and found its clock, the window in
which nothing moves, and some to spare. Its own first steps warm the device too."""


MOST_S = 10.0
"""Steps that scatter on a card are timed for so long: the pace of a virtual machine's host changes within a second, and
the same run measured twice for three seconds differed by 10% in the median (results/validation/gpu-h100)."""


def step_spec(architecture: Architecture, run: Run, *, steps: int, warmup: int, most_s: float = MOST_S) -> TrialSpec:
    """The trial that measures one run."""
    params = {
        "architecture": architecture_to_dict(architecture), "run": run_to_dict(run), "steps": steps, "most_s": most_s,
    }  # fmt: skip
    return TrialSpec(bench="step", params=params, repeats=steps, warmup=warmup)


def measure(
    device: Device,
    architecture: Architecture,
    run: Run,
    *,
    steps: int = 5,
    warmup: int = 2,
    most_s: float = MOST_S,
    settle_s: float | None = SETTLE_S,
) -> dict[str, Any]:
    """Time `steps` optimizer steps after `warmup` ones: medians with 80% intervals, spread, memory views, raw times.

    On a card whose steps scatter up to 200 more of them are timed, until they fill `most_s` seconds.
    The device is warmed for at most `settle_s` before; None is for one that was at work until now, whose warm-up steps
    suffice. Out of memory is an outcome: the times are then None. A failed run raises DeviceError.
    """
    if steps < 1:
        raise InputError(f"{steps} steps were asked for, but at least 1 is needed; try --steps 5.")
    if run.num_gpus != 1:
        raise NotSupportedError(
            f"Measuring a run on {run.num_gpus} GPUs was asked for, but one device at a time can be measured; "
            "use --num-gpus 1, which leaves sharding out, or forecast with `tunecast estimate`."
        )
    if run.attention_spans is not None:
        raise NotSupportedError(
            "Measuring rows whose documents are kept apart was asked for (--padding-free, --attention-length), "
            "which is not built yet; leave it out, or forecast with `tunecast estimate`."
        )
    spec = step_spec(architecture, run, steps=steps, warmup=warmup, most_s=most_s)
    if not device.supports(spec):
        raise NotSupportedError(f"{device.id} cannot run this step (its dtype {run.compute_dtype} or its sharding).")
    settled = settle_s is None or device.settle(settle_s)
    result = device.run(spec)
    if result.outcome not in ("ok", "oom"):
        raise DeviceError(f"The step failed on {device.id}: {result.message}")
    return _summary(device, run, result, settled=settled)


def _summary(device: Device, run: Run, result: TrialResult, *, settled: bool) -> dict[str, Any]:
    hardware, memory, samples = device.hardware(), result.memory, list(result.samples_s)
    own_flags = getattr(device, "flags", None)
    flags = set(own_flags()) if own_flags is not None else set()
    flags.update(() if settled else ("clock_not_settled",))
    return {
        "outcome": result.outcome,
        "message": result.message,
        "device": device.id,
        "gpu": hardware.gpu,
        "hardware": asdict(hardware),
        "software": device.software(),
        "step_times_s": samples,
        "warmup_s": list(result.warmup_s),
        "step_time_s": interval(samples),
        "tokens_per_s": interval([run.tokens_per_step / sample for sample in samples]),
        "spread_frac": spread_frac(samples) if samples else None,
        "drift_frac": drift_frac(samples) if samples else None,
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "process_bytes": memory.process_bytes,
        "at_rest_bytes": memory.at_rest_bytes,
        "usable_bytes": hardware.memory_bytes,
        "flags": sorted(flags),
        "sensors": None if result.sensors_after is None else asdict(result.sensors_after),
        "extra": result.extra,
    }


def interval(samples: list[float]) -> dict[str, float] | None:
    """Median of the samples with the 80% interval of that median; None without samples."""
    if not samples:
        return None
    low, high = median_interval(samples)
    return {"value": median(samples), "low": low, "high": high}
