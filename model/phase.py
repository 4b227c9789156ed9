"""One phase of a run around its training, and the amounts that all phases move.

Times of one phase's steps add: reading, copying and writing are taken one after another, as the plain libraries do
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tunecast.model.factors import Factor
from tunecast.model.phase_rates import Rates, assumed_duration_s
from tunecast.model.units import GIGA, HOUR_S, MEGA, TERA
from tunecast.model.value import Value, total

GPU_MACHINE = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one run has to move and do, whatever the machine; see `run_work.work_of`."""

    steps: int
    tokens: float
    """Processed by the whole run, epochs and padding included."""
    dataset_tokens: float
    """Of one epoch."""
    tokens_per_step: int
    max_length: int
    num_gpus: int
    download_bytes: float
    """The published checkpoint."""
    total_params: int
    quantized: bool
    on_cpu: bool
    model_bytes: float
    """What the final save writes: the adapter, or the whole model."""
    checkpoint_bytes: float
    """What one checkpoint writes: the same, with the optimizer's state."""
    exports: Mapping[str, float] = field(default_factory=dict)
    """Bytes of the model in each quantized format that it can be exported to."""
    writers: int = 1
    """GPUs that write a share of a checkpoint each, where the optimizer's state is sharded."""
    machines: int = 1
    """On which these are."""
    forward_frac: float
    """Forward pass over the whole step, in time: what an evaluation takes of it."""
    compiles: bool = False
    adapters: bool = True
    """Whether what is saved is an adapter; else the whole model."""
    samples_per_row: float = 1.0
    """Samples in a row of `max_length` tokens, in evaluations too: what packs a training set packs the other
    (``eval_packing`` of TRL's ``SFTConfig``, ``eval_sample_packing`` of axolotl, unless said otherwise)."""
    full_frac: float = 1.0
    """Work of all steps over that of as many full ones (`step_count.full_frac`)."""
    least: float = 1.0
    """Tokens to process at the low end of what is assumed of the data, over `tokens`."""
    most: float = 1.0
    """At the high end."""

    @property
    def merged_bytes(self) -> float:
        """The whole model in 16 bits."""
        return 2.0 * self.total_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of the run."""

    name: str
    hours: Value
    rates: tuple[tuple[str, Factor], ...] = ()
    """The rates it was computed with, by name."""
    origin: str = "assumed"
    """Of its rates, the least certain: assumed, datasheet, cli or measured:<record>; ``forecast`` for training."""
    how: str = ""
    """What is moved or done, in words."""
    usd_per_h: float | None = None
    """Of another machine that does it; None for the machine with the GPUs."""

    @property
    def machine(self) -> str:
        """``gpu`` for the rented machine itself, ``other`` for a cheaper one."""
        return GPU_MACHINE if self.usd_per_h is None else "other"


WORST_FIRST = ("assumed", "datasheet", "cli")


def least_certain(origins: Iterable[str]) -> str:
    """The origin that says least: assumed before datasheet before given before measured."""
    found = list(origins)
    return next((origin for origin in WORST_FIRST if origin in found), found[0] if found else "assumed")


def as_value(rate: Factor) -> Value:
    """A rate as a value with its interval."""
    return Value(value=rate.value, low=rate.low, high=rate.high)


def moved_h(amount: float, rate: Factor) -> Value:
    """Hours for an amount at a rate; the fast end of the rate is the short end of the time."""
    hours = amount / HOUR_S
    return Value(value=hours / rate.value, low=hours / rate.high, high=hours / rate.low)


def at_rates(name: str, parts: Iterable[tuple[float, str]], rates: Rates, how: str) -> Phase:
    """A phase that moves each amount at its named rate, one after another."""
    listed = [(amount, rate_name) for amount, rate_name in parts if amount > 0.0]
    used = tuple((rate_name, rates[rate_name]) for _, rate_name in listed)
    return Phase(
        name=name,
        hours=total(moved_h(amount, rates[rate_name]) for amount, rate_name in listed),
        rates=used,
        origin=least_certain(rate.origin for _, rate in used),
        how=how,
    )


def gigabytes(n_bytes: float) -> str:
    """Decimal terabytes, gigabytes or megabytes, as clouds bill them."""
    if n_bytes >= TERA:
        return f"{n_bytes / TERA:.3g} TB"
    return f"{n_bytes / GIGA:.3g} GB" if n_bytes >= GIGA else f"{n_bytes / MEGA:.3g} MB"


def fixed(name: str, times: float = 1.0) -> Phase:
    """A phase of an assumed length."""
    length = as_value(assumed_duration_s(name))
    return Phase(name=name, hours=length.scaled(times / HOUR_S), origin=assumed_duration_s(name).origin)
