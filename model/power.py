"""Power that a record's own sensors saw while whole training steps ran."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

STEP_BENCH = "step"
LASTING_S = 2.0
"""Time at work from which a sensor's reading is that of a card at work: NVML's is a mean over up to a second, and a
card that was idle before takes longer to its pace. A calibration's own steps of a few layers are shorter: after them
H100 and H200 read 156 to 276 W, after whole runs 630 to 670."""


def measured_power_w(record: Mapping[str, Any]) -> float | None:
    """Median watts of one GPU in the whole steps that were measured for long enough; None without any, or a sensor."""
    found = [
        float(trial["sensors_after"]["power_w"])
        for trial in record["trials"]
        if trial["bench"] == STEP_BENCH
        and sum(trial.get("samples_s") or ()) >= LASTING_S
        and trial["outcome"] == "ok"
        and trial.get("sensors_after")
        and trial["sensors_after"].get("power_w") is not None
    ]
    return median(found) if found else None
