"""The fit: raw trials of one record to named physical factors with intervals (needs scipy, not torch).

    trials ── curves (fit_curves) ── whole steps (fit_steps) ── memory terms, transfers, mfu ──► ``fitted``

Everything is deterministic: bootstrap and folds draw from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunecast.calibrate.fit_curves import MEASURED, FittedCurve, fit_curve, host_plateau
from tunecast.calibrate.fit_forms import curve_observations, specs_for
from tunecast.calibrate.fit_memory import gauge_memory
from tunecast.calibrate.fit_rates import cache_bytes, host_start, mfu_by_method, model_flops, rate_factors, walk_factors
from tunecast.calibrate.fit_steps import MeasuredStep, StepFit, fit_steps, with_steps
from tunecast.calibrate.fit_trials import Trial, log_noise, median_seconds, trial_id, usable
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.curve_names import kind_of
from tunecast.model.factors import HOST_S_PER_LAUNCH, Curve, Factor, FactorSet
from tunecast.model.factors_io import factors_to_dict
from tunecast.model.operation import Kind, Operation
from tunecast.model.phase_table import phase_table
from tunecast.model.run import Run
from tunecast.model.upcasts import upcast_bytes_per_s, upcast_curve
from tunecast.model.value import Z80
from tunecast.model.workspaces import workspace_bytes

Inventory = Callable[[Architecture, Run, str], Sequence[Operation]]
"""Operations of one step of a run, by platform (``cuda`` or ``cpu``)."""
SEED = 0


class StepFitter:
    """Fits factors to the trials of one device. After `fit`, underscored attributes hold the result."""

    def __init__(
        self,
        *,
        gpu: str,
        synchronous: bool,
        processors: int | None = None,
        workspaces: int = 0,
        upcast_bytes_per_s: float | None = None,
        inventory: Inventory,
    ) -> None:
        self.gpu = gpu
        self.synchronous = synchronous
        self.processors = processors
        self.workspaces = workspaces
        self.upcast_bytes_per_s = upcast_bytes_per_s
        self.inventory = inventory

    def fit(self, trials: Sequence[Trial]) -> StepFitter:
        """Fit curves, then steps; raises InputError when there is nothing to fit."""
        self.curves_ = self.fit_curves(trials)
        base = FactorSet(
            gpu=self.gpu,
            curves=self._with_upcasts({name: fitted.curve for name, fitted in self.curves_.items()}),
            factors={**_curve_factors(self.curves_), **rate_factors(trials)},
            step_log_sd=0.0,
            memory_overhead_bytes=gauge_memory(trials, platform=self.platform, workspaces=self.workspaces),
            synchronous=self.synchronous,
        )
        self.steps_ = self._measured_steps(trials, base)
        self.step_fit_ = fit_steps(self.steps_, host_s_per_launch=host_start(trials), synchronous=self.synchronous)
        fitted = with_steps(base, self.step_fit_) if self.step_fit_ else _without_steps(base, trials)
        walks = walk_factors(trials, fitted.factors[HOST_S_PER_LAUNCH].value)
        self.factors_ = replace(fitted, factors=fitted.factors | walks)
        return self

    def fit_curves(self, trials: Sequence[Trial]) -> dict[str, FittedCurve]:
        """Efficiency curves from the microbenchmarks, by name."""
        fitted: dict[str, FittedCurve] = {}
        for name, found in curve_observations(trials).items():
            so_far = {done: curve.curve for done, curve in fitted.items()}
            issue_s = None if self.synchronous else host_plateau(found)
            specs = specs_for(name, found, processors=self.processors, fitted=so_far, issue_s=issue_s)
            fitted[name] = self._in_steps(name, fit_curve(specs, found, seed=SEED))
        if not any(name.startswith("gemm.") for name in fitted):
            raise InputError(
                "The record has no usable gemm trials, so there is nothing to fit: run `tunecast calibrate --fresh`."
            )
        return fitted

    def _with_upcasts(self, curves: dict[str, Curve]) -> dict[str, Curve]:
        return {**upcast_curve(curves.get(str(Kind.MEMORY)), self.upcast_bytes_per_s), **curves}

    def _in_steps(self, name: str, fitted: FittedCurve) -> FittedCurve:
        """The curve with what whole steps shall tell apart: kernels in the cache, products bound by their bytes."""
        marks: dict[str, float] = {}
        if kind_of(name) == Kind.MEMORY and not self.synchronous:
            marks = {"l2_bytes": float(cache_bytes(self.gpu))}
        elif kind_of(name) == Kind.GEMM and not self.synchronous:
            marks = {"bytes_apart": 1.0}
        return replace(fitted, curve=replace(fitted.curve, params=fitted.curve.params | marks))

    def _measured_steps(self, trials: Sequence[Trial], factors: FactorSet) -> list[MeasuredStep]:
        steps = []
        for trial in usable(trials, "step"):
            run = run_from_dict(dict(trial["params"]["run"]))
            architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
            operations = self.inventory(architecture, run, self.platform)
            table = phase_table(operations, factors, run=run)
            steps.append(
                MeasuredStep(
                    trial=trial_id(trial),
                    table=table,
                    seconds=median_seconds(trial),
                    log_noise=log_noise(trial),
                    group=str(architecture.hidden_size),
                    method=run.method,
                    dtype=run.compute_dtype,
                    model_flops=model_flops(operations),
                )
            )
        return steps

    @property
    def platform(self) -> str:
        """What the inventory is asked for."""
        return "cpu" if self.synchronous else "cuda"


def _without_steps(base: FactorSet, trials: Sequence[Trial]) -> FactorSet:
    """Microbenchmarks alone: the host at its launch benchmark, and a note."""
    host_s = host_start(trials)
    factor = Factor(value=host_s, low=host_s, high=host_s, unit="s", origin=MEASURED)
    note = "fewer than three whole steps were measured: in-step effects are not in the forecast"
    return replace(base, factors={**base.factors, HOST_S_PER_LAUNCH: factor}, notes=(*base.notes, note))


RATE_PARAMS = {"flops_per_s": "FLOP/s", "bytes_per_s": "B/s", "t0_s": "s"}
OF_ELEMENTS = "elements"
"""Form whose ``bytes_per_s`` counts elements."""


def _curve_factors(curves: Mapping[str, FittedCurve]) -> dict[str, Factor]:
    """Rates of the curves as named factors with bootstrap intervals."""
    out = {}
    for name, fitted in curves.items():
        for param, unit in RATE_PARAMS.items():
            if param in fitted.intervals:
                value = fitted.curve.params[param]
                low, high = _few_trials(fitted, value, *fitted.intervals[param])
                if fitted.curve.form == OF_ELEMENTS and unit == "B/s":
                    param, unit = "elements_per_s", "elements/s"
                out[f"{name}.{param}"] = Factor(value=value, low=low, high=high, unit=unit, origin=MEASURED)
    return out


def _few_trials(fitted: FittedCurve, value: float, low: float, high: float) -> tuple[float, float]:
    """A bootstrap of few trials sees no spread: no interval is narrower than left-out error / root of their number."""
    least = math.exp(Z80 * fitted.curve.log_sd / math.sqrt(max(len(fitted.left_out), 1)))
    return min(low, value / least), max(high, value * least)


def step_inventory(architecture: Architecture, run: Run, platform: str) -> Sequence[Operation]:
    """The analytic inventory of the model layer."""
    from tunecast.model.inventory import step_operations

    return step_operations(architecture, run, platform=platform)


def fit_record(record: Mapping[str, Any], *, inventory: Inventory = step_inventory) -> dict[str, Any]:
    """The ``fitted`` section of a record: factors, curves, residuals, trials used, and mfu by method."""
    hardware = record["hardware"]
    fitter = StepFitter(
        gpu=str(hardware["gpu"] or hardware["name"]),
        synchronous=hardware["device"] == "cpu",
        processors=hardware.get("multiprocessors"),
        workspaces=workspace_bytes(hardware.get("compute_capability")),
        upcast_bytes_per_s=upcast_bytes_per_s(hardware, record["software"]),
        inventory=inventory,
    ).fit(record["trials"])
    return {
        **factors_to_dict(fitter.factors_),
        "residuals": _residuals(fitter),
        "trials_used": _trials_used(fitter, record["trials"]),
        "mfu": mfu_by_method(fitter.steps_, fitter.factors_),
    }


def _residuals(fitter: StepFitter) -> dict[str, Any]:
    """Log(measured / predicted), each predicted without itself (steps) or its fold (curves)."""
    curves = {
        name: {"log_error": list(fitted.left_out), "log_sd": list(fitted.left_out_sd)}
        for name, fitted in fitter.curves_.items()
    }
    step_fit: StepFit | None = fitter.step_fit_
    steps = dict(zip((s.trial for s in fitter.steps_), step_fit.left_out, strict=True)) if step_fit else {}
    return {"curves": curves, "steps": steps}


def _trials_used(fitter: StepFitter, trials: Sequence[Trial]) -> list[str]:
    from_curves = [o.trial for found in curve_observations(trials).values() for o in found]
    return sorted({*from_curves, *(step.trial for step in fitter.steps_)})
