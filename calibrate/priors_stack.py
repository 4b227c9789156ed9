"""All rows of a fit timed at once: the same clocks as a forecast's, as arrays over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tunecast.calibrate.start_up import START_UP
from tunecast.model.columns import CACHED
from tunecast.model.exposed import SHARES
from tunecast.model.factors import HOST_S_PER_LAUNCH
from tunecast.model.phase_table import PhaseTable
from tunecast.model.priors import ISSUING, no_faster
from tunecast.model.time import COLUMNS, Stack, stacked, step_seconds

Array = npt.NDArray[np.float64]
MOVED = ("gemm", "attention", "memory", "dequant", "link", "host")
"""Kinds of work that rows may differ in."""
FOLLOWS = {"loss": "memory", "optimizer": "memory", CACHED: "memory"}
"""Columns of a step that only move bytes."""
SETTLED_AFTER = 6
"""Micro-steps after which the host's lead no longer changes what a further one takes."""


def clock_values(params: Mapping[str, float]) -> dict[str, float]:
    """Scalar factors of the clocks that these parameters mean; what only moves bytes follows memory."""
    scales = ("gemm", "attention", "memory", "dequant", "link")
    values = {f"scale.{name}": 1.0 / params[name] for name in scales}
    values["scale.memory"] = float(no_faster(np.array(values["scale.memory"])))
    values |= {"scale.loss": values["scale.memory"], "scale.optimizer": values["scale.memory"]}
    values |= {name: params[name] for name in (HOST_S_PER_LAUNCH, *SHARES)}
    return values | {f"scale.{name}": params[name] for name in ISSUING}


def settled_stacks(tables: Sequence[PhaseTable]) -> tuple[Stack, list[int], Stack, Array]:
    """All rows with at most `SETTLED_AFTER` micro-steps; the places of those that have more, these with one
    micro-step less, and how many more they have: once the clocks have settled, every micro-step takes as long.
    """
    short = [replace(table, micro_steps=min(table.micro_steps, SETTLED_AFTER)) for table in tables]
    long = [place for place, table in enumerate(tables) if table.micro_steps > SETTLED_AFTER]
    less = [replace(tables[place], micro_steps=SETTLED_AFTER - 1) for place in long] or short[:1]
    more = np.array([tables[place].micro_steps - SETTLED_AFTER for place in long], dtype=float)
    return stacked(short), long, stacked(less), more


def slowed(stack: Stack, slower: Array | None, memory: float) -> Stack:
    """The rows with their work slowed by logs, (rows, `MOVED`); what only moves bytes follows memory, floors stay.

    `memory` is the fraction of the datasheet's bandwidth that all rows share: none moves bytes faster than all of it.
    """
    if slower is None:
        return stack
    by_name = dict(zip(MOVED, np.exp(slower).T, strict=True))
    by_name["memory"] = no_faster(by_name["memory"] / memory) / no_faster(np.array(1.0 / memory))
    by_column = [by_name.get(FOLLOWS.get(column, column), np.ones(len(slower))) for column in COLUMNS]
    link = by_name["link"][:, None]
    device_s = stack.device_s * np.stack(by_column, axis=1)[:, None, :]
    before, after = (work_s.sum(axis=2) for work_s in (stack.device_s, device_s))
    of_segment = np.divide(after, before, out=np.ones_like(after), where=before > 0.0)
    return replace(
        stack,
        device_s=device_s,
        gap_work_s=stack.gap_work_s * of_segment[:, :, None],
        communication_s=stack.communication_s * link,
        once_s=stack.once_s * link,
        blocking_s=stack.blocking_s * link,
        ring_s=stack.ring_s * link,
        launches=stack.launches * by_name["host"][:, None, None],
    )


def log_seconds(tables: Sequence[PhaseTable], start_ups: Sequence[float] = ()) -> Callable[..., Array]:
    """A function of (parameters, logs by which each row's `MOVED` are slower, None: by none): log seconds of every
    row's step, with the part of a start that each has (`start_up`)."""
    whole, long, less, more = settled_stacks(tables)
    shares = np.array(start_ups or [0.0] * len(tables))

    def timed(params: Mapping[str, float], slower: Array | None = None) -> Array:
        values = clock_values(params)
        found = step_seconds(slowed(whole, slower, params["memory"]), values, synchronous=False)
        if long:
            picked = slowed(less, None if slower is None else slower[long], params["memory"])
            found[long] += more * (found[long] - step_seconds(picked, values, synchronous=False))
        return np.log(found + shares * params.get(START_UP, 0.0))

    return timed
