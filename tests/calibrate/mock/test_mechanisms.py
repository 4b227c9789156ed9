"""Each mechanism matters: changing it alone changes the truth of a step. Nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tunecast.calibrate.mock.device import MockDevice, open_mock, with_physics
from tunecast.calibrate.mock.draw import OTHER_TILES, slower_host
from tunecast.calibrate.mock.physics import Physics
from tunecast.model.operation import Operation

Change = Callable[[Physics], dict[str, object]]

ON_THE_DEVICE: dict[str, Change] = {
    "tile sizes": lambda p: {"gemm": replace(p.gemm, tiles=OTHER_TILES)},
    "wave quantisation": lambda p: {"gemm": replace(p.gemm, wave_quantisation=False)},
    "pipeline prologue": lambda p: {"gemm": replace(p.gemm, prologue_clk=3 * p.gemm.prologue_clk)},
    "split k": lambda p: {"gemm": replace(p.gemm, split_k=(1,))},
    "layout penalty": lambda p: {"gemm": replace(p.gemm, layout_rate={"nt": 1.0, "nn": 1.0, "tn": 0.5})},
    "main loop": lambda p: {"gemm": replace(p.gemm, ceiling=0.9 * p.gemm.ceiling)},
    "attention rate": lambda p: {"attention": replace(p.attention, legacy_rate=0.7)},
    "softmax": lambda p: {"attention": replace(p.attention, exp_per_clk=4.0)},
    "attention blocks": lambda p: {"attention": replace(p.attention, block_q=256)},
    "bandwidth": lambda p: {"memory": replace(p.memory, bandwidth_frac=0.7)},
    "bandwidth ramp": lambda p: {"memory": replace(p.memory, inflight_bytes_per_block=500.0)},
    "DRAM latency": lambda p: {"memory": replace(p.memory, latency_s=3 * p.memory.latency_s)},
    "cache hits": lambda p: {"memory": replace(p.memory, l2_keep=0.0)},
    "access pattern": lambda p: {"memory": replace(p.memory, class_rate={**p.memory.class_rate, "reduction": 0.5})},
    "casts": lambda p: {"memory": replace(p.memory, upcast_bytes_per_clk=3.0)},
    "dequantization": lambda p: {"memory": replace(p.memory, dequant_elements_per_clk=8.0)},
    "power limit": lambda p: {"power": replace(p.power, limit=0.6)},
    "heat": lambda p: {"power": replace(p.power, hot_c=p.power.throttle_c + 15)},
    "launch gap": lambda p: {"launch": replace(p.launch, gap_s=5 * p.launch.gap_s)},
    "shortest kernel": lambda p: {"launch": replace(p.launch, minimum_s=5 * p.launch.minimum_s)},
}
ON_THE_HOST: dict[str, Change] = {
    "host speed": lambda p: {"host": slower_host(p.host, 1.5)},
    "module overhead": lambda p: {"host": replace(p.host, module_s=2 * p.host.module_s)},
    "layer overhead": lambda p: {"host": replace(p.host, layer_s=2 * p.host.layer_s)},
    "operators differ": lambda p: {"host": replace(p.host, variety=0.0)},
    "jitter": lambda p: {"host": replace(p.host, jitter=8 * p.host.jitter)},
    "backward engine": lambda p: {"host": replace(p.host, phase_factor={**p.host.phase_factor, "backward": 1.0})},
    "synchronisation": lambda p: {"host": replace(p.host, sync_s=10 * p.host.sync_s)},
}


def changed(device: MockDevice, change: Change, stream: tuple[Operation, ...]) -> float:
    """Truth after the change over truth before."""
    return with_physics(device, **change(device.physics)).simulate(stream) / device.simulate(stream)


@pytest.mark.parametrize("mechanism", ON_THE_DEVICE)
def test_device_mechanism_changes_the_truth(
    mechanism: str, a100: MockDevice, device_bound_step: tuple[Operation, ...]
) -> None:
    quick_host = with_physics(a100, host=slower_host(a100.physics.host, 0.01))
    assert abs(changed(quick_host, ON_THE_DEVICE[mechanism], device_bound_step) - 1) > 3e-4


@pytest.mark.parametrize("mechanism", ON_THE_HOST)
def test_host_mechanism_changes_the_truth(
    mechanism: str, a100: MockDevice, host_bound_step: tuple[Operation, ...]
) -> None:
    assert abs(changed(a100, ON_THE_HOST[mechanism], host_bound_step) - 1) > 1e-3


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-4090-24gb"])
@pytest.mark.parametrize("variant", ["tiles", "throttling", "slow-host"])
def test_variant_is_the_same_machine_with_one_thing_different(gpu: str, variant: str) -> None:
    base, other = open_mock(f"mock:{gpu}#4").physics, open_mock(f"mock:{gpu}#4@{variant}").physics
    part = {"tiles": "gemm", "throttling": "power", "slow-host": "host"}[variant]
    parts = ("gemm", "attention", "memory", "power", "launch", "host", "allocator", "noise")
    assert [p for p in parts if getattr(base, p) != getattr(other, p)] == [part]
