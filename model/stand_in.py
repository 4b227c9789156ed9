"""Rates of a dtype that a record has not measured: those of one that it has, times the ratio that the prior says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.curve_names import kind_of
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.prior_effects import INT8_BASE
from tunecast.model.run import Run

WORK = ("gemm", "attention")
"""Kinds of work whose curves go by dtype."""
MEASURED_FIRST = ("bf16", "fp16", "fp32")
"""Which measured dtype stands in for another, the first that there is."""


def with_stand_ins(own: FactorSet, prior: FactorSet, run: Run | None, beliefs: Mapping[str, Any]) -> FactorSet:
    """A record's factors with a curve for every dtype that the card's `prior` has and the record lacks.

    Seconds are those of the measured dtype over the prior's ratio of both rates, as much wider as the priors' `beliefs`
    doubt that ratio; what the record says of single shapes is left behind. A note says so where the `run` multiplies in
    such a dtype.
    """
    curves, used = dict(own.curves), []
    for work in WORK:
        base = next((dtype for dtype in MEASURED_FIRST if _rate(own, work, dtype) is not None), None)
        wanted = {name.split(".")[1] for name in prior.curves if name.startswith(f"{work}.")}
        if base is None or _rate(prior, work, base) is None:
            continue
        for dtype in sorted(wanted - {base}):
            added = _curves_of(own, prior, work, base, dtype, _doubt(dtype, beliefs))
            if added.keys() <= own.curves.keys():
                continue
            curves |= {name: curve for name, curve in added.items() if name not in own.curves}
            if run is not None and dtype in dtypes_of(run, work):
                used.append(f"{work} in {dtype}")
    if not used:
        return replace(own, curves=curves)
    note = f"not measured on this device, so {base} times the ratio of the priors: {', '.join(used)}"
    return replace(own, curves=curves, notes=(*own.notes, note))


def dtypes_of(run: Run, work: str) -> frozenset[str]:
    """The dtypes that the run's products, or its attention, are in."""
    if work == "attention":
        return frozenset({run.compute_dtype})
    whole = {"int8"} if run.base_quantization == INT8_BASE else set()
    return frozenset({run.compute_dtype, run.product_dtype, *whole})


def _doubt(dtype: str, beliefs: Mapping[str, Any]) -> float:
    """Spread of the ratio to a measured dtype; of int8 also that of what LLM.int8 does beside its products."""
    ratio = float(beliefs["unmeasured_dtype"]["log_sd"])
    return math.hypot(ratio, float(beliefs["int8_products"]["log_sd"])) if dtype == "int8" else ratio


def _rate(factors: FactorSet, work: str, dtype: str) -> float | None:
    """FLOP/s of a kind of work, where its curve has one rate."""
    for name in (f"{work}.{dtype}", f"{work}.{dtype}.forward"):
        if name in factors.curves and "flops_per_s" in factors.curves[name].params:
            return factors.curves[name].params["flops_per_s"]
    return None


def _curves_of(own: FactorSet, prior: FactorSet, work: str, base: str, dtype: str, log_sd: float) -> dict[str, Curve]:
    """The measured curves of `base`, of every kernel, forward and backward, at the rate of `dtype`."""
    over, under = _rate(prior, work, dtype), _rate(prior, work, base)
    if over is None or under is None:
        return {}
    found = {}
    for name, curve in own.curves.items():
        parts = name.split(".")
        if kind_of(name) != work or parts[1:2] != [base] or "flops_per_s" not in curve.params:
            continue
        params = {**curve.params, "flops_per_s": curve.params["flops_per_s"] * over / under}
        params["gp_sd"] = math.hypot(curve.params.get("gp_sd", curve.log_sd), log_sd)
        wider = math.hypot(curve.log_sd, log_sd)
        name = ".".join((parts[0], dtype, *parts[2:]))
        found[name] = replace(curve, params=params, log_sd=wider, residuals=(), origin="assumed")
    return found
