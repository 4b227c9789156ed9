"""Whole optimizer steps of a mock: the real code's kernel stream from the oracle, its memory through an allocator."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

from tunecast.calibrate.devices.protocol import MemoryReading, TrialSpec
from tunecast.calibrate.mock.physics import AllocatorPhysics
from tunecast.calibrate.mock.simulator import Stream, compile_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """What the real code does in one step, ready to simulate."""

    stream: Stream
    loaded_bytes: int
    at_rest_bytes: int
    peak_bytes: int
    counts: dict[str, Any]
    """Trainable parameters and tokens of one step, as the real steps report them."""


def traced_step(params: dict[str, Any]) -> TracedStep:
    """Trace the step that a ``step`` trial asks for; the same run is traced once per process."""
    return _traced(json.dumps(params["architecture"], sort_keys=True), json.dumps(params["run"], sort_keys=True))


def modules_of(params: dict[str, Any]) -> int:
    """Modules of the real model that a ``modules`` trial builds; the same model is built once per process."""
    return _built_modules(json.dumps(params["architecture"], sort_keys=True), json.dumps(params["run"], sort_keys=True))


@lru_cache
def _built_modules(architecture: str, run: str) -> int:
    from tunecast.calibrate.trace.flash import refuse_third
    from tunecast.calibrate.trace.hf import build_model
    from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict

    asked = run_from_dict(json.loads(run))
    refuse_third(asked)
    model = build_model(architecture_from_dict(json.loads(architecture)), asked, device="meta")
    return sum(1 for _ in model.modules())


def step_key(spec: TrialSpec) -> str:
    """Identity of a ``step`` or ``modules`` trial by what is unlike a default in its model and run: a field that
    tunecast learns later leaves the noise of steps that do not use it as it was."""
    from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict

    own = {name: value for name, value in spec.params.items() if name not in ("architecture", "run")}
    model, run = architecture_from_dict(spec.params["architecture"]), run_from_dict(spec.params["run"])
    return f"{spec.bench}({_unlike_defaults(model)},{_unlike_defaults(run)},{sorted(own.items())})"


def _unlike_defaults(value: Any) -> str:
    """The text of a dataclass, or of tuples of them, without fields that have their default."""
    if isinstance(value, tuple):
        return f"({','.join(map(_unlike_defaults, value))})"
    if not is_dataclass(value):
        return repr(value)
    told = {field.name: getattr(value, field.name) for field in fields(value)}
    default = {field.name: _default(field) for field in fields(value)}
    unlike = [f"{name}={_unlike_defaults(told[name])}" for name in sorted(told) if told[name] != default[name]]
    return f"{type(value).__name__}({','.join(unlike)})"


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@lru_cache(maxsize=128)
def _traced(architecture_json: str, run_json: str) -> TracedStep:
    from tunecast.calibrate.trace.depth import trace_extended
    from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict

    architecture = architecture_from_dict(json.loads(architecture_json))
    run = run_from_dict(json.loads(run_json))
    trace = trace_extended(architecture, run, platform="cuda")
    return TracedStep(
        stream=compile_stream(trace.stream),
        loaded_bytes=trace.memory.loaded_bytes,
        at_rest_bytes=trace.memory.at_rest_bytes,
        peak_bytes=trace.memory.peak_bytes,
        counts={"trainable_params": trace.trainable_params, "tokens_per_step": run.tokens_per_step},
    )


def memory_reading(
    allocator: AllocatorPhysics, peak_bytes: int, resting_bytes: int, at_rest_bytes: int | None
) -> MemoryReading:
    """The four views of a simulated caching allocator.

    What rests was reserved once; what comes and goes in a step leaves fragments; segments are rounded
    up; the context is seen only from outside the process.
    """
    moving = max(0, peak_bytes - resting_bytes)
    segments = -(-int(peak_bytes + allocator.fragmentation * moving) // allocator.segment_bytes)
    reserved = segments * allocator.segment_bytes
    return MemoryReading(
        allocated_bytes=peak_bytes,
        reserved_bytes=reserved,
        process_bytes=reserved + allocator.context_bytes,
        at_rest_bytes=at_rest_bytes,
    )
