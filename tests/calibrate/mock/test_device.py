"""The mock behind the `Device` protocol: every bench answered, out of memory an outcome, sensors that move."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from tunecast.calibrate.devices.protocol import Device, TrialSpec
from tunecast.calibrate.mock.device import MockDevice, open_mock
from tunecast.catalogs.errors import NotSupportedError
from tunecast.catalogs.gpus import find_gpu, load_gpus
from tunecast.model.units import GIB, GIGA, MIB

HEADS = {"batch": 1, "heads": 32, "kv_heads": 8, "length": 2048, "head_dim": 128, "dtype": "bf16"}
QUANT = {"quant_type": "nf4", "double_quant": True, "dtype": "bf16"}
TRIALS: list[tuple[str, dict[str, Any]]] = [
    ("gemm", {"m": 2048, "n": 4096, "k": 4096, "dtype": "bf16", "layout": "tn"}),
    ("gemm", {"m": 2048, "n": 16, "k": 4096, "dtype": "fp32", "layout": "nt"}),
    ("memory", {"op": "copy", "bytes": GIB, "dtype": "bf16"}),
    ("memory", {"op": "read", "bytes": 64 * MIB, "dtype": "fp32"}),
    ("memory", {"op": "add", "bytes": 65536, "dtype": "bf16"}),
    ("dequant", {"elements": 4096 * 14336, "rows": 4096, "cols": 14336, **QUANT}),
    ("matmul_4bit", {"m": 2048, "n": 14336, "k": 4096, "pass": "forward", **QUANT}),
    ("matmul_4bit", {"m": 2048, "n": 14336, "k": 4096, "pass": "backward", **QUANT}),
    ("attention", {**HEADS, "pass": "forward"}),
    ("attention", {**HEADS, "pass": "backward"}),
    ("loss", {"tokens": 2048, "vocab": 128256, "dtype": "bf16"}),
    ("optimizer", {"elements": 40_000_000, "tensors": 448, "optim": "adamw_torch"}),
    ("optimizer", {"elements": 40_000_000, "tensors": 448, "optim": "adamw_torch_fused"}),
    ("optimizer", {"elements": 40_000_000, "tensors": 448, "optim": "paged_adamw_8bit"}),
    ("launch", {"kernels": 1000}),
    ("sync", {}),
    ("transfer", {"bytes": GIB, "pinned": True, "direction": "h2d"}),
    ("transfer", {"bytes": GIB, "pinned": False, "direction": "d2h"}),
    ("disk", {"bytes": GIB, "cold": True, "direction": "read"}),
    ("disk", {"bytes": GIB, "cold": False, "direction": "write"}),
    ("load", {"bytes": GIB, "quantize": True}),
    ("checkpoint", {"bytes": 160 * MIB}),
    ("collective", {"op": "all_reduce", "bytes": 64 * MIB, "world_size": 8}),
]


def trial(bench: str, repeats: int = 5, warmup: int = 1, **params: Any) -> TrialSpec:
    return TrialSpec(bench=bench, params=params, repeats=repeats, warmup=warmup)


def hot(name: str = "mock:a100-sxm4-80gb#1") -> MockDevice:
    device = open_mock(name)
    assert device.settle(60)
    return device


def median_s(device: MockDevice, bench: str, **params: Any) -> float:
    return statistics.median(device.run(trial(bench, 9, 1, **params)).samples_s)


def test_mock_satisfies_the_protocol() -> None:
    device: Device = open_mock("mock:a100-sxm4-80gb")
    assert device.hardware().memory_bytes == find_gpu("a100-sxm4-80gb").usable_bytes
    assert device.software()["torch"]
    device.close()


@pytest.mark.parametrize(("bench", "params"), TRIALS, ids=[f"{i}-{b}" for i, (b, _) in enumerate(TRIALS)])
@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "t4-16gb"])
def test_every_bench_is_answered(gpu: str, bench: str, params: dict[str, Any]) -> None:
    result = hot(f"mock:{gpu}").run(trial(bench, **params))
    assert result.outcome == "ok"
    assert (len(result.samples_s), len(result.warmup_s)) == (5, 1)
    assert all(1e-6 < s < 60 for s in result.samples_s)


def test_every_catalog_gpu_is_simulated_or_refused_by_name() -> None:
    refused = set()
    for gpu_id in load_gpus():
        try:
            device = open_mock(f"mock:{gpu_id}")
        except NotSupportedError:
            refused.add(gpu_id)
            continue
        assert device.settle(60)
        assert 0 < median_s(device, "gemm", m=4096, n=4096, k=4096, dtype="fp16", layout="nt") < 1
    assert len(load_gpus()) - len(refused) >= 20
    assert refused.isdisjoint({"a100-sxm4-80gb", "rtx-4090-24gb", "h100-sxm5-80gb", "h200-sxm5-141gb", "t4-16gb"})


def test_every_sample_is_finite_for_shapes_of_one() -> None:
    device = hot()
    assert median_s(device, "gemm", m=1, n=1, k=1, dtype="bf16", layout="nt") > 0
    assert median_s(device, "memory", op="copy", bytes=4, dtype="bf16") > 0


def test_unknown_bench_and_many_gpus_are_unsupported() -> None:
    device = hot()
    assert device.run(trial("telepathy")).outcome == "unsupported"
    assert not device.supports(trial("step", architecture={}, run={"num_gpus": 2}))


def test_out_of_memory_is_an_outcome_unless_memory_is_ignored() -> None:
    too_much = trial("memory", op="copy", bytes=90 * GIB, dtype="bf16")
    refused = hot().run(too_much)
    assert (refused.outcome, refused.samples_s) == ("oom", ())
    assert "out of memory" in refused.message
    ignoring = open_mock("mock:a100-sxm4-80gb#1", ignore_memory=True)
    assert ignoring.run(too_much).outcome == "ok"


def test_copies_stay_below_the_bandwidth_and_transfers_below_pcie() -> None:
    device = hot()
    assert 0.70 < GIB / median_s(device, "memory", op="copy", bytes=GIB, dtype="bf16") / (2039 * GIGA) < 0.95
    pinned = GIB / median_s(device, "transfer", bytes=GIB, pinned=True, direction="h2d")
    pageable = GIB / median_s(device, "transfer", bytes=GIB, pinned=False, direction="h2d")
    assert 24 * GIGA < pinned < 31.5 * GIGA
    assert pageable < 0.7 * pinned


def test_launch_is_host_time_of_all_kernels_and_sync_adds_a_wait() -> None:
    device = hot()
    result = device.run(trial("launch", kernels=500))
    assert statistics.median(result.samples_s) / 500 == pytest.approx(device.physics.host.operator_s, rel=0.03)
    assert len(result.extra["synchronised_s"]) == 5
    assert min(result.extra["synchronised_s"]) > device.physics.host.operator_s * 500


def test_tiny_kernels_in_a_loop_go_at_the_pace_of_the_host() -> None:
    device, slow = hot(), hot("mock:a100-sxm4-80gb#1@slow-host")
    tiny = {"m": 16, "n": 16, "k": 16, "dtype": "bf16", "layout": "nt"}
    assert median_s(slow, "gemm", **tiny) > 1.5 * median_s(device, "gemm", **tiny)


def test_double_quantization_and_fused_optimizer_change_the_time_the_right_way() -> None:
    device = hot()
    weight = {"rows": 4096, "cols": 4096, "elements": 4096 * 4096, "quant_type": "nf4", "dtype": "bf16"}
    assert median_s(device, "dequant", double_quant=True, **weight) > median_s(
        device, "dequant", double_quant=False, **weight
    )
    tensors = {"elements": 80_000_000, "tensors": 448}
    fused = median_s(device, "optimizer", optim="adamw_torch_fused", **tensors)
    assert fused < 0.5 * median_s(device, "optimizer", optim="adamw_torch", **tensors)


PRODUCT = trial("gemm", 30, 3, m=8192, n=8192, k=8192, dtype="bf16", layout="nt")


@pytest.mark.parametrize(
    ("gpu", "bench"), [("a100-sxm4-80gb", "lasting"), ("h100-sxm5-80gb", "gemm"), ("rtx-4090-24gb", "gemm")]
)
def test_a_hot_card_is_slower_than_a_cold_one(gpu: str, bench: str) -> None:
    """An A100's highest clock does not fall with heat; what power leaves of it does, where work lasts."""
    cold, warm = open_mock(f"mock:{gpu}#1"), hot(f"mock:{gpu}#1")
    first, last = (device.run(replace(PRODUCT, bench=bench)) for device in (cold, warm))
    assert statistics.median(last.samples_s) > 1.002 * statistics.median(first.samples_s)
    assert last.sensors_after is not None
    assert first.sensors_after is not None
    assert (last.sensors_after.sm_clock_mhz or 0) < (first.sensors_after.sm_clock_mhz or 0)
    assert (last.sensors_after.temperature_c or 0) > (first.sensors_after.temperature_c or 0)


def test_settling_needs_its_time() -> None:
    device = open_mock("mock:a100-sxm4-80gb#1")
    assert not device.settle(0.5)
    assert device.settle(60)


def test_sensors_follow_the_work() -> None:
    device = open_mock("mock:h100-sxm5-80gb#1")
    idle = device.sensors()
    device.settle(60)
    busy = device.sensors()
    device.run(PRODUCT)
    after = device.sensors()
    assert (after.power_w or 0) < (busy.power_w or 0)
    assert (after.sm_clock_mhz or 0) > (busy.sm_clock_mhz or 0)
    assert (after.energy_j or 0) > (idle.energy_j or 0)
    assert idle.throttle_reasons == ("gpu_idle",)
    assert (busy.power_w or 0) > 3 * (idle.power_w or 0)
    assert (busy.power_w or 0) <= device.card.tdp_w * 1.001
    assert busy.other_processes == 0


def test_throttled_card_is_slower_and_says_why() -> None:
    plain, throttled = hot("mock:h100-sxm5-80gb#3"), hot("mock:h100-sxm5-80gb#3@throttling")
    assert throttled.true_seconds(PRODUCT) > 1.05 * plain.true_seconds(PRODUCT)
    after = throttled.run(PRODUCT).sensors_after
    assert after is not None
    assert "sw_thermal_slowdown" in (after.throttle_reasons or ())


def test_context_is_seen_only_from_outside_the_process() -> None:
    device = hot()
    reading = device.run(trial("memory", op="copy", bytes=GIB, dtype="bf16")).memory
    assert reading.allocated_bytes == GIB
    assert reading.process_bytes is not None
    assert reading.reserved_bytes is not None
    assert reading.process_bytes - reading.reserved_bytes == device.physics.allocator.context_bytes


def test_smaller_card_runs_out_first() -> None:
    device = hot()
    small = MockDevice(replace(device.card, usable_bytes=GIB), device.physics)
    assert small.run(trial("memory", op="copy", bytes=GIB, dtype="bf16")).outcome == "oom"
