"""The JSON of a forecast (design: ``tunecast.forecast/1``). Unknown is null, never 0."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from tunecast.model.forecast import FORECAST_SCHEMA, Forecast, MemoryView
from tunecast.model.parallel_offload import host_need_bytes
from tunecast.model.run import Run
from tunecast.model.units import gib
from tunecast.model.value import Value
from tunecast.model.whole_run_json import whole_run_to_dict


def forecast_to_dict(forecast: Forecast) -> dict[str, Any]:
    """One object of the list that ``estimate --json`` and ``measure --json`` print."""
    return {
        "schema": FORECAST_SCHEMA,
        "model": forecast.model,
        "gpu": forecast.gpu,
        "num_gpus": forecast.run.num_gpus,
        "fits": forecast.fits,
        "fit_probability": forecast.fit_probability,
        "verdict": forecast.verdict,
        "run": run_with_origins(forecast.run, forecast.run_origins),
        "model_flops_per_step": forecast.model_flops_per_step,
        "executed_flops_per_step": forecast.executed_flops_per_step,
        "trainable_params": forecast.trainable_params,
        "total_params": forecast.total_params,
        "memory": {
            **memory_to_dict(forecast.memory),
            "host_gib": gib(host_need_bytes(forecast.architecture, forecast.run)),
        },
        "step_time_s": forecast.step_time_s.as_dict(),
        "tokens_per_s": forecast.tokens_per_s.as_dict(),
        "mfu": forecast.mfu,
        "hfu": forecast.hfu,
        "bound_by": forecast.bound_by,
        "time_parts_s": forecast.time_parts_s,
        "scaling": None if forecast.scaling is None else asdict(forecast.scaling),
        "totals": None if forecast.totals is None else asdict(forecast.totals),
        "amount_assumed": list(forecast.amount_assumed),
        "phases_h": forecast.phases_h,
        **whole_run_to_dict(forecast.whole_run),
        "total_time_h": _optional(forecast.total_time_h),
        "cost_usd": _optional(forecast.cost_usd),
        "cost_per_million_tokens_usd": _optional(forecast.cost_per_million_tokens_usd),
        "offer": forecast.offer,
        "origins": forecast.origins,
        "notes": list(forecast.notes),
    }


def run_with_origins(run: Run, origins: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Every run field as ``{"value", "origin"}``."""
    return {
        f.name: {"value": _plain(getattr(run, f.name)), "origin": origins.get(f.name, "stack-default")}
        for f in fields(run)
    }


def memory_to_dict(memory: MemoryView) -> dict[str, Any]:
    """The memory views in GiB."""
    return {
        "allocated_gib": _in_gib(memory.allocated_bytes),
        "reserved_gib": _in_gib(memory.reserved_bytes),
        "process_gib": _in_gib(memory.process_bytes),
        "usable_gib": None if memory.usable_bytes is None else gib(memory.usable_bytes),
        "peak_moment": memory.peak_moment,
        "parts_gib": {name: gib(n_bytes) for name, n_bytes in memory.parts_bytes.items()},
    }


def _optional(value: Value | None) -> dict[str, float] | None:
    return None if value is None else value.as_dict()


def _in_gib(value: Value | None) -> dict[str, float] | None:
    return None if value is None else value.scaled(gib(1)).as_dict()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
