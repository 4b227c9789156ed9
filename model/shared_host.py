"""What a record of one card says about another in the same machine: the host, and the software that issues kernels.

A calibration measures how long this host with this software takes per launch, and how much longer in recomputation,
backward and dequantization. None of that is the card's. The prior believes log(seconds per launch) with variance v; the
record measured it with variance s (its own 80% interval), so the posterior is the usual normal one,

    log h = (1 - w) log h_prior + w log h_record,    w = v / (v + s),    variance v (1 - w),

and the phases' ratios, which the prior takes as 1, move by the same share. Curves, scales of kernels and memory are the
card's own and stay the prior's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.factors import HOST_S_PER_LAUNCH, Factor, FactorSet
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.trainer_loop import HOST_WALKS, WALK_LAUNCHES
from tunecast.model.value import Z80

RATIO_PREFIX = "scale.host_"
MEASURED = "measured:"
ASSUMED = {HOST_WALKS: WALK_LAUNCHES}
"""Ratios that no prior takes as 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """The record whose host and software other cards share."""

    gpu: str
    factors: FactorSet
    flags: tuple[str, ...] = ()
    """What was wrong while it was measured."""

    @property
    def name(self) -> str:
        """The record's file, where its factors name it."""
        return self.factors.factors[HOST_S_PER_LAUNCH].origin.removeprefix(MEASURED)


def host_record(records: Mapping[str, Mapping[str, Any]]) -> HostRecord:
    """The only record given with ``--share-host``; refused where there is none, or more."""
    if len(records) != 1:
        raise InputError(
            f"--share-host takes the host from one --record, and {len(records)} were given; give one record of a GPU "
            "in the same machine."
        )
    ((gpu, record),) = records.items()
    if gpu == "cpu":
        raise InputError(
            "--share-host takes the host's launches from a GPU's record, and this record is of a CPU, which launches "
            "nothing; calibrate a GPU of the same machine."
        )
    return HostRecord(gpu=gpu, factors=factor_set_from_record(record), flags=tuple(record.get("flags") or ()))


def with_shared_host(prior: FactorSet, shared: HostRecord) -> FactorSet:
    """The prior of another card, its host moved to the record's by shrinkage."""
    variance = _prior_variance(prior)
    measured = shared.factors.factors[HOST_S_PER_LAUNCH]
    weight = variance / (variance + _log_variance(measured))
    origin = f"reference:{shared.name}"
    left = math.sqrt(variance * (1.0 - weight))

    def between(believed: float, found: Factor) -> Factor:
        value = believed ** (1.0 - weight) * found.value**weight
        wide = math.exp(Z80 * left)
        return Factor(value=value, low=value / wide, high=value * wide, unit=found.unit, origin=origin)

    moved = {HOST_S_PER_LAUNCH: between(prior.factors[HOST_S_PER_LAUNCH].value, measured)}
    for name, found in shared.factors.factors.items():
        if name.startswith(RATIO_PREFIX):
            moved[name] = between(ASSUMED.get(name, 1.0), found)
    note = (
        f"host and software as measured on {shared.gpu} ({shared.name}), shrunk towards the prior by {1 - weight:.0%}"
    )
    return replace(
        prior,
        factors={**prior.factors, **moved},
        step_covariance=_narrowed(prior, math.sqrt(1.0 - weight)),
        notes=(*prior.notes, note),
    )


def _prior_variance(prior: FactorSet) -> float:
    """Of log(seconds per launch)."""
    place = prior.step_params.index(HOST_S_PER_LAUNCH)
    return prior.step_covariance[place][place]


def _narrowed(prior: FactorSet, share: float) -> tuple[tuple[float, ...], ...]:
    """The covariance with the standard deviation of the host's seconds at `share` of what it was."""
    sds = [share if name == HOST_S_PER_LAUNCH else 1.0 for name in prior.step_params]
    rows = zip(sds, prior.step_covariance, strict=True)
    return tuple(tuple(own * other * entry for other, entry in zip(sds, row, strict=True)) for own, row in rows)


def _log_variance(factor: Factor) -> float:
    return (math.log(factor.high / factor.low) / 2.0 / Z80) ** 2
