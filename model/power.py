"""Power that a record's own sensors saw while whole training steps ran."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

STEP_BENCH = "step"


def measured_power_w(record: Mapping[str, Any]) -> float | None:
    """Median watts of one GPU in the whole steps that were measured; None without a sensor."""
    found = [
        float(trial["sensors_after"]["power_w"])
        for trial in record["trials"]
        if trial["bench"] == STEP_BENCH
        and trial["outcome"] == "ok"
        and trial.get("sensors_after")
        and trial["sensors_after"].get("power_w") is not None
    ]
    return median(found) if found else None
