"""All rows of a fit timed at once: the same clocks as a forecast's, as arrays over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tunecast.model.time import PhaseTable, Stack, stacked, step_seconds

Array = npt.NDArray[np.float64]
LINK_SECONDS = ("communication_s", "once_s", "blocking_s")
"""What of a phase table goes over links."""


def clock_values(efficiency: Mapping[str, float], overlap_frac: float, host_s_per_launch: float) -> dict[str, float]:
    """Scalar factors of the clocks that these efficiencies mean; what only moves bytes follows memory."""
    values = {f"scale.{name}": 1.0 / value for name, value in efficiency.items() if name != "link"}
    values |= {"scale.loss": values["scale.memory"], "scale.optimizer": values["scale.memory"]}
    return values | {"host_s_per_launch": host_s_per_launch, "overlap_frac": min(overlap_frac, 1.0)}


def groups_of_equal_steps(tables: Sequence[PhaseTable]) -> list[tuple[list[int], Stack]]:
    """Rows with as many micro-steps each: rows with few need not wait for those with many."""
    places: dict[int, list[int]] = {}
    for place, table in enumerate(tables):
        places.setdefault(table.micro_steps, []).append(place)
    return [(where, stacked([tables[place] for place in where])) for where in places.values()]


def log_seconds(tables: Sequence[PhaseTable]) -> Callable[[Mapping[str, float], float, float], Array]:
    """A function of (efficiency, overlap_frac, host_s_per_launch): log seconds of every row's step."""
    groups = groups_of_equal_steps(tables)

    def timed(efficiency: Mapping[str, float], overlap_frac: float, host_s_per_launch: float) -> Array:
        values = clock_values(efficiency, overlap_frac, host_s_per_launch)
        found = np.empty(len(tables))
        for where, stack in groups:
            sent = {name: getattr(stack, name) / efficiency["link"] for name in LINK_SECONDS}
            found[where] = np.log(step_seconds(replace(stack, **sent), values, synchronous=False))
        return found

    return timed
