"""A CPU without 16-bit products: found out by its own, calibrated, forecast and measured in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.asked import Asked
from tunecast.calibrate.devices.protocol import Hardware
from tunecast.calibrate.plan import calibration_plan, training_dtype
from tunecast.measurement import resolved_on
from tunecast.model.architectures import load_architecture
from tunecast.model.on_device import resolve_for
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets

torch = pytest.importorskip("torch")

from tunecast.calibrate.devices.cpu import CpuBackend, CpuDevice, emulates_bf16  # noqa: E402

LLAMA = load_architecture("HuggingFaceTB/SmolLM2-135M")
EMULATING = Hardware(device="cpu", gpu="cpu", name="x", memory_bytes=None, host={"emulates_bf16": True})
IN_FP32 = {"dtype": "fp32", "adapter_dtype": "fp32", "precision": "fp32", "bnb_4bit_compute_dtype": None}
METHODS = ("lora", "qlora", "full")


class Backend(CpuBackend):
    """One whose products take told seconds, by whether they are in bf16."""

    def __init__(self, narrow_s: float, wide_s: float) -> None:
        super().__init__()
        self.told_s = iter((narrow_s, wide_s))

    def timed(self, fn: Any, **_: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
        fn()
        return (), (next(self.told_s),)


@pytest.mark.parametrize(("narrow_s", "wide_s", "emulates"), [(80.0, 1.0, True), (2.0, 1.0, False), (0.5, 1.0, False)])
def test_its_own_products_tell(narrow_s: float, wide_s: float, emulates: bool) -> None:
    threads = torch.get_num_threads()
    assert emulates_bf16(torch, Backend(narrow_s, wide_s)) is emulates
    assert torch.get_num_threads() == threads
    assert isinstance(CpuDevice().hardware().host["emulates_bf16"], bool)


def test_every_trial_is_in_fp32() -> None:
    assert training_dtype(EMULATING) == "fp32"
    for spec in calibration_plan(EMULATING):
        assert spec.params.get("dtype", "fp32") == "fp32", spec.key
        if spec.bench == "step":
            assert {name: spec.params["run"][name] for name in IN_FP32} == IN_FP32
    assert training_dtype(Hardware(device="cpu", gpu="cpu", name="x", memory_bytes=None)) == "bf16"


@pytest.mark.parametrize("method", METHODS)
def test_forecast_and_measurement_take_the_run_in_fp32(method: str) -> None:
    record = {"hardware": {"gpu": "cpu", "memory_bytes": 1 << 34, "host": {"emulates_bf16": True}}, "fitted": None}
    (target,) = resolve_targets(["cpu"], {"cpu": {**record, "trials": [], "flags": []}})
    question = Question(architecture=LLAMA, options={"method": method})
    forecast = resolve_for(question, target)
    device = type("Device", (), {"id": "cpu", "hardware": lambda _: EMULATING})()
    measured = resolved_on(device, Asked(architecture=LLAMA, options={"method": method}, origins={}))
    for found in (forecast, measured):
        assert {name: getattr(found.run, name) for name in IN_FP32} == IN_FP32
        assert any("emulates them many times slower" in note for note in found.notes)


def test_fp32_that_was_asked_for_needs_no_note() -> None:
    asked = {"method": "full", "precision": "fp32", "dtype": "fp32"}
    found, plain = (resolve_run(LLAMA, asked, emulates_bf16=emulates) for emulates in (True, False))
    assert (found.run, found.notes) == (plain.run, plain.notes)
