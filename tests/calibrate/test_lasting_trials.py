"""Products that are kept up for seconds: what a calibration asks for, what runs, and what a reader is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunecast.against_catalog import against_catalog
from tunecast.calibrate.bench import run_bench
from tunecast.calibrate.bench.lasting import WINDOW_S
from tunecast.calibrate.devices.cpu import CpuDevice
from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.fit_forms import CURVE_BENCHES
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.mock.gemm import gemm_work
from tunecast.calibrate.plan import LASTING, STORAGE_BENCHES, calibration_plan
from tunecast.calibrate.runner import calibrate

SQUARE = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "layout": "nt"}


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_a_calibration_of_a_gpu_has_one_at_its_end(mode: str) -> None:
    plan = calibration_plan(open_mock("mock:l4-24gb").hardware(), mode)
    places = [place for place, spec in enumerate(plan) if spec.bench in LASTING]
    assert len(places) == 1
    assert {spec.bench for spec in plan[places[0] + 1 :]} == set(STORAGE_BENCHES)


def test_a_processor_has_none_and_no_curve_is_fitted_to_them() -> None:
    cpu = Hardware(device="cpu", gpu="cpu", name="", memory_bytes=None)
    assert not [spec for spec in calibration_plan(cpu, "full") if spec.bench in LASTING]
    assert not set(LASTING) & set(CURVE_BENCHES)


def test_windows_last_and_hold_as_many_calls_each() -> None:
    """For real, on this processor: a call's seconds times the calls of a window are the window."""
    params = SQUARE | {"m": 256, "n": 256, "k": 256, "dtype": "fp32"}
    found = run_bench(TrialSpec(bench="lasting", params=params, repeats=3, warmup=2), CpuDevice().backend)
    assert (found.outcome, len(found.samples_s), len(found.warmup_s)) == ("ok", 3, 2)
    loops = found.extra["inner_loops"]
    assert loops > 1
    assert max(found.samples_s) * loops > WINDOW_S / 10, "windows, not single calls"


@pytest.mark.parametrize("gpu", ["l4-24gb", "h100-sxm5-80gb"])
def test_what_lasts_is_slower_where_power_holds_a_card_back(gpu: str) -> None:
    device = open_mock(f"mock:{gpu}#1")
    assert device.settle(60.0)
    small = SQUARE | {"m": 2048, "n": 2048, "k": 2048}
    short, kept_up = (
        device.true_seconds(TrialSpec(bench=bench, params=small, repeats=5, warmup=1)) for bench in ("gemm", "lasting")
    )
    product = gemm_work(device.card, device.physics, 2048, 2048, 2048, "bf16", "nt")
    assert kept_up > 1.05 * short
    assert kept_up == pytest.approx(device.simulator.kernel(product).seconds)


def test_both_rates_stand_beside_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An L4 of 72 W: nearly its peak for milliseconds, about half for seconds, and neither is called low."""
    keep_only(monkeypatch, "gemm", "lasting", "memory")
    path = calibrate(open_mock("mock:l4-24gb"), out_dir=tmp_path, fit=False)
    rows = {quantity.name: quantity for quantity in against_catalog(path).quantities}
    short, kept_up = rows["matrix product bf16"], rows["matrix product bf16, lasting"]
    assert short.catalog == kept_up.catalog
    assert kept_up.measured < 0.8 * short.measured
    assert (short.verdict, kept_up.verdict) == ("ok", "ok")


def keep_only(monkeypatch: pytest.MonkeyPatch, *benches: str) -> None:
    def some(*asked: Any) -> Any:
        return tuple(spec for spec in calibration_plan(*asked) if spec.bench in benches)

    monkeypatch.setattr("tunecast.calibrate.runner.calibration_plan", some)
