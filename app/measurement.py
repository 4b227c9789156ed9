"""A measurement in the shape of a forecast, so that the two subtract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import DeviceError, InputError, TunecastError

if TYPE_CHECKING:
    from tunecast.asked import Asked
    from tunecast.calibrate.devices.protocol import Device
    from tunecast.catalogs.gpus import Gpu
    from tunecast.model.architecture import Architecture
    from tunecast.model.forecast import Forecast, MemoryView
    from tunecast.model.resolve import Resolved
    from tunecast.model.run import Run
    from tunecast.model.value import Value

Measured = Mapping[str, Any]
"""What `tunecast.calibrate.measure.measure` answers."""


class OutOfMemoryError(TunecastError):
    """The run does not fit the device: an answer, and it is no."""

    exit_code = 3

    def __init__(self, message: str, answer: dict[str, Any]) -> None:
        super().__init__(message)
        self.answer = answer
        """The JSON of the forecast, with null for everything that could not be measured."""


def measure_on(device: Device, asked: Asked, steps: int) -> Forecast:
    """Resolve the run for this device, time it, and give the answer a forecast's shape."""
    from tunecast.calibrate.measure import measure

    architecture, gpu = asked.architecture, catalog_gpu(device.hardware().gpu)
    resolved = resolved_on(device, asked)
    measured = measure(device, architecture, resolved.run, steps=steps)
    if measured["outcome"] == "oom":
        raise OutOfMemoryError(
            f"{architecture.name} does not fit {device.id} in this run: {first_line(measured['message'])}; "
            f"try a smaller {' or '.join(smaller_options(resolved.run))}.",
            does_not_fit(architecture, resolved, measured),
        )
    return as_forecast(architecture, resolved, measured, gpu)


def resolved_on(device: Device, asked: Asked) -> Resolved:
    """The run as this device would train it; a CPU's refusal raises OutOfMemoryError."""
    from tunecast.calibrate.linear_kernels import installed_kernels
    from tunecast.model.grouped import check_experts, with_experts
    from tunecast.model.question import BESIDE_STEPS
    from tunecast.model.resolve import resolve_run
    from tunecast.model.rows import with_padding
    from tunecast.model.sdpa import runs_cudnn
    from tunecast.model.target import MOCK_PREFIX, emulates_bf16

    hardware = device.hardware()
    own = {name: value for name, value in asked.options.items() if name not in BESIDE_STEPS}
    real = not device.id.startswith(MOCK_PREFIX)
    kernels = installed_kernels(asked.architecture) if real else ()
    if kernels and own.get("fused_kernels") is None:
        own["fused_kernels"] = ",".join(kernels)
    if own.get("trainer_loop"):
        raise InputError("Steps are measured one after another, by no Trainer; leave --trainer-loop out.")
    own["trainer_loop"] = False
    options, origins = with_padding(own, asked.options, asked.origins)
    resolved = resolve_run(
        asked.architecture,
        options,
        gpu_has_bf16=has_bf16(hardware.compute_capability, catalog_gpu(hardware.gpu)),
        emulates_bf16=emulates_bf16(hardware.host),
        option_origins={**origins, "trainer_loop": "stack-default"},
    )
    if not real:  # a real card runs what it runs
        check_experts(asked.architecture, device.id, hardware.compute_capability)
    resolved = with_experts(resolved, asked.architecture, hardware.compute_capability)
    if not runs_cudnn(asked.architecture, resolved.run, catalog_gpu(hardware.gpu)):
        resolved = replace(resolved, run=replace(resolved.run, sdpa_cudnn=False))
    resolved = replace(resolved, notes=(*resolved.notes, *asked.notes))
    refuse_what_a_cpu_cannot_hold(device, asked.architecture, resolved)
    return resolved


def first_line(message: str) -> str:
    """A library's message without its backtrace, and without torch's account of its allocator."""
    line = (message or "out of memory").strip().splitlines()[0]
    return line.partition(" Including non-PyTorch memory")[0].partition(" Of the allocated memory")[0].rstrip(".;")


def smaller_options(run: Run) -> list[str]:
    """Options that would hold less, those already at their least left out."""
    batch = ["--per-device-train-batch-size"] if run.per_device_train_batch_size > 1 else []
    method = ["model, or --method qlora"] if run.method != "qlora" else ["model"]
    return ["--max-length", *batch, *method]


def refuse_what_a_cpu_cannot_hold(device: Device, architecture: Architecture, resolved: Resolved) -> None:
    """A CPU that runs out of memory takes the whole machine down, so tensors alone beyond its RAM are not tried."""
    from tunecast.model.memory import memory_timeline
    from tunecast.model.units import gib

    usable = device.hardware().memory_bytes
    if device.id != "cpu" or usable is None:
        return
    needed = memory_timeline(architecture, resolved.run, platform="cpu").allocated_bytes
    if needed > usable:
        message = f"its tensors need {gib(needed):.1f} GiB and {gib(usable):.1f} GiB are free, so nothing was started"
        answer = {"outcome": "oom", "message": message, "device": device.id, "gpu": "cpu", "flags": []}
        raise OutOfMemoryError(
            f"{architecture.name} does not fit {device.id} in this run: {message}; "
            f"try a smaller {' or '.join(smaller_options(resolved.run))}.",
            does_not_fit(architecture, resolved, {**answer, "usable_bytes": usable}) | {"origins": {"fits": "counted"}},
        )


def catalog_gpu(gpu_id: str | None) -> Gpu | None:
    """Catalog facts of a device: those of the imitated card for a mock, none for a CPU or an unlisted card."""
    from tunecast.catalogs.gpus import load_gpus
    from tunecast.model.target import MOCK_PREFIX, mocked_gpu

    if gpu_id is None or gpu_id == "cpu":
        return None
    return mocked_gpu(gpu_id) if gpu_id.startswith(MOCK_PREFIX) else load_gpus().get(gpu_id)


def has_bf16(compute_capability: str | None, gpu: Gpu | None) -> bool:
    """Whether bf16 runs in hardware: by the catalog, else by the compute capability; a CPU computes it."""
    from tunecast.calibrate.plan import capability_has_bf16
    from tunecast.catalogs.gpus import training_dtype

    if gpu is not None:
        return training_dtype(gpu) == "bf16"
    return capability_has_bf16(compute_capability)


def as_forecast(architecture: Architecture, resolved: Resolved, measured: Measured, gpu: Gpu | None) -> Forecast:
    """Medians with the 80% interval of the median; every figure that was counted, not timed, is exact."""
    from tunecast.model.flops import executed_by_dtype, model_flops_per_step, no_more_than_run
    from tunecast.model.forecast import Forecast
    from tunecast.model.timing import seconds_at_peak
    from tunecast.model.trained import trainable_params

    run = resolved.run
    step_time_s = value_of(measured["step_time_s"])
    executed = executed_by_dtype(architecture, run)
    model_flops = no_more_than_run(model_flops_per_step(architecture, run), executed)
    peaks = {} if gpu is None else gpu.peaks
    peak, least_s = peaks.get(run.product_dtype), seconds_at_peak(executed, run, peaks)
    held = was_held(measured)
    return Forecast(
        model=architecture.name,
        gpu=str(measured["gpu"] or measured["hardware"]["name"]),
        architecture=architecture,
        run=run,
        run_origins=resolved.origins,
        fits=held,
        fit_probability=float(held),
        verdict="fits" if held else "no",
        model_flops_per_step=model_flops,
        executed_flops_per_step=sum(executed.values()),
        trainable_params=trainable_params(architecture, run),
        total_params=architecture.total_params,
        memory=memory_of(measured),
        step_time_s=step_time_s,
        tokens_per_s=value_of(measured["tokens_per_s"]),
        mfu=None if peak is None else model_flops / step_time_s.value / peak,
        hfu=None if least_s is None else least_s / step_time_s.value,
        bound_by="unknown",
        time_parts_s={"step": step_time_s.value},
        origins=dict.fromkeys(("step_time_s", "memory"), f"measured:{measured['device']}"),
        notes=(*resolved.notes, *notes_of(measured)),
    )


def was_held(measured: Measured) -> bool:
    """Whether memory sufficed: a real device proved it by running; a mock may have been told to ignore it."""
    process, usable = measured["process_bytes"], measured["usable_bytes"]
    simulated = str(measured["device"]).startswith("mock:")
    return not (simulated and process is not None and usable is not None and process > usable)


def does_not_fit(architecture: Architecture, resolved: Resolved, measured: Measured) -> dict[str, Any]:
    """The published JSON of a run that ran out of memory."""
    from tunecast.model.flops import model_flops_per_step
    from tunecast.model.forecast import FORECAST_SCHEMA
    from tunecast.model.forecast_json import run_with_origins
    from tunecast.model.trained import trainable_params
    from tunecast.model.units import gib
    from tunecast.model.whole_run_json import whole_run_to_dict

    usable, run = measured["usable_bytes"], resolved.run
    unmeasured = ("reserved_gib", "process_gib", "allocated_gib", "peak_moment")
    return {
        "schema": FORECAST_SCHEMA,
        "model": architecture.name,
        "gpu": str(measured["gpu"] or measured["hardware"]["name"]),
        "num_gpus": run.num_gpus,
        "fits": False,
        "fit_probability": 0.0,
        "verdict": "no",
        "run": run_with_origins(run, resolved.origins),
        "model_flops_per_step": model_flops_per_step(architecture, run),
        "trainable_params": trainable_params(architecture, run),
        "total_params": architecture.total_params,
        "memory": {
            **dict.fromkeys(unmeasured),
            "usable_gib": None if usable is None else gib(usable),
            "parts_gib": {},
        },
        **dict.fromkeys(UNMEASURED),
        "time_parts_s": {},
        "phases_h": {},
        **whole_run_to_dict(None),
        "origins": {"fits": f"measured:{measured['device']}"},
        "notes": [*resolved.notes, measured["message"]],
    }


UNMEASURED = (
    "executed_flops_per_step",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "bound_by",
    "total_time_h",
    "cost_usd",
    "cost_per_million_tokens_usd",
    "offer",
)
"""Keys of the forecast's JSON that are null when the run did not fit."""


def value_of(interval: Mapping[str, float]) -> Value:
    """A measured interval as a value."""
    from tunecast.model.value import Value

    return Value(value=interval["value"], low=interval["low"], high=interval["high"])


def memory_of(measured: Measured) -> MemoryView:
    """The views that the device has; what was held before the first step, and what the steps added."""
    from tunecast.model.forecast import MemoryView
    from tunecast.model.value import exact

    allocated, at_rest = measured["allocated_bytes"], measured["at_rest_bytes"]
    if allocated is None:
        raise DeviceError(f"{measured['device']} gave no peak of allocated memory; report this with `tunecast env`.")
    reserved, process = measured["reserved_bytes"], measured["process_bytes"]
    parts = {"step": float(allocated)} if at_rest is None else {"at_rest": at_rest, "step": allocated - at_rest}
    return MemoryView(
        allocated_bytes=exact(allocated),
        reserved_bytes=None if reserved is None else exact(reserved),
        process_bytes=None if process is None else exact(process),
        usable_bytes=measured["usable_bytes"],
        peak_moment="measured",
        parts_bytes=parts,
    )


def notes_of(measured: Measured) -> list[str]:
    """How many steps, how far they spread, and what was wrong with the machine."""
    times, spread = measured["step_times_s"], measured["spread_frac"]
    many = "; the interval is that of the median" if len(times) > 1 else ", which says nothing of their spread"
    counted = (
        f"{len(times)} step{'s' if len(times) > 1 else ''} after {len(measured['warmup_s'])} of warm-up, by no Trainer "
        f"(to compare: estimate --no-trainer-loop){many}"
    )
    scatter = [f"spread {spread:.1%}, drift {measured['drift_frac']:+.1%} over the steps"] if len(times) > 1 else []
    return [counted, *scatter, *(f"flag: {flag}" for flag in measured["flags"])]
