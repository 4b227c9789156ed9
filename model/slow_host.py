"""How slow the host may be: a spread that no slope at a point tells.

A step takes about the longer of two clocks. Near the place where they cross, the error of the host counts in full
upwards and not at all downwards, so that a log-normal around the forecast reaches too low above it: with more work for
the device, launches as many as before, the upper end would fall.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.value import Z80

LOG_STEP = 1e-3
"""Step of the numerical derivatives of log(time) by log(factor)."""
HOST_PREFIXES = ("host", "scale.host")
"""How names of factors begin that move the host's clock."""


def host_steps(names: Sequence[str], covariance: Array) -> dict[str, float]:
    """Spreads of what moves the host's clock: it counts only where it overtakes the device's, so no slope at a point
    tells what its spread does."""
    named = zip(names, np.sqrt(np.diag(covariance)), strict=True)
    return {name: max(float(sd), LOG_STEP) for name, sd in named if name.startswith(HOST_PREFIXES)}


def with_slow_host(
    values: Mapping[str, float],
    names: Sequence[str],
    covariance: Array,
    host_s: Callable[[Mapping[str, float]], float],
) -> dict[str, float]:
    """The factors at the likeliest point where the host's seconds are at the upper end of their 80% interval.

    `names` and their `covariance` are of logarithms; `host_s` gives the host's seconds at given factors. To first
    order that point lies along covariance times slope (Hasofer and Lind 1974).
    """
    found = dict(values)
    own = [place for place, name in enumerate(names) if name.startswith(HOST_PREFIXES)]
    if not own or host_s(found) <= 0.0:
        return found

    def at(name: str, moved_by: float) -> float:
        return float(np.log(host_s({**found, name: found.get(name, 1.0) * float(np.exp(moved_by))})))

    slope = np.array([(at(names[i], LOG_STEP) - at(names[i], -LOG_STEP)) / (2 * LOG_STEP) for i in own])
    apart = covariance[np.ix_(own, own)] @ slope
    sd = float(np.sqrt(max(slope @ apart, 0.0)))
    moves = Z80 * apart / sd if sd > 0.0 else apart
    return found | {
        names[i]: found.get(names[i], 1.0) * float(np.exp(move)) for i, move in zip(own, moves, strict=True)
    }
