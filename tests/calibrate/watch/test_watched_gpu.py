"""Looking at a GPU neither slows the job on it nor counts as a step; on a synthetic machine with a clock for each."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from tunecast.calibrate.devices import nvidia
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.device import WatchedGpu
from tunecast.calibrate.watch.watcher import Watcher

pytest.importorskip("torch")
pytest.importorskip("pynvml")

from synthetic_nvidia import Machine

STEP_S = 0.1
READING_S, PCIE_S = 3e-3, 0.02
"""On the host: NVML's sensors in all (assumed), and each of its PCIe counters (its documentation)."""
STEPS = 200


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A card that is at its power limit while it works; every reading takes the host what it would."""
    fake = Machine("healthy")

    def reasons(_board: Any) -> int:
        fake.timeline.host(READING_S)
        return 0x4 if fake.timeline.device_ready_s > fake.timeline.host_s else 0x1

    def throughput(_board: Any, _counter: int) -> int:
        fake.timeline.host(PCIE_S)
        return 0

    fake.pynvml.nvmlDeviceGetCurrentClocksEventReasons.side_effect = reasons
    fake.pynvml.nvmlDeviceGetPcieThroughput.side_effect = throughput
    opened = functools.partial(
        nvidia.open_nvidia, torch=fake.torch, pynvml=fake.pynvml, torch_device="cpu", clock=fake.timeline
    )
    monkeypatch.setattr(nvidia, "open_nvidia", opened)
    return fake


@pytest.fixture
def gpu(machine: Machine) -> Iterator[WatchedGpu]:
    device = WatchedGpu(0)
    yield device
    device.close()


def issue_step(machine: Machine) -> None:
    """The host is at most a step ahead: then the queue of launches is full."""
    timeline = machine.timeline
    timeline.host(max(timeline.device_ready_s - STEP_S - timeline(), 0.0))
    timeline.issue(STEP_S)


def test_a_watched_job_takes_as_long_as_one_that_is_not(machine: Machine, gpu: WatchedGpu) -> None:
    watcher = Watcher(device=gpu, clock=StepClock(synchronize=gpu.synchronize, now=machine.timeline), max_steps=STEPS)
    begun_s = machine.timeline()
    for step in range(1, STEPS + 1):
        watcher.clock.step_begins()
        issue_step(machine)
        watcher.step_ends(step)
    watcher.clock.finish()
    assert machine.timeline() - begun_s == pytest.approx(STEPS * STEP_S, rel=1e-3)
    measured = watcher.clock.step_time_s()
    assert measured is not None
    assert measured.value == pytest.approx(STEP_S, rel=1e-3)
    assert len(watcher.sensors) >= 8
    assert watcher.flags == {"power_capped"}
    assert {tuple(reading["throttle_reasons"]) for reading in watcher.sensors} == {("sw_power_cap",)}


def test_a_look_reads_no_counter_that_takes_a_window_of_its_own(machine: Machine, gpu: WatchedGpu) -> None:
    reading = gpu.sensors()
    assert (reading.power_w, reading.pcie_rx_bytes_per_s) == (312.5, None)
    assert reading.pcie_gen == 3
    machine.pynvml.nvmlDeviceGetPcieThroughput.assert_not_called()
