"""Memory terms of one device, from the readings of whole steps: how exact tensors are, and what lies beyond them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tunecast.calibrate.fit_trials import Trial, usable
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.model.memory import memory_timeline
from tunecast.model.value import Z80

QUANTILES = (0.1, 0.5, 0.9)


def gauge_memory(trials: Sequence[Trial], *, platform: str, workspaces: int = 0) -> dict[str, float]:
    """``context`` and ``fragmentation_frac`` with their 80% bounds, and ``allocated_log_sd``; absent where unread.

    Context: process beyond reserved, or beyond allocated on a device without a caching allocator.
    Fragmentation: reserved beyond allocated, per byte that a step allocates beyond its resting state. `workspaces` are
    the bytes that the card keeps for matrix products.
    """
    steps = usable(trials, "step")
    readings = [trial.get("memory") or {} for trial in steps]
    out: dict[str, float] = {}
    out |= _bounds("context", [found for reading in readings for found in context_bytes(reading)])
    out |= _bounds("fragmentation_frac", [found for reading in readings for found in _fragmentation(reading)])
    errors = [found for trial in steps for found in _allocated_error(trial, platform, workspaces)]
    if errors:
        out["allocated_log_sd"] = float(np.quantile(np.abs(errors), 0.8)) / Z80
    return out


def _bounds(name: str, samples: Sequence[float]) -> dict[str, float]:
    if not samples:
        return {}
    low, middle, high = np.maximum(np.quantile(samples, QUANTILES), 0.0)
    return {f"{name}_low": float(low), name: float(middle), f"{name}_high": float(high)}


def context_bytes(reading: Mapping[str, float | None]) -> list[float]:
    """The process beyond what its allocator reserved, or allocated where nothing is reserved; none where unread."""
    process = reading.get("process_bytes")
    below = reading.get("reserved_bytes")
    below = reading.get("allocated_bytes") if below is None else below
    return [] if process is None or below is None else [process - below]


def _fragmentation(reading: dict[str, float | None]) -> list[float]:
    reserved, allocated = reading.get("reserved_bytes"), reading.get("allocated_bytes")
    at_rest = reading.get("at_rest_bytes")
    if reserved is None or allocated is None or at_rest is None or allocated <= at_rest:
        return []
    return [(reserved - allocated) / (allocated - at_rest)]


def _allocated_error(trial: Trial, platform: str, workspaces: int) -> list[float]:
    """log(predicted / measured) of the peak allocated; nothing where it was not read."""
    measured = (trial.get("memory") or {}).get("allocated_bytes")
    if not measured:
        return []
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    predicted = memory_timeline(architecture, run, platform=platform, workspace_bytes=workspaces)
    return [math.log(predicted.allocated_bytes / measured)]
