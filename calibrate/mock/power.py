"""Power and heat decide the clock.

The power controller averages over tens of milliseconds, so steps in a row run at one clock: the highest at
which the mean power of their mix of kernels stays under the limit. Waiting for the host draws idle power, so
a host-bound step runs at a higher clock than the matrix products it is made of would alone. What is over
before the controller has averaged, as a microbenchmark is, runs at a higher clock than the same for long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.physics import PowerPhysics

LOWEST_CLOCK = 0.35
"""Clock, relative to the catalog's, below which cards do not go under load (A100: 510 of 1,410 MHz)."""


LASTING_S = math.inf
"""Of work that never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a stretch of work asks of the card at one clock."""

    wall_s: float
    busy_s: float
    tensor_s: float
    """Tensor-core seconds at the full catalog rate: energy per product does not depend on how long it takes."""
    dram_s: float
    lasts_s: float = LASTING_S
    """How long such work goes on, on a card that was idle before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operating:
    """The point at which the card settles under a load."""

    clock: float
    """Relative to the catalog's boost clock."""
    power_w: float
    temperature_c: float
    throttle_reasons: tuple[str, ...]


def mean_power_w(card: Card, power: PowerPhysics, load: Load, clock: float, hotness: float) -> float:
    """Mean power of a load at a clock; `hotness` is 0 on a cold card, 1 after minutes of work."""
    busy, tensor, dram = (x / load.wall_s for x in (load.busy_s, load.tensor_s, load.dram_s))
    static = power.idle + power.leakage * hotness
    dynamic = power.active * busy * clock**power.exponent + power.tensor * tensor * clock ** (power.exponent - 1.0)
    total_w: float = card.tdp_w * (static + dynamic + power.dram * min(1.0, dram))
    return total_w


def ceiling_clock(power: PowerPhysics, temperature_c: float) -> float:
    """Highest clock at a temperature, before the power limit: a slow drift, then the thermal cap."""
    drift = power.drift_per_c * (temperature_c - power.ambient_c)
    above = max(0.0, temperature_c - power.throttle_c)
    return power.headroom * (1.0 - drift) * (1.0 - power.throttle_per_c * above)


def settle_clock(card: Card, power: PowerPhysics, load_at: Callable[[float], Load], hotness: float) -> Operating:
    """The highest clock whose mean power stays within the limit, by bisection."""
    temperature = temperature_c(power, hotness)
    top = ceiling_clock(power, temperature)
    limit_w, idle_w = card.tdp_w * power.limit, card.tdp_w * power.idle

    def seen_w(clock: float) -> float:
        """What the controller and the sensor average."""
        load = load_at(clock)
        drawn_w = mean_power_w(card, power, load, clock, hotness)
        return idle_w + (drawn_w - idle_w) * min(1.0, load.lasts_s / power.control_s)

    clock = _bisect(lambda c: seen_w(c) - limit_w, LOWEST_CLOCK, top) if seen_w(top) > limit_w else top
    reasons = _reasons(capped=clock < top, hot=temperature > power.throttle_c)
    return Operating(clock=clock, power_w=seen_w(clock), temperature_c=temperature, throttle_reasons=reasons)


def _bisect(excess: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(18):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return low


def _reasons(*, capped: bool, hot: bool) -> tuple[str, ...]:
    named = (("sw_power_cap", capped), ("sw_thermal_slowdown", hot))
    return tuple(name for name, true in named if true)


def temperature_c(power: PowerPhysics, hotness: float) -> float:
    """Between ambient and the temperature under lasting load."""
    return power.ambient_c + hotness * (power.hot_c - power.ambient_c)


def warmed(power: PowerPhysics, hotness: float, seconds: float) -> float:
    """Hotness after `seconds` of load: exponential approach with the thermal time constant."""
    return 1.0 - (1.0 - hotness) * math.exp(-seconds / power.tau_s)
