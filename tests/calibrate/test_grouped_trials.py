"""Products of stacked experts in a calibration: which devices run them, what they measure, what a fit makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.devices.protocol import Hardware
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import DEVICE_BENCHES, LATER, calibration_plan
from tunecast.model.curve_names import find_curve
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet

CARD = "h100-sxm5-80gb"
MOCK = f"{CARD}#7"


def hardware(mock: str) -> Hardware:
    return open_mock(f"mock:{mock}").hardware()


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_only_cards_with_the_kernel_run_them_after_all_other_device_work(mode: str) -> None:
    plan = [spec.bench for spec in calibration_plan(hardware(CARD), mode)]
    assert plan.count("grouped") >= 24
    places = {bench: [i for i, each in enumerate(plan) if each == bench] for bench in plan}
    assert max(max(places[bench]) for bench in DEVICE_BENCHES) < min(min(places[bench]) for bench in LATER)
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
def factors(calibrated: Callable[..., FactorSet]) -> FactorSet:
    """Curves of products that a quick calibration of a simulated card gives."""
    return calibrated(MOCK, "memory", "gemm", "grouped")


UNSEEN = [
    (e, rows, n, k) for e, n, k in ((128, 768, 2048), (16, 8192, 5120), (60, 1408, 2048)) for rows in (24, 96, 700)
]


def test_products_never_measured_are_forecast_by_their_own_curve(
    factors: FactorSet, log_errors: Callable[..., Array]
) -> None:
    """Against what the simulated card takes for them: shapes of other models than the trials'. The card multiplies
    some layouts more slowly than others, which one curve for all of them misses at a few shapes."""
    trials = [
        {"experts": experts, "rows": rows, "n": n, "k": k, "layout": layout, "dtype": "bf16"}
        for experts, rows, n, k in UNSEEN
        for layout in ("nt", "nn", "tn")
    ]
    error = log_errors(factors, MOCK, "grouped", trials)
    assert np.median(error) < 0.05
    assert np.quantile(error, 0.8) < 0.12
    assert np.max(error) < 0.35


def test_a_record_without_them_has_the_curve_of_plain_products(factors: FactorSet) -> None:
    older = replace(factors, curves={name: each for name, each in factors.curves.items() if "grouped" not in name})
    assert find_curve("gemm-grouped.bf16", older) is older.curves["gemm.bf16"]
    assert find_curve("gemm-grouped.bf16", factors) is factors.curves["gemm-grouped.bf16"]
