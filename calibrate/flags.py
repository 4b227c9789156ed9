"""What a reader of a record must know about how it came to be, from its trials and its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunecast.calibrate.devices.protocol import Device, Hardware
from tunecast.calibrate.stats import stability

THROTTLE_FLAGS = {
    "hw_slowdown": "throttled",
    "hw_thermal_slowdown": "throttled",
    "hw_power_brake_slowdown": "throttled",
    "sw_thermal_slowdown": "throttled",
    "sw_power_cap": "power_capped",
}
"""NVML's throttle reasons as flags. At its own power limit a card under load is normal: a flag of its own."""
UNSTABLE_STEPS_FRAC = 0.25
"""Share of unstable whole steps from which the host is said to have varied: kernels timed by themselves do not show it.
Of a quiet H200 whose virtual machine issued at two paces, 40% were (results/records)."""
UNSTABLE_TRIALS_FRAC = 0.10
"""Share of unstable trials from which the whole record is called unstable: one in ten may meet a hiccup."""


def record_flags(
    device: Device, hardware: Hardware, trials: Iterable[Mapping[str, Any]], *, settled: bool, cut_short: bool
) -> list[str]:
    """Sorted flags: ``throttled``, ``power_capped``, ``unstable``, ``shared_gpu``, ``clock_not_settled``, ``mig``,
    ``cut_short`` (the time budget ended before the plan), ``host_varied``, and what the device itself reports."""
    listed = list(trials)
    found = {flag for trial in listed for flag in _sensor_flags(trial)}
    own = getattr(device, "flags", None)
    found.update(own() if own is not None else ())
    conditions = {
        **_of_trials(listed, hardware.device),
        "clock_not_settled": not settled,
        "mig": bool(hardware.mig),
        "cut_short": cut_short,
    }
    found.update(name for name, holds in conditions.items() if holds)
    return sorted(found)


def flags_of(record: Mapping[str, Any]) -> list[str]:
    """The flags of a record, those that its trials tell as they are read today: a record keeps those of its day."""
    of_trials = _of_trials(record["trials"], record["hardware"]["device"])
    return sorted({*record["flags"]} - of_trials.keys() | {name for name, holds in of_trials.items() if holds})


def _of_trials(trials: Sequence[Mapping[str, Any]], device: str) -> dict[str, bool]:
    """On a card whole steps have a flag of their own, since they may wait for a host that kernels do not wait for."""
    if device == "cpu":
        return {"unstable": is_unstable(trials), "host_varied": False}
    kernels = [trial for trial in trials if trial["bench"] != "step"]
    return {"unstable": is_unstable(kernels), "host_varied": has_unstable_steps(trials)}


def _sensor_flags(trial: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for reading in (trial["sensors_before"], trial["sensors_after"]):
        if reading is None:
            continue
        found.update(THROTTLE_FLAGS[r] for r in reading["throttle_reasons"] or () if r in THROTTLE_FLAGS)
        if reading["other_processes"]:
            found.add("shared_gpu")
    return found


def unstable_frac(trials: Iterable[Mapping[str, Any]]) -> float:
    """Share of the trials that scatter or drift; 0 of none."""
    verdicts = [stability(trial["samples_s"]).unstable for trial in trials if trial["outcome"] == "ok"]
    return sum(verdicts) / len(verdicts) if verdicts else 0.0


def is_unstable(trials: Iterable[Mapping[str, Any]]) -> bool:
    """Whether too many trials scatter or drift."""
    return unstable_frac(trials) > UNSTABLE_TRIALS_FRAC


def has_unstable_steps(trials: Iterable[Mapping[str, Any]]) -> bool:
    """Whether too many whole steps do, which wait for the host where kernels alone do not."""
    return unstable_frac(trial for trial in trials if trial["bench"] == "step") > UNSTABLE_STEPS_FRAC
