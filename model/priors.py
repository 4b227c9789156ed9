"""Factors of a GPU that nobody has calibrated: datasheet rates times published efficiencies.

The efficiencies are data (``results/priors.json``), fitted by one committed command from published
runs; no efficiency stands in code. A GPU that the runs contain has its own device effect; any other
has none, and a wider interval.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from tunecast.catalogs.gpus import Gpu, training_dtype
from tunecast.model.factors import Curve, Factor, FactorSet
from tunecast.model.operation import NATIVE
from tunecast.model.run import Run
from tunecast.model.units import GIGA
from tunecast.model.value import Z80

PRIORS_SCHEMA = "tunecast.priors/1"
TILE_ELEMENTS = {"bf16": 128 * 128, "fp16": 128 * 128, "fp32": 128 * 32, "fp8": 128 * 128, "int8": 128 * 128}
"""Output tile that a partial wave is counted in; cuBLAS's fp32 kernels for thin results are ``sgemm_128x32``."""
PCIE_BYTES_PER_S_PER_LANE = {3: 0.985 * GIGA, 4: 1.969 * GIGA, 5: 3.938 * GIGA}
"""One direction, after 128b/130b encoding (PCI-SIG base specifications 3.0 to 5.0)."""


@functools.cache
def load_priors() -> dict[str, Any]:
    """The shipped priors."""
    text = resources.files("tunecast.results").joinpath("priors.json").read_text(encoding="utf-8")
    priors: dict[str, Any] = json.loads(text)
    return priors


def datasheet_factors(gpu: Gpu, beliefs: Mapping[str, Any]) -> FactorSet:
    """Curves at the datasheet's own rates (every efficiency 1), with `beliefs` for floors and waves."""
    floor_s = float(beliefs["kernel_floor_s"]["value"])
    moved = {"bytes_per_s": gpu.bandwidth_bytes_per_s, "t0_s": floor_s}
    curves = {"memory": _curve("bandwidth", moved), "dequant": _curve("bandwidth", moved)}
    wave = float(beliefs["partial_wave"]["value"]) * (gpu.sm_count or 0)
    for dtype, tile in TILE_ELEMENTS.items():
        peak = gpu.peaks.get(dtype)
        if peak is None:
            continue
        gemm = {"flops_per_s": peak, "bytes_per_s": gpu.bandwidth_bytes_per_s, "t0_s": floor_s, "area": wave * tile}
        curves[f"gemm.{dtype}"] = _curve("gemm", gemm)
        attention = {"flops_per_s": peak * attention_share(gpu, beliefs), "t0_s": floor_s}
        curves[f"attention.{dtype}.forward"] = _curve("attention", attention)
        curves[f"attention-{NATIVE}.{dtype}.forward"] = _curve("attention", {**attention, "flops_per_s": peak})
    link = link_bytes_per_s(gpu)
    factors = {} if link is None else {"link_bytes_per_s": exact_factor(link, "B/s", "datasheet")}
    factors["link_latency_s"] = exact_factor(float(beliefs["link_latency_s"]["value"]), "s", "assumed")
    return FactorSet(gpu=gpu.id, curves=curves, factors=factors, step_log_sd=0.0)


def attention_share(gpu: Gpu, beliefs: Mapping[str, Any]) -> float:
    """Rate of FlashAttention-2 as a share of what it reaches elsewhere: less where products have instructions that
    it does not use (compute capability 9.0 and 10.x, Hopper and Blackwell of data centres)."""
    belief = beliefs.get("attention_on_hopper")
    late = gpu.compute_capability.split(".")[0] in ("9", "10")
    return float(belief["value"]) if belief is not None and late else 1.0


def _curve(form: str, params: dict[str, float]) -> Curve:
    return Curve(form=form, params=params, log_sd=0.0, origin="datasheet")


def exact_factor(value: float, unit: str, origin: str) -> Factor:
    """A factor without an interval."""
    return Factor(value=value, low=value, high=value, unit=unit, origin=origin)


def link_bytes_per_s(gpu: Gpu) -> float | None:
    """One direction of the fastest link between two cards of a machine: NVLink, else PCIe; None if unknown."""
    if gpu.nvlink_bytes_per_s > 0 and gpu.link_kind != "nvlink-bridge":
        return gpu.nvlink_bytes_per_s / 2
    per_lane = PCIE_BYTES_PER_S_PER_LANE.get(gpu.pcie_gen or 0)
    return None if per_lane is None or gpu.pcie_lanes is None else per_lane * gpu.pcie_lanes


def prior_factors(gpu: Gpu, run: Run | None = None, priors: Mapping[str, Any] | None = None) -> FactorSet:
    """Factors of a GPU without a calibration, every one with its origin.

    `run` brings the effects of its software stack and of its sharding; without it there are none.
    """
    priors = load_priors() if priors is None else priors
    base = datasheet_factors(gpu, priors["beliefs"])
    effect = device_effect(gpu, priors)
    factors = dict(base.factors)
    for kind, efficiency in priors["efficiency"].items():
        if kind != "link":
            factors[f"scale.{kind}"] = _slowdown(efficiency, effect["value"] + run_effect(run, priors))
    for kind in ("loss", "optimizer"):
        factors[f"scale.{kind}"] = factors["scale.memory"]
    if "link_bytes_per_s" in factors:
        factors["link_bytes_per_s"] = _scaled_link(factors["link_bytes_per_s"], priors["efficiency"]["link"])
    for name in ("host_s_per_launch", "overlap_frac"):
        factors[name] = Factor(**{k: priors[name][k] for k in ("value", "low", "high", "unit", "origin")})
    return FactorSet(
        gpu=gpu.id,
        curves=base.curves,
        factors=factors,
        step_log_sd=math.hypot(float(priors["step_log_sd"][effect["width"]]), effect["log_sd"]),
        memory_overhead_bytes=dict(priors["memory_overhead_bytes"]),
        step_params=("host_s_per_launch",),
        step_covariance=((host_log_variance(priors),),),
        notes=effect["notes"],
    )


def device_effect(gpu: Gpu, priors: Mapping[str, Any]) -> dict[str, Any]:
    """Log of time by which this card differs from the mean one, its spread, and which residuals set the width."""
    known = priors["device_effects"].get(gpu.id)
    if known is not None:
        return {"value": known["value"], "log_sd": 0.0, "width": "seen", "notes": ()}
    width = "unseen" if training_dtype(gpu) == "bf16" else "unseen_without_bf16"
    note = f"no published run on {gpu.id} is among the priors: datasheet rates, wider interval"
    vendor = priors["beliefs"]["vendor_effects"].get(gpu.vendor)
    if vendor is None:
        return {"value": 0.0, "log_sd": 0.0, "width": width, "notes": (note,)}
    notes = (note, f"no run on any {gpu.vendor.upper()} card either: slowed by the ratio of achieved matrix products")
    return {"value": vendor["value"], "log_sd": vendor["log_sd"], "width": width, "notes": notes}


def run_effect(run: Run | None, priors: Mapping[str, Any]) -> float:
    """Log of time by which the software stack and the sharding slow every operation; unknown ones do not."""
    if run is None:
        return 0.0
    effects = [priors["stack_effects"].get(run.stack)]
    if run.num_gpus > 1:
        effects.append(priors["sharding_effects"].get(run.sharding))
    return float(sum(effect["value"] for effect in effects if effect is not None))


def host_log_variance(priors: Mapping[str, Any]) -> float:
    """Variance of log(seconds per launch) between hosts."""
    return float(priors["beliefs"]["host_s_per_launch"]["log_sd"]) ** 2


def _slowdown(efficiency: Mapping[str, Any], device_effect: float) -> Factor:
    """1 / efficiency, times the device effect (a log of time)."""
    slow = math.exp(device_effect)
    return Factor(
        value=slow / efficiency["value"],
        low=slow / efficiency["high"],
        high=slow / efficiency["low"],
        unit="seconds per datasheet second",
        origin=str(efficiency["origin"]),
    )


def _scaled_link(link: Factor, efficiency: Mapping[str, Any]) -> Factor:
    return Factor(
        value=link.value * efficiency["value"],
        low=link.value * efficiency["low"],
        high=link.value * efficiency["high"],
        unit=link.unit,
        origin=str(efficiency["origin"]),
    )


def interval(value: float, log_sd: float) -> dict[str, float]:
    """Value with its 80% log-normal interval, as stored."""
    spread = math.exp(Z80 * log_sd)
    return {"value": value, "low": value / spread, "high": value * spread}
