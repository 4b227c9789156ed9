"""The JSON of a whole run: phases with rates and origins, what the cost is made of, interruptions."""

from __future__ import annotations

from typing import Any

from tunecast.model.interrupted import interrupted_to_dict
from tunecast.model.phase import Phase
from tunecast.model.units import MEGA
from tunecast.model.whole_run import WholeRun

EMPTY: dict[str, Any] = {
    "train_time_h": None,
    "phases": [],
    "cost_parts_usd": {},
    "billed_h": None,
    "billing": None,
    "energy_kwh": None,
    "power": None,
    "interruptions": None,
}
"""The keys of a forecast whose amount of data is not known."""


def whole_run_to_dict(whole: WholeRun | None) -> dict[str, Any]:
    """The keys that a forecast's JSON takes over."""
    if whole is None:
        return EMPTY
    billing, power = whole.billing, whole.power
    return {
        "train_time_h": whole.train_time_h.as_dict(),
        "phases": [phase_to_dict(phase, whole) for phase in whole.phases],
        "cost_parts_usd": whole.cost_parts_usd,
        "billed_h": whole.billed_h,
        "billing": None
        if billing is None
        else {
            "granularity_s": billing.granularity_s,
            "minimum_s": billing.minimum_s,
            "origin": billing.origin,
            "source": billing.source,
        },
        "energy_kwh": whole.energy_kwh,
        "power": None if power is None else {"training_w": power.training_w, "origin": power.origin, "how": power.how},
        "interruptions": None
        if whole.interruptions is None
        else interrupted_to_dict(whole.interruptions, seed=whole.seed),
    }


def phase_to_dict(phase: Phase, whole: WholeRun) -> dict[str, Any]:
    """One phase; bytes per second as MB per second, other rates in their own unit."""
    usd_per_h = whole.usd_per_h if phase.usd_per_h is None else phase.usd_per_h
    return {
        "name": phase.name,
        "hours": phase.hours.as_dict(),
        "rates": {
            name: {"value": rate.value / (MEGA if rate.unit == "B/s" else 1.0), "origin": rate.origin}
            for name, rate in phase.rates
        },
        "origin": phase.origin,
        "how": phase.how,
        "machine": phase.machine,
        "usd": None if usd_per_h is None else phase.hours.value * usd_per_h,
    }
