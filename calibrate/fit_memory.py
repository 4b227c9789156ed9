"""Memory terms of one device, from the readings of whole steps: how exact tensors are, and what lies beyond them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tunecast.calibrate.fit_trials import Trial, usable
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.model.memory import memory_timeline
from tunecast.model.replay import replayed_bytes
from tunecast.model.value import Z80

QUANTILES = (0.1, 0.5, 0.9)
LEAST_REPLAYED = 5
"""Steps below which nothing is said about how near a replay comes."""


def gauge_memory(trials: Sequence[Trial], *, platform: str, workspaces: int = 0) -> dict[str, float]:
    """``context``, ``fragmentation_frac`` and ``replayed_frac`` with their 80% bounds, and ``allocated_log_sd``; absent
    where unread.

    Context: process beyond reserved, or beyond allocated on a device without a caching allocator.
    Fragmentation: reserved beyond allocated, per byte that a step allocates beyond its resting state; replayed: beyond
    what a replay of its allocations reserves. `workspaces` are the bytes that the card keeps for matrix products.
    """
    steps = usable(trials, "step")
    readings = [trial.get("memory") or {} for trial in steps]
    out: dict[str, float] = {}
    out |= _bounds("context", [found for reading in readings for found in context_bytes(reading)])
    out |= _bounds("fragmentation_frac", [found for reading in readings for found in _fragmentation(reading)])
    if platform == "cuda":
        out |= _replayed_bounds(steps, workspaces)
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


def _replayed_bounds(steps: Sequence[Trial], workspaces: int) -> dict[str, float]:
    """``replayed_frac`` with its 80% bounds; nothing where fragmentation as one share tells these steps as well.

    A replay is exact or it is off by a whole segment, which a few dozen steps show once or not at all: quantiles would
    leave that out, so the bounds are those of a normal error with the same mean square.
    """
    found = [(beyond, share) for trial in steps for beyond, share in beyond_replay(trial, workspaces)]
    if len(found) < LEAST_REPLAYED:
        return {}
    replayed, shares = np.array(found).T
    middle = float(np.median(replayed))
    spread = float(np.sqrt(np.mean((replayed - middle) ** 2)))
    if spread >= float(np.sqrt(np.mean((shares - np.median(shares)) ** 2))):
        return {}
    return {
        "replayed_frac_low": middle - Z80 * spread,
        "replayed_frac": middle,
        "replayed_frac_high": middle + Z80 * spread,
    }


def beyond_replay(trial: Trial, workspaces: int) -> list[tuple[float, float]]:
    """Reserved beyond the replay and beyond allocated, per byte of the step; nothing where either is unknown."""
    reading = trial.get("memory") or {}
    share = _fragmentation(reading)
    if not share:
        return []
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    replayed = replayed_bytes(architecture, run, "cuda", workspaces)
    if replayed is None:
        return []
    beyond = (reading["reserved_bytes"] - replayed) / (reading["allocated_bytes"] - reading["at_rest_bytes"])
    return [(beyond, share[0])]


def _allocated_error(trial: Trial, platform: str, workspaces: int) -> list[float]:
    """log(predicted / measured) of the peak allocated; nothing where it was not read."""
    measured = (trial.get("memory") or {}).get("allocated_bytes")
    if not measured:
        return []
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    predicted = memory_timeline(architecture, run, platform=platform, workspace_bytes=workspaces)
    return [math.log(predicted.allocated_bytes / measured)]
