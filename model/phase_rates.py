"""Rates of the phases around training: the device's own measurements, the catalog's PCIe, else assumptions.

Rates are in bytes per second inside; files and options say MB per second (10**6). The order is: what
the user gives (``assumed`` by the user, so labelled ``cli``), what a record measured, the datasheet, and
last ``data/phase_rates.json``, whose every row carries a source and the label ``assumed``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.units import GIGA, MEGA

MB_SUFFIX = "_mb_per_s"
MEASURED_BY = {
    "disk_read_mb_per_s": "disk.read.cold.bytes_per_s",
    "disk_write_mb_per_s": "disk.write.cold.bytes_per_s",
    "copy_mb_per_s": "transfer.h2d.pageable.bytes_per_s",
    "load_plain_mb_per_s": "load.plain.bytes_per_s",
    "load_quantized_mb_per_s": "load.quantized.bytes_per_s",
    "checkpoint_mb_per_s": "checkpoint.bytes_per_s",
}
"""Factors of a record that replace an assumption."""
MEASURED_ONLY = ("load_plain_mb_per_s", "load_quantized_mb_per_s", "checkpoint_mb_per_s")
"""Between file and device in one: taken where measured, else made of disk, copy and quantization."""
PARTS = ("disk_read_mb_per_s", "disk_write_mb_per_s", "copy_mb_per_s", "copy_frac")
"""Given by the user, they replace what was measured in one."""

Rates = Mapping[str, Factor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Billing:
    """How a provider counts time."""

    granularity_s: float
    """Time is rounded up to a multiple of this; 0 for exact."""
    minimum_s: float
    origin: str
    """``documented``, ``assumed`` or ``cli``."""
    source: str

    def billed_h(self, hours: float) -> float:
        """Hours that are paid for when a machine is held for `hours`."""
        from math import ceil

        seconds = max(hours * 3600.0, self.minimum_s if hours > 0.0 else 0.0)
        if self.granularity_s > 0.0:
            seconds = ceil(seconds / self.granularity_s - 1e-9) * self.granularity_s
        return seconds / 3600.0


@cache
def load_phase_rates() -> dict[str, Any]:
    """The shipped table, as it is in the file."""
    text = (files("tunecast.model") / "data" / "phase_rates.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def rate_names() -> tuple[str, ...]:
    """Names that ``--phase-rate`` takes."""
    return (*load_phase_rates()["rates"], *MEASURED_ONLY)


@cache
def assumed_rates() -> dict[str, Factor]:
    """Every shipped rate, in SI units; its origin says ``assumed``."""
    return {name: _factor(name, row) for name, row in load_phase_rates()["rates"].items()}


@cache
def assumed_duration_s(phase: str) -> Factor:
    """Seconds of a phase that has no amount of work: start, setup, compile."""
    return _factor("s", load_phase_rates()["durations_s"][phase])


def _factor(name: str, row: Mapping[str, Any]) -> Factor:
    scale, unit = (MEGA, "B/s") if name.endswith(MB_SUFFIX) else (1.0, name)
    value, low, high = (float(row[end]) * scale for end in ("value", "low", "high"))
    return Factor(value=value, low=low, high=high, unit=unit, origin=str(row["origin"]))


def phase_rates(gpu: Gpu | None, factors: FactorSet | None, given: Mapping[str, float]) -> Rates:
    """The rates that hold on a device: given, measured, datasheet, assumed, in this order."""
    rates = dict(assumed_rates())
    link = _datasheet_copy(gpu, rates["copy_frac"])
    if link is not None:
        rates["copy_mb_per_s"] = _slower(rates["copy_mb_per_s"], link)
    measured = {} if factors is None else factors.factors
    for name, factor_name in MEASURED_BY.items():
        if factor_name in measured:
            rates[name] = measured[factor_name]
    for name, number in given.items():
        scale, unit = (MEGA, "B/s") if name.endswith(MB_SUFFIX) else (1.0, name)
        rates[name] = Factor(value=number * scale, low=number * scale, high=number * scale, unit=unit, origin="cli")
    if "copy_frac" in given and "copy_mb_per_s" not in given and gpu is not None:
        rates["copy_mb_per_s"] = _datasheet_copy(gpu, rates["copy_frac"]) or rates["copy_mb_per_s"]
    for name in MEASURED_ONLY:
        if name not in given and any(part in given for part in PARTS):
            rates.pop(name, None)
    return rates


def _datasheet_copy(gpu: Gpu | None, reached: Factor) -> Factor | None:
    """Host to device in bytes per second: lanes x rate per lane x the share of it that is reached."""
    if gpu is None or gpu.pcie_gen is None or gpu.pcie_lanes is None:
        return None
    peak = gpu.pcie_lanes * float(load_phase_rates()["pcie_gb_per_s_per_lane"][str(gpu.pcie_gen)]) * GIGA
    return Factor(
        value=peak * reached.value, low=peak * reached.low, high=peak * reached.high, unit="B/s", origin="datasheet"
    )


def _slower(rate: Factor, bound: Factor) -> Factor:
    """A rate that another one bounds, with the origin of the one that decides."""
    slower = min((rate, bound), key=lambda factor: factor.value)
    return replace(slower, low=min(rate.low, bound.low), high=min(rate.high, bound.high))


@cache
def billing_rule(provider: str) -> Billing:
    """How that provider counts time; one without a known rule counts per minute, assumed."""
    table = load_phase_rates()["billing"]
    row = table.get(provider, table[""])
    return Billing(
        granularity_s=float(row["granularity_s"]),
        minimum_s=float(row["minimum_s"]),
        origin=str(row["origin"]),
        source=str(row["source"]),
    )
