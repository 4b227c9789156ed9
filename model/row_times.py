"""How much longer the mean step is than the step of the mean row, where rows are samples of unlike lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tunecast.model.architecture import Architecture
from tunecast.model.engine import seconds_at_lengths
from tunecast.model.row_lengths import Rows
from tunecast.model.rows import LENGTHS
from tunecast.model.run import Run
from tunecast.model.target import Target
from tunecast.model.time import StepTime

OF_NO_LENGTH = ("optimizer", "trainer", "units", "overhead")
"""Parts of a step that take as long whatever the length of rows."""
OF_ROWS = (*LENGTHS, "packing", "group_by_length")
"""Options that say how rows are made."""
LEAST_TOLD = 0.01
"""By so much a step has to be longer for a note to tell of it."""


def mean_step_ratio(
    rows: Rows | None, architecture: Architecture, run: Run, target: Target, options: Mapping[str, Any]
) -> float:
    """Mean of the steps at all likely lengths of the rows over the step at the mean length; 1 where they are alike, and
    where a model has no formulas to time them by."""
    if rows is None or len({*rows.lengths}) == 1 or architecture.settings:
        return 1.0
    told = {name: value for name, value in options.items() if name not in OF_ROWS}
    *each_s, mean_row_s = seconds_at_lengths(architecture, run, [*rows.lengths, rows.length], target, told)
    return float(np.mean(each_s) / mean_row_s)


def stretched(timing: StepTime, ratio: float) -> StepTime:
    """The step longer by a share, and for it by the same share every part that the length of rows decides."""
    if ratio == 1.0:
        return timing
    return replace(
        timing,
        step_time_s=timing.step_time_s.scaled(ratio),
        slow_host_s=timing.slow_host_s * ratio,
        least_s=timing.least_s * ratio,
        parts_s=_longer(timing.parts_s, ratio),
        phases_s=_longer(timing.phases_s, ratio),
        device_s=timing.device_s * ratio,
        host_s=timing.host_s * ratio,
    )


def _longer(parts_s: Mapping[str, float], ratio: float) -> dict[str, float]:
    """Parts whose sum is so many times theirs, those of `OF_NO_LENGTH` as they are."""
    whole = sum(parts_s.values())
    moved = whole - sum(parts_s.get(name, 0.0) for name in OF_NO_LENGTH)
    more = 1.0 + (ratio - 1.0) * whole / moved
    return {name: part * (1.0 if name in OF_NO_LENGTH else more) for name, part in parts_s.items()}


def ratio_notes(ratio: float) -> tuple[str, ...]:
    """That steps of unlike rows take longer than one of the mean row."""
    if ratio < 1.0 + LEAST_TOLD:
        return ()
    why = "the host decides the time of short rows, the card that of long ones"
    return (f"steps take {ratio - 1.0:.0%} longer than one of rows all of the mean length: {why}",)
