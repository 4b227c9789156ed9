"""Memory of many plans on many devices: the timeline once per plan, compared with every card by arrays.

What the allocator caches is a share of what a step adds, for every plan: replaying its allocations (`replay`) takes
longer than all else of a plan. A forecast of one plan replays them where the card's record follows or, without one,
published runs do, so that its process is another: of 180 plans on one GPU (five models, three methods) the screen's is
over it by 9% in the middle and by 29% at most, and under it by more than 5% in six, by 9% at most. Whoever chooses a
plan, or shows it to a user, forecasts it (`market.refined_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tunecast.model.architecture import Architecture
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.memory import memory_timeline, whole_places
from tunecast.model.overheads import overheads_from_factors
from tunecast.model.parallel import is_split
from tunecast.model.parallel_memory import most_in_flight
from tunecast.model.run import Run
from tunecast.model.step import tape_run
from tunecast.model.tape_peaks import Parts, Place
from tunecast.model.target import Target
from tunecast.model.value import Z80
from tunecast.model.workspaces import workspace_bytes

Flags = npt.NDArray[np.bool_]
_erf = np.vectorize(math.erf, otypes=[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """Tensors of one GPU, plan by plan, without the card's workspaces."""

    stepped_bytes: Array
    """The peak of a step."""
    at_rest_bytes: Array
    loaded_bytes: Array
    """That of loading, which may be more (`loading`); else what rests."""

    @property
    def allocated_bytes(self) -> Array:
        """The larger of both peaks."""
        return np.maximum(self.stepped_bytes, self.loaded_bytes)

    def of(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> PlanMemory:
        """Those of some of the plans."""
        return PlanMemory(
            stepped_bytes=self.stepped_bytes[rows],
            at_rest_bytes=self.at_rest_bytes[rows],
            loaded_bytes=self.loaded_bytes[rows],
        )


@dataclass(slots=True, kw_only=True)
class Fit:
    """(devices, runs) arrays as in `engine.Screen`, being filled."""

    process_bytes: Array
    probability: Array
    probability_uncached: Array
    too_large: Flags

    @classmethod
    def empty(cls, devices: int, runs: int) -> Fit:
        """Nothing known yet."""
        return cls(
            process_bytes=np.full((devices, runs), np.nan),
            probability=np.full((devices, runs), np.nan),
            probability_uncached=np.full((devices, runs), np.nan),
            too_large=np.zeros((devices, runs), dtype=bool),
        )


@lru_cache(maxsize=1024)
def _whole(architecture: Architecture, run: Run, platform: str) -> list[tuple[Place, Parts]]:
    return whole_places(architecture, run, platform=platform)


@lru_cache(maxsize=8192)
def _peaks(architecture: Architecture, run: Run, platform: str) -> tuple[int, int, int]:
    """Of a step, at rest and of loading."""
    whole = None if is_split(run) else _whole(architecture, tape_run(run), platform)
    found = memory_timeline(architecture, run, platform=platform, whole=whole)
    return found.stepped_bytes, found.at_rest_bytes, found.moments["load"]


def memory_of(architecture: Architecture, runs: Sequence[Run], platform: str) -> PlanMemory:
    """Peaks and resting state of every run; from `most_in_flight` micro-batches on they do not grow."""
    micro = [min(run.gradient_accumulation_steps, most_in_flight(run)) for run in runs]
    keys = [replace(run, gradient_accumulation_steps=own) for run, own in zip(runs, micro, strict=True)]
    found = np.array([_peaks(architecture, key, platform) for key in keys], dtype=float)
    return PlanMemory(stepped_bytes=found[:, 0], at_rest_bytes=found[:, 1], loaded_bytes=found[:, 2])


def fits_on(
    fit: Fit, device: int, rows: npt.NDArray[np.int64], memory: PlanMemory, target: Target, factors: FactorSet
) -> None:
    """Fill in `rows` of one device: the same sums as `memory.memory_timeline`, without a replay, and
    `fits.fit_probability`, by arrays."""
    overheads = overheads_from_factors(factors)
    if overheads is None:
        return
    stepped, loaded = memory.stepped_bytes + workspace_bytes(target.compute_capability), memory.loaded_bytes
    transient = memory.stepped_bytes - memory.at_rest_bytes
    fragmentation, context = overheads.fragmentation_frac, overheads.context_bytes
    process = np.maximum(stepped + fragmentation.value * transient, loaded) + context.value
    high = np.maximum(stepped + fragmentation.high * transient, loaded) + context.high
    least = np.maximum(stepped, loaded) + context.value
    fit.process_bytes[device, rows] = process
    if target.usable_bytes is None:
        return
    fit.too_large[device, rows] = least > target.usable_bytes
    own_log_sd = factors.memory_overhead_bytes.get("allocated_log_sd", 0.0)
    elastic = np.log(process / least)
    log_sd = np.hypot(np.hypot(own_log_sd, np.log(high / process) / Z80), elastic / 2.0 / Z80)
    fit.probability[device, rows] = _below(np.log(target.usable_bytes / process) + elastic / 2.0, log_sd)
    beyond = overheads.replayed_frac or fragmentation
    most = least + (beyond.high - max(beyond.value, 0.0)) * transient + context.high - context.value
    log_sd = np.hypot(own_log_sd, np.log(most / least) / Z80)
    fit.probability_uncached[device, rows] = _below(np.log(target.usable_bytes / least), log_sd)


def _below(room: Array, log_sd: Array) -> Array:
    """Probability that a log-normal error of `log_sd` stays below `room`; without an error 0 or 1."""
    sure = log_sd <= 0.0
    scaled = room / np.where(sure, 1.0, log_sd) / math.sqrt(2.0)
    return np.asarray(np.where(sure, (room >= 0.0).astype(float), 0.5 * (1.0 + _erf(scaled))))
