"""Curves that a quick calibration of a simulated card gives, and how far its later trials are from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.devices.protocol import TrialSpec
from tunecast.calibrate.fit import StepFitter
from tunecast.calibrate.fit_trials import OPERATION_OF
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import calibration_plan
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curves import Array, columns, seconds
from tunecast.model.factors import FactorSet


@pytest.fixture(scope="session")
def calibrated() -> Callable[..., FactorSet]:
    """``calibrated(mock, *benches)``: the curves of these benches' trials alone."""
    return fitted_curves


@pytest.fixture(scope="session")
def log_errors() -> Callable[..., Array]:
    """``log_errors(factors, mock, bench, trials)``: of forecasts against what the simulated card takes."""
    return errors_of_trials


def fitted_curves(mock: str, *benches: str) -> FactorSet:
    device = open_mock(f"mock:{mock}")
    trials = [
        {"bench": spec.bench, "params": spec.params, "outcome": "ok", "samples_s": device.run(spec).samples_s}
        for spec in calibration_plan(device.hardware())
        if spec.bench in benches
    ]
    gpu, multiprocessors = mock.partition("#")[0], device.hardware().multiprocessors
    fitter = StepFitter(gpu=gpu, synchronous=False, processors=multiprocessors, inventory=lambda *_: ())
    curves = {name: fitted.curve for name, fitted in fitter.fit_curves(trials).items()}
    return FactorSet(gpu=gpu, curves=curves, factors={}, step_log_sd=0.0, memory_overhead_bytes={}, synchronous=False)


def errors_of_trials(factors: FactorSet, mock: str, bench: str, trials: Iterable[dict[str, Any]]) -> Array:
    device = open_mock(f"mock:{mock}")
    found, true = [], []
    for params in trials:
        operation = OPERATION_OF[bench](params)
        curve = find_curve(curve_key(operation), factors)
        found.append(float(seconds(curve, columns([operation])).seconds[0]))
        result = device.run(TrialSpec(bench=bench, params=params, repeats=5, warmup=1))
        true.append(float(np.median(result.samples_s)))
    return np.abs(np.log(np.array(found) / np.array(true)))
