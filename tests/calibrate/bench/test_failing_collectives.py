"""Collectives that hang or break: their processes end, say why, and cost the calibration their time only once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunecast.calibrate.bench import collective_worker, collectives, run_bench
from tunecast.calibrate.bench.collectives import JOB_TIMEOUT_S, CollectiveGroup, close_groups
from tunecast.calibrate.devices.open import open_device
from tunecast.calibrate.devices.protocol import TrialSpec
from tunecast.calibrate.plan import collectives as planned
from tunecast.model.units import KIB

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

TWO = ("cpu", "cpu")
ENDLESS = 10**9
"""Repetitions of a collective that nobody sees the end of."""


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    close_groups()


# -- what stays ------------------------------------------------------------------------------------------------


def test_processes_that_hang_are_ended_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = CollectiveGroup(TWO)
    agent = psutil.Process(group._process.pid)
    started = [agent, *agent.children(recursive=True)]
    assert len(started) == 3
    monkeypatch.setattr(collectives, "JOB_TIMEOUT_S", 1.0)
    with pytest.raises(RuntimeError, match=r"did not finish all_reduce of 1024 bytes: nothing happened for 1 s$"):
        group.seconds("all_reduce", KIB, repeats=ENDLESS, warmup=0)
    assert not [process for process in started if process.is_running()]
    assert not group._folder.exists()


def test_silence_between_gpus_names_what_to_try() -> None:
    group = object.__new__(CollectiveGroup)
    group._devices = ("cuda:0", "cuda:1")
    assert group._silence(JOB_TIMEOUT_S).endswith(
        "for 120 s; where GPUs hang when they talk to each other directly, NCCL_P2P_DISABLE=1 avoids it"
    )


# -- what it costs ---------------------------------------------------------------------------------------------


def test_what_hangs_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []

    class Hanging:
        def __init__(self, devices: tuple[str, ...]) -> None:
            made.append(devices)

        def seconds(self, *_: Any, **__: Any) -> list[float]:
            raise RuntimeError("The processes did not finish all_reduce of 65536 bytes: nothing happened for 120 s")

        def close(self) -> None:
            """It has ended."""

    monkeypatch.setattr(collectives, "CollectiveGroup", Hanging)
    device = open_device("cpu")
    results = [device.run(spec) for spec in planned(device.hardware(), 2)]
    assert len(results) == 9
    assert {result.outcome for result in results} == {"error"}
    (message,) = {result.message for result in results}
    assert "nothing happened for 120 s" in message
    assert made == [TWO]
    close_groups()  # as closing the device does: another calibration tries again
    device.run(planned(device.hardware(), 2)[0])
    assert made == [TWO, TWO]


def test_after_a_real_failure_the_remaining_collectives_answer_at_once_in_the_same_words() -> None:
    backend = open_device("cpu").backend  # type: ignore[attr-defined]

    def asked(op: str) -> TrialSpec:
        return TrialSpec(bench="collective", params={"op": op, "bytes": KIB, "world_size": 2}, repeats=1, warmup=0)

    with pytest.raises(RuntimeError) as first:
        run_bench(asked("all_to_none"), backend)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as second:
        run_bench(asked("all_reduce"), backend)
    assert time.monotonic() - start_s < 1.0  # a new group takes longer to import torch
    assert str(second.value) == str(first.value)


# -- how GPUs join ---------------------------------------------------------------------------------------------


def test_a_gpu_has_joined_once_a_collective_went_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL connects GPUs in the first collective, so a group that was only initialised says nothing of its links."""
    import torch.distributed as dist

    happened: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda n, device: SimpleNamespace(device=str(device)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: happened.append(("set_device", str(device))))
    monkeypatch.setattr(
        dist, "init_process_group",
        lambda library, device_id, timeout: happened.append((library, str(device_id), timeout.total_seconds())),
    )  # fmt: skip
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: happened.append(("all_reduce", tensor.device)))
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda: happened.append(("waited", (tmp_path / "joined-1").exists()))
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: happened.append("left"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TUNECAST_STARTER_PID", "1")
    (tmp_path / "stop").touch()
    collective_worker.main(tmp_path, "nccl", 60.0, ["cuda:3", "cuda:5"])
    assert happened == [
        ("set_device", "cuda:5"),
        ("nccl", "cuda:5", 60.0),
        ("all_reduce", "cuda:5"),
        ("waited", False),
        "left",
    ]
    assert (tmp_path / "joined-1").exists()
