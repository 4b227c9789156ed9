"""Properties of the plan: complete, without repeats, spread, and within what the device can do."""

import dataclasses
import json

import pytest
from scripted_device import HARDWARE

from tunecast.calibrate.plan import (
    DEVICE_BENCHES,
    HOST_BENCHES,
    ORDER,
    STORAGE_BENCHES,
    budget,
    calibration_plan,
    training_dtype,
)
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.errors import InputError

CPU = HARDWARE
A100 = dataclasses.replace(HARDWARE, device="cuda:0", gpu="a100-sxm4-80gb", compute_capability="8.0")
T4 = dataclasses.replace(A100, gpu="t4", compute_capability="7.5")
MOCK = dataclasses.replace(A100, device="mock:l4#3", gpu="mock:l4#3")
EVERYTHING = [(hardware, mode) for hardware in (CPU, A100, T4) for mode in ("quick", "full")]


@pytest.mark.parametrize(("hardware", "mode"), EVERYTHING)
def test_every_trial_once_and_as_json(hardware, mode):
    plan = calibration_plan(hardware, mode)
    keys = [spec.key for spec in plan]
    assert len(set(keys)) == len(keys)
    for spec in plan:
        assert json.loads(json.dumps(spec.params)) == spec.params
        assert spec.repeats >= 2


def test_the_plan_is_the_same_every_time():
    assert calibration_plan(A100, "quick") == calibration_plan(A100, "quick")


def test_full_includes_quick():
    for hardware in (CPU, A100):
        quick = {spec.key for spec in calibration_plan(hardware, "quick")}
        assert quick < {spec.key for spec in calibration_plan(hardware, "full")}


def test_a_mock_is_measured_like_the_card_it_imitates():
    assert calibration_plan(MOCK) == calibration_plan(A100)


def test_unknown_mode():
    with pytest.raises(InputError, match="quick and full"):
        calibration_plan(CPU, "fast")


@pytest.mark.parametrize("hardware", [CPU, A100])
def test_steps_vary_what_the_fit_separates(hardware):
    steps = [spec.params for spec in calibration_plan(hardware, "quick") if spec.bench == "step"]
    runs = [run_from_dict(params["run"]) for params in steps]
    depths = {architecture_from_dict(params["architecture"]).num_layers for params in steps}
    assert depths == {1, 2, 4}
    assert {run.method for run in runs} == {"lora", "qlora", "full"}
    for method in ("lora", "qlora"):
        assert {run.gradient_checkpointing for run in runs if run.method == method} == {True, False}
    assert len({run.max_length for run in runs}) >= 3
    assert len({run.per_device_train_batch_size for run in runs}) >= 2
    assert {run.gradient_accumulation_steps for run in runs} == {1, 2}
    assert len({params["architecture"]["hidden_size"] for params in steps}) >= 3


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_every_method_has_steps_too_narrow_to_keep_a_card_busy(mode):
    steps = [spec.params for spec in calibration_plan(A100, mode) if spec.bench == "step"]
    narrow = [params for params in steps if params["architecture"]["hidden_size"] <= 256]
    found = {
        (params["run"]["method"], params["run"]["gradient_checkpointing"], params["architecture"]["groups"][0]["count"])
        for params in narrow
    }
    depths = (4,) if mode == "quick" else (4, 8)
    assert found == {(m, c, d) for m in ("lora", "qlora", "full") for c in (True, False) for d in depths}


def test_one_layer_more_is_the_only_difference_between_three_steps():
    """Depths 1, 2 and 4 of one otherwise equal step: differences give the layer."""
    steps = [spec.params for spec in calibration_plan(CPU, "quick") if spec.bench == "step"]
    found: dict[str, set[int]] = {}
    for params in steps:
        architecture = architecture_from_dict(params["architecture"])
        same = json.dumps([params["run"], architecture.hidden_size, architecture.vocab_size])
        found.setdefault(same, set()).add(architecture.num_layers)
    assert {1, 2, 4} in found.values()


def test_gpu_covers_70b_widths_and_all_adapter_layouts():
    gemms = [spec.params for spec in calibration_plan(A100, "quick") if spec.bench == "gemm"]
    assert any(params["n"] == 28672 and params["k"] == 8192 for params in gemms)
    assert any(params["n"] == 128256 for params in gemms)
    skinny = [params for params in gemms if min(params["m"], params["n"], params["k"]) == 16]
    assert {params["layout"] for params in skinny} == {"nt", "nn", "tn"}


def test_a_card_without_bf16_is_measured_in_fp16():
    plan = calibration_plan(T4, "quick")
    assert "bf16" not in json.dumps([spec.params for spec in plan])
    assert any(spec.params.get("dtype") == "fp16" for spec in plan)


@pytest.mark.parametrize("capability", ["gfx90a", "gfx942", "gfx950", "8.0", "12.0", None])
def test_what_has_bf16_is_measured_in_it(capability):
    assert training_dtype(dataclasses.replace(A100, compute_capability=capability)) == "bf16"


@pytest.mark.parametrize("capability", ["gfx906", "7.5"])
def test_what_lacks_bf16_is_not(capability):
    assert training_dtype(dataclasses.replace(A100, compute_capability=capability)) == "fp16"


def test_related_trials_are_spread_over_the_device_part():
    plan = calibration_plan(A100, "quick")
    busy = [spec for spec in plan if spec.bench in DEVICE_BENCHES]
    assert list(plan[: len(busy)]) == busy
    half = busy[: len(busy) // 2]
    for bench in ("gemm", "memory", "attention", "step"):
        share = sum(spec.bench == bench for spec in half) / sum(spec.bench == bench for spec in busy)
        assert 0.4 <= share <= 0.6, bench


@pytest.mark.parametrize(("hardware", "mode"), EVERYTHING)
def test_disks_come_last_and_the_host_right_after_the_work_of_every_model(hardware, mode):
    turns = [
        turn for spec in calibration_plan(hardware, mode) for turn in range(len(ORDER)) if spec.bench in ORDER[turn]
    ]
    assert turns == sorted(turns)
    assert set(turns) >= {0, 1, ORDER.index(STORAGE_BENCHES)}


def test_a_card_that_runs_out_of_time_has_its_host_measured():
    """A T4 has none left for the last dozen trials."""
    measured = {spec.bench for spec in calibration_plan(T4, "quick")[:-12]}
    assert {*DEVICE_BENCHES, *HOST_BENCHES} <= measured
    assert not measured & {"disk", "load", "checkpoint"}


def test_budgets_end_within_the_promise_and_mocks_have_none():
    for hardware, promise_s in ((A100, 180), (CPU, 120)):
        limits = budget(hardware, "quick")
        assert limits.settle_s + limits.trials_s <= promise_s
    assert budget(MOCK, "quick").trials_s is None
