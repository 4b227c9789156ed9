"""How much longer the mean step is than the step of the mean row, where rows are samples of unlike lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tunecast.model.architecture import Architecture
from tunecast.model.engine import screen
from tunecast.model.rows import LENGTHS, Rows, likely_runs
from tunecast.model.run import Run
from tunecast.model.target import Target
from tunecast.model.time import StepTime
from tunecast.model.value import Value

LEAST_TOLD = 0.01
"""By so much a step has to be longer for a note to tell of it."""


def mean_step_ratio(
    rows: Rows | None, architecture: Architecture, run: Run, target: Target, options: Mapping[str, Any]
) -> float:
    """Mean of the steps at all likely lengths of the rows over the step at the mean length; 1 where they are alike, and
    where a model has no formulas to time them by."""
    if rows is None or len({*rows.lengths}) == 1 or architecture.settings:
        return 1.0
    told = {name: value for name, value in options.items() if name not in (*LENGTHS, "packing")}
    run = replace(run, paged_bytes=0)
    runs = [*likely_runs(run, rows), replace(run, max_length=rows.length)]
    *each_s, mean_row_s = screen(architecture, runs, [target], told).step_s[0]
    return float(np.mean(each_s) / mean_row_s)


def stretched(timing: StepTime, ratio: float) -> StepTime:
    """Every part longer by the same share."""
    step = timing.step_time_s
    return replace(
        timing,
        step_time_s=Value(value=step.value * ratio, low=step.low * ratio, high=step.high * ratio),
        slow_host_s=timing.slow_host_s * ratio,
        parts_s={name: part * ratio for name, part in timing.parts_s.items()},
        phases_s={name: part * ratio for name, part in timing.phases_s.items()},
        device_s=timing.device_s * ratio,
        host_s=timing.host_s * ratio,
    )


def ratio_notes(ratio: float) -> tuple[str, ...]:
    """That steps of unlike rows take longer than one of the mean row."""
    if ratio < 1.0 + LEAST_TOLD:
        return ()
    why = "the host decides the time of short rows, the card that of long ones"
    return (f"steps take {ratio - 1.0:.0%} longer than one of rows all of the mean length: {why}",)
