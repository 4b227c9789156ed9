"""Factor sets to and from the JSON of a record's ``fitted`` section. Plain data only: no numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.factors import Curve, Factor, FactorSet

FITTED_SCHEMA = "tunecast.fitted/1"


def _factor_to_dict(factor: Factor) -> dict[str, Any]:
    return {name: getattr(factor, name) for name in ("value", "low", "high", "unit", "origin")}


def _curve_to_dict(curve: Curve) -> dict[str, Any]:
    return {
        "form": curve.form,
        "params": dict(curve.params),
        "log_sd": curve.log_sd,
        "origin": curve.origin,
        "residuals": [list(point) for point in curve.residuals],
    }


def factors_to_dict(factors: FactorSet) -> dict[str, Any]:
    """The plain JSON form of a factor set."""
    return {
        "schema": FITTED_SCHEMA,
        "gpu": factors.gpu,
        "curves": {name: _curve_to_dict(curve) for name, curve in sorted(factors.curves.items())},
        "factors": {name: _factor_to_dict(factor) for name, factor in sorted(factors.factors.items())},
        "step_log_sd": factors.step_log_sd,
        "memory_overhead_bytes": dict(factors.memory_overhead_bytes),
        "synchronous": factors.synchronous,
        "step_params": list(factors.step_params),
        "step_covariance": [list(row) for row in factors.step_covariance],
        "notes": list(factors.notes),
    }


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _param(name: str, value: Any) -> float:
    number = _number(value)
    if name in POSITIVE and number <= 0:
        raise ValueError(f"{name} is {value!r}, which is not above 0")
    return number


def _factor(raw: Mapping[str, Any]) -> Factor:
    value, low, high = (_number(raw[name]) for name in ("value", "low", "high"))
    return Factor(value=value, low=low, high=high, unit=str(raw["unit"]), origin=str(raw["origin"]))


POSITIVE = ("flops_per_s", "bytes_per_s", "elements_per_s")
"""Rates: a curve with one of these at or below 0 is damaged."""


def _curve(raw: Mapping[str, Any]) -> Curve:
    return Curve(
        form=str(raw["form"]),
        params={str(name): _param(str(name), value) for name, value in raw["params"].items()},
        log_sd=_number(raw["log_sd"]),
        origin=str(raw["origin"]),
        residuals=tuple(tuple(_number(x) for x in point) for point in raw.get("residuals", ())),
    )


DEQUANT_AS_BYTES, DEQUANT_ELEMENTS = "dequant.bytes_per_s", "dequant.elements_per_s"


def _named(name: str, factor: Factor) -> tuple[str, Factor]:
    """A factor under its name: until 2026-11-28 records called the elements that are unpacked in a second bytes."""
    if name != DEQUANT_AS_BYTES:
        return name, factor
    return DEQUANT_ELEMENTS, replace(factor, unit="elements/s")


def _build(raw: Mapping[str, Any], origin: Callable[[str], str]) -> FactorSet:
    def relabelled(part: Mapping[str, Any]) -> dict[str, Any]:
        return {**part, "origin": origin(str(part["origin"]))}

    names, covariance = list(raw.get("step_params", [])), [list(row) for row in raw.get("step_covariance", [])]
    if isinstance(raw.get("step_params"), str) or [len(row) for row in covariance] != [len(names)] * len(names):
        raise ValueError("step_covariance does not have a row and a column for each of step_params")
    if _number(raw["step_log_sd"]) < 0.0:
        raise ValueError("step_log_sd is negative")
    return FactorSet(
        gpu=str(raw["gpu"]),
        curves={str(name): _curve(relabelled(part)) for name, part in raw["curves"].items()},
        factors=dict(_named(str(name), _factor(relabelled(part))) for name, part in raw["factors"].items()),
        step_log_sd=_number(raw["step_log_sd"]),
        memory_overhead_bytes={str(k): _number(v) for k, v in raw.get("memory_overhead_bytes", {}).items()},
        synchronous=bool(raw.get("synchronous", False)),
        step_params=tuple(str(name) for name in names),
        step_covariance=tuple(tuple(_number(x) for x in row) for row in covariance),
        notes=tuple(str(note) for note in raw.get("notes", ())),
    )


def factors_from_dict(raw: Mapping[str, Any], *, name: str = "factors", record: str | None = None) -> FactorSet:
    """Read a factor set; `name` names the file in errors, `record` completes the origin ``measured``."""
    schema = raw.get("schema")
    if schema != FITTED_SCHEMA:
        raise InputError(
            f"{name} holds fitted factors of schema {schema!r}, this version reads {FITTED_SCHEMA!r}: "
            f"run `tunecast fit {name}` again, or upgrade tunecast."
        )

    def origin(given: str) -> str:
        return f"measured:{record}" if record is not None and given == "measured" else given

    try:
        return _build(raw, origin)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name} has damaged fitted factors ({error}): run `tunecast fit {name}` again.") from error


def factor_set_from_record(record: Mapping[str, Any], *, name: str = "RECORD") -> FactorSet:
    """The factors of a fitted record; an unfitted one is refused with the command that fits it."""
    fitted = record.get("fitted")
    if not fitted:
        raise InputError(f"{name} is not fitted yet: run `tunecast fit {name}` first.")
    return factors_from_dict(fitted, name=name, record=name)
