"""Products of stacked experts in a calibration: which devices run them, what they measure, what a fit makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.fit import StepFitter
from tunecast.calibrate.fit_trials import grouped_operation
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import DEVICE_BENCHES, LATER, calibration_plan
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curves import columns, seconds
from tunecast.model.factors import FactorSet

CARD, SEED = "h100-sxm5-80gb", 7


def hardware(mock: str) -> Hardware:
    return open_mock(f"mock:{mock}").hardware()


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_only_cards_with_the_kernel_run_them_after_all_other_device_work(mode: str) -> None:
    plan = [spec.bench for spec in calibration_plan(hardware(CARD), mode)]
    assert plan.count("grouped") >= 24
    kinds = [0 if bench in DEVICE_BENCHES else 1 if bench in LATER else 2 for bench in plan]
    assert kinds == sorted(kinds)
    for other in ("a100-sxm4-80gb", "rtx-4090-24gb", "t4-16gb"):
        assert "grouped" not in {spec.bench for spec in calibration_plan(hardware(other), mode)}
    assert "grouped" in {spec.bench for spec in calibration_plan(hardware("mi300x-192gb"), mode)}


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_a_trial_multiplies_what_an_expert_does(layout: str) -> None:
    """On this processor: the call's result against one product per expert, by hand."""
    torch = pytest.importorskip("torch")
    from tunecast.calibrate.bench import math_ops
    from tunecast.calibrate.devices.cpu import CpuDevice

    made: list[Any] = []

    def remembered(backend: Any, *shape: int, dtype: str) -> Any:
        made.append(torch.randn(*shape).to(torch.bfloat16))
        return made[-1]

    experts, rows, n, k = 3, 8, 32, 16
    params = {"experts": experts, "rows": rows, "n": n, "k": k, "layout": layout, "dtype": "bf16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_ops, "normal", remembered)
        found = math_ops._grouped_call(experts, rows, n, k, params, CpuDevice().backend)()
    entry, other = made
    parts = entry.split(rows)
    if layout == "tn":
        expected = torch.stack([g.t().float() @ x.float() for g, x in zip(other.split(rows), parts, strict=True)])
    else:
        weights = [w.t() if layout == "nt" else w for w in other]
        expected = torch.cat([x.float() @ w.float() for x, w in zip(parts, weights, strict=True)])
    assert found.shape == expected.shape
    assert np.allclose(found.float(), expected, rtol=0.02, atol=0.2)


@pytest.fixture(scope="module")
def factors() -> FactorSet:
    """Curves of products that a quick calibration of a simulated card gives."""
    device = open_mock(f"mock:{CARD}#{SEED}")
    trials = [
        {"bench": spec.bench, "params": spec.params, "outcome": "ok", "samples_s": device.run(spec).samples_s}
        for spec in calibration_plan(device.hardware())
        if spec.bench in ("memory", "gemm", "grouped")
    ]
    multiprocessors = device.hardware().multiprocessors
    fitter = StepFitter(gpu=CARD, synchronous=False, processors=multiprocessors, inventory=lambda *_: ())
    curves = {name: fitted.curve for name, fitted in fitter.fit_curves(trials).items()}
    return FactorSet(gpu=CARD, curves=curves, factors={}, step_log_sd=0.0, memory_overhead_bytes={}, synchronous=False)


UNSEEN = [
    (e, rows, n, k) for e, n, k in ((128, 768, 2048), (16, 8192, 5120), (60, 1408, 2048)) for rows in (24, 96, 700)
]


def test_products_never_measured_are_forecast_by_their_own_curve(factors: FactorSet) -> None:
    """Against what the simulated card takes for them: shapes of other models than the trials'."""
    device = open_mock(f"mock:{CARD}#{SEED}")
    found, true = [], []
    for experts, rows, n, k in UNSEEN:
        for layout in ("nt", "nn", "tn"):
            params = {"experts": experts, "rows": rows, "n": n, "k": k, "layout": layout, "dtype": "bf16"}
            operation = grouped_operation(params)
            curve = find_curve(curve_key(operation), factors)
            found.append(float(seconds(curve, columns([operation])).seconds[0]))
            result = device.run(TrialSpec(bench="grouped", params=params, repeats=5, warmup=1))
            true.append(float(np.median(result.samples_s)))
    error = np.abs(np.log(np.array(found) / np.array(true)))
    assert np.median(error) < 0.05
    assert np.max(error) < 0.25


def test_a_record_without_them_has_the_curve_of_plain_products(factors: FactorSet) -> None:
    older = replace(factors, curves={name: each for name, each in factors.curves.items() if "grouped" not in name})
    assert find_curve("gemm-grouped.bf16", older) is older.curves["gemm.bf16"]
    assert find_curve("gemm-grouped.bf16", factors) is factors.curves["gemm-grouped.bf16"]
