"""All rows of a fit timed at once: the same clocks as a forecast's, as arrays over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tunecast.model.time import COLUMNS, FLOOR, PhaseTable, Stack, stacked, step_seconds

Array = npt.NDArray[np.float64]
SETTLED_AFTER = 6
"""Micro-steps after which the host's lead no longer changes what a further one takes."""


def clock_values(params: Mapping[str, float]) -> dict[str, float]:
    """Scalar factors of the clocks that these parameters mean; what only moves bytes follows memory."""
    scales = ("gemm", "attention", "memory", "dequant", "link")
    values = {f"scale.{name}": 1.0 / params[name] for name in scales}
    values |= {"scale.loss": values["scale.memory"], "scale.optimizer": values["scale.memory"]}
    values |= {name: params[name] for name in ("host_s_per_launch", "overlap_frac")}
    return values | {"scale.host_hooks": params["host_hooks"]}


def settled_stacks(tables: Sequence[PhaseTable]) -> tuple[Stack, list[int], Stack, Array]:
    """All rows with at most `SETTLED_AFTER` micro-steps; the places of those that have more, these with one
    micro-step less, and how many more they have: once the clocks have settled, every micro-step takes as long.
    """
    short = [replace(table, micro_steps=min(table.micro_steps, SETTLED_AFTER)) for table in tables]
    long = [place for place, table in enumerate(tables) if table.micro_steps > SETTLED_AFTER]
    less = [replace(tables[place], micro_steps=SETTLED_AFTER - 1) for place in long] or short[:1]
    more = np.array([tables[place].micro_steps - SETTLED_AFTER for place in long], dtype=float)
    return stacked(short), long, stacked(less), more


def slowed(stack: Stack, work: Array | None, host: Array | None) -> Stack:
    """The rows with their device work (all but kernels' floors) and launches slowed by logs."""
    if work is not None:
        columns = np.array([column != FLOOR for column in COLUMNS])
        stack = replace(stack, device_s=stack.device_s * np.exp(work[:, None, None] * columns))
    if host is not None:
        stack = replace(stack, launches=stack.launches * np.exp(host)[:, None, None])
    return stack


def log_seconds(tables: Sequence[PhaseTable]) -> Callable[..., Array]:
    """A function of (parameters, work, host): log seconds of every row's step.

    `work` and `host` are logs by row, by which its device work and its launches are slower; None: by none.
    """
    whole, long, less, more = settled_stacks(tables)

    def timed(params: Mapping[str, float], work: Array | None = None, host: Array | None = None) -> Array:
        values = clock_values(params)

        def step_s(stack: Stack, work: Array | None, host: Array | None) -> Array:
            return step_seconds(slowed(stack, work, host), values, synchronous=False)

        found = step_s(whole, work, host)
        if long:
            picked = (None if each is None else each[long] for each in (work, host))
            found[long] += more * (found[long] - step_s(less, *picked))
        return np.log(found)

    return timed
