"""Named physical factors of one device with its software: what `fit` produces and `estimate` reads.

A factor set turns an operation into seconds. Every factor keeps its 80% interval and its origin
(``measured:<record>``, ``published``, ``datasheet``, ``assumed``). Reading a factor set needs
neither torch nor scipy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOST_S_PER_LAUNCH = "host_s_per_launch"
"""Name of the factor of what the host takes to issue a kernel of the forward."""
HOST_RATIOS = ("recompute", "backward", "dequant", "calls", "layers")
"""What may cost the host otherwise than a launch of the forward: those of `host.HOST_COLUMNS` that whole steps tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One named number with unit, interval and origin."""

    value: float
    low: float
    high: float
    unit: str
    origin: str

    def times(self, multiple: float, *, origin: str = "") -> Factor:
        """So many times this factor, its interval too; of another origin where one is given."""
        return Factor(
            value=self.value * multiple,
            low=self.low * multiple,
            high=self.high * multiple,
            unit=self.unit,
            origin=origin or self.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Parameters of one efficiency curve; `form` names the function in `curves.py` that reads them."""

    form: str
    params: dict[str, float]
    log_sd: float
    """Standard deviation of log(measured / curve) over shapes left out of the fit."""
    origin: str
    residuals: tuple[tuple[float, ...], ...] = ()
    """Optional points (log coordinates..., log residual) that a form may interpolate."""

    def at_rate(self, name: str, rate: float, *, log_sd: float, origin: str) -> Curve:
        """The curve of other kernels on the same device at another rate, by the name of that, and with its own doubt;
        what was measured of these kernels at single shapes says nothing of the others."""
        params = {key: value for key, value in self.params.items() if not key.startswith("gp_")}
        doubt = math.hypot(self.log_sd, log_sd)
        return replace(self, params={**params, name: rate}, log_sd=doubt, residuals=(), origin=origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorSet:
    """Everything the time model needs to know about one device with its software."""

    gpu: str
    """Catalog id, ``cpu`` or ``mock:<id>#<seed>``."""
    curves: dict[str, Curve]
    """By operation kind and dtype, for example ``gemm.bf16``, ``attention.bf16.forward``, ``memory``."""
    factors: dict[str, Factor]
    """Scalars: ``host_s_per_launch``, ``step_overhead_s``, in-step corrections ``scale.gemm``..."""
    step_log_sd: float
    """Standard deviation of log(measured / predicted) step time over steps left out of the fit."""
    memory_overhead_bytes: dict[str, float] = field(default_factory=dict)
    """``context`` (process beyond reserved) and fragmentation terms; see memory.py."""
    synchronous: bool = False
    """True where the host executes the work itself (a CPU): its time and the device's add up."""
    step_params: tuple[str, ...] = ()
    """Names of the factors that were fitted together to whole steps, in the order of `step_covariance`."""
    step_covariance: tuple[tuple[float, ...], ...] = ()
    """Covariance of the logarithms of `step_params`: it widens the interval of a run unlike those measured."""
    notes: tuple[str, ...] = ()


def scaled(factors: FactorSet, multiples: Mapping[str, float]) -> FactorSet:
    """The same factors with some multiplied: a factor by its name, else all seconds of that kind of operation."""
    if not multiples:
        return factors
    changed = dict(factors.factors)
    for name, multiple in multiples.items():
        key = name if name in changed else f"scale.{name}"
        known = changed.get(key) or Factor(value=1.0, low=1.0, high=1.0, unit="1", origin="assumed")
        changed[key] = known.times(multiple)
    return replace(factors, factors=changed)


def with_doubt(own: FactorSet, name: str, variance: float) -> FactorSet:
    """The factors with one more that varies, by the variance of its logarithm, whatever the others do."""
    apart = [(*row, 0.0) for row in own.step_covariance]
    return replace(
        own,
        step_params=(*own.step_params, name),
        step_covariance=(*apart, (*(0.0 for _ in own.step_params), variance)),
    )
