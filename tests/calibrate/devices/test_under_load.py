"""Sensors are read while the card works: what slows it, its clocks and its power are those of the moment."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec
from tunecast.calibrate.devices.settle import SettleRule
from tunecast.catalogs.errors import DeviceError
from tunecast.model.power import measured_power_w

STEP = TrialSpec(bench="step", params={}, repeats=4, warmup=2)
IDLE, HOT = 0x1, 0x4 | 0x40
READING_S = 3e-3
"""What NVML takes on the host for a reading, in all (assumed)."""


@pytest.fixture
def busy_or_idle(machine):
    """A card that is hot and at its power limit while it works, and shows nothing of it as soon as it is idle."""
    fake = machine("healthy")

    def busy() -> bool:
        return bool(fake.timeline.device_ready_s > fake.timeline.host_s)

    def reasons(_board: Any) -> int:
        fake.timeline.host(READING_S)
        return HOT if busy() else IDLE

    fake.pynvml.nvmlDeviceGetCurrentClocksEventReasons.side_effect = reasons
    fake.scenario.boards[0].instant_power_mw = None
    fake.pynvml.nvmlDeviceGetPowerUsage.side_effect = lambda _board: 395_000 if busy() else 80_000
    return fake


def steps(fake, *, device_s: float = 0.1, host_s: float = 0.0):
    """Steps that take the device and the host so long."""

    def one() -> None:
        fake.timeline.host(host_s)
        fake.timeline.issue(device_s)

    def run(spec: TrialSpec, backend: Any) -> TrialResult:
        warmup_s, samples_s = backend.timed(one, repeats=spec.repeats, warmup=spec.warmup)
        return TrialResult(outcome="ok", samples_s=samples_s, warmup_s=warmup_s)

    return run


def test_a_step_shows_the_card_at_work(busy_or_idle, opened):
    device = opened(busy_or_idle, runner=steps(busy_or_idle))
    result = device.run(STEP)
    assert result.sensors_before.throttle_reasons == ("gpu_idle",)
    assert result.sensors_after.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert device.flags() == ("power_capped", "throttled")
    trial = {"bench": "step", "outcome": "ok", "samples_s": [2.0],
             "sensors_after": {"power_w": result.sensors_after.power_w}}  # fmt: skip
    assert measured_power_w({"trials": [trial]}) == 395.0


@pytest.mark.parametrize(
    ("device_s", "host_s"), [(0.1, 0.0), (1e-3, 0.02)], ids=["the device is slower", "the host is slower"]
)
def test_reading_takes_no_time_of_counted_steps(busy_or_idle, opened, device_s, host_s):
    device = opened(busy_or_idle, runner=steps(busy_or_idle, device_s=device_s, host_s=host_s))
    result = device.run(STEP)
    assert result.samples_s == pytest.approx([max(device_s, host_s)] * STEP.repeats, rel=0.06)
    assert result.warmup_s == pytest.approx([max(device_s, host_s)] * STEP.warmup, rel=0.06)
    assert result.extra["clocks_disagree"] is False
    assert "nvmlDeviceGetPcieThroughput" not in busy_or_idle.calls


def test_other_trials_are_read_before_and_after(busy_or_idle, opened):
    gemm = TrialSpec(bench="gemm", params={"dtype": "bf16"}, repeats=2, warmup=1)
    device = opened(busy_or_idle, runner=steps(busy_or_idle))
    device.run(STEP)
    assert device.run(gemm).sensors_after.throttle_reasons == ("gpu_idle",)


def test_a_step_that_ends_before_its_warm_up_has_the_reading_after_it(busy_or_idle, opened):
    def full(_spec, _backend):
        raise busy_or_idle.torch.cuda.OutOfMemoryError("CUDA out of memory")

    result = opened(busy_or_idle, runner=full).run(STEP)
    assert (result.outcome, result.sensors_after.throttle_reasons) == ("oom", ("gpu_idle",))


def test_a_card_lost_after_the_warm_up_is_a_device_error(busy_or_idle, opened):
    def lose(spec, backend):
        found = steps(busy_or_idle)(spec, backend)
        busy_or_idle.lose()
        return found

    with pytest.raises(DeviceError, match="GpuIsLost"):
        opened(busy_or_idle, runner=lose).run(STEP)


def test_without_nvml_a_step_is_measured_all_the_same(machine, opened):
    fake = machine("sandbox_without_nvml")
    result = opened(fake, runner=steps(fake)).run(STEP)
    assert (result.outcome, result.sensors_after.power_w) == ("ok", None)


def test_what_slows_the_card_while_it_warms_up_is_flagged(busy_or_idle, opened):
    device = opened(busy_or_idle, rule=SettleRule(size=8))
    assert device.flags() == ()
    device.settle(10.0)
    assert device.flags() == ("power_capped", "throttled")
