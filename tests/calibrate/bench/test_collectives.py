"""Collectives really run between processes (gloo on this CPU), and the fit finds the link behind such times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.bench import run_bench
from tunecast.calibrate.bench.collectives import CollectiveGroup, close_groups
from tunecast.calibrate.devices.open import open_device
from tunecast.calibrate.devices.protocol import TrialSpec
from tunecast.calibrate.fit_rates import rate_factors
from tunecast.calibrate.plan import COLLECTIVE_BYTES, calibration_plan, collectives
from tunecast.calibrate.runner import checked_gpus, trial_entry
from tunecast.catalogs.errors import InputError
from tunecast.model.units import KIB, MIB

TWO = ("cpu", "cpu")
OPS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    close_groups()


@pytest.mark.parametrize("op", OPS)
def test_two_processes_of_this_cpu_are_timed(op: str) -> None:
    device = open_device("cpu")
    spec = TrialSpec(bench="collective", params={"op": op, "bytes": MIB, "world_size": 2}, repeats=4, warmup=2)
    assert device.supports(spec)
    result = run_bench(spec, device.backend)  # type: ignore[attr-defined]
    assert result.outcome == "ok"
    assert (len(result.samples_s), len(result.warmup_s)) == (4, 2)
    assert min(result.samples_s) > 0
    assert result.extra["library"] == "gloo"


def test_what_a_process_says_reaches_the_caller() -> None:
    group = CollectiveGroup(TWO)
    with pytest.raises(RuntimeError, match=r"KeyError: 'all_to_none'$"):
        group.seconds("all_to_none", KIB, repeats=1, warmup=0)
    assert not group._folder.exists()


def test_collectives_come_last_and_only_between_several() -> None:
    hardware = open_device("mock:a100-sxm4-80gb").hardware()
    alone, four = calibration_plan(hardware), calibration_plan(hardware, num_gpus=4)
    assert not [spec for spec in alone if spec.bench == "collective"]
    assert four[: len(alone)] == alone
    asked = {(spec.params["op"], spec.params["bytes"], spec.params["world_size"]) for spec in four[len(alone) :]}
    assert asked == {(op, n_bytes, 4) for op in OPS for n_bytes in COLLECTIVE_BYTES["gpu"]}


def fitted_link(trials: list[dict[str, Any]]) -> tuple[Any, Any]:
    factors = rate_factors(trials)
    return factors["link_bytes_per_s"], factors["link_latency_s"]


@pytest.mark.parametrize(("rate", "latency_s", "world"), [(200e9, 10e-6, 8), (12e9, 40e-6, 2), (1e9, 2e-4, 4)])
def test_the_fit_finds_a_planted_link(rate: float, latency_s: float, world: int) -> None:
    rng, trials = np.random.default_rng(world), []
    for op in OPS:
        rounds = 2 if op == "all_reduce" else 1
        for n_bytes in COLLECTIVE_BYTES["gpu"]:
            truth_s = rounds * (world - 1) * (n_bytes / world / rate + latency_s)
            samples = [truth_s * float(np.exp(0.02 * rng.standard_normal())) for _ in range(5)]
            params = {"op": op, "bytes": n_bytes, "world_size": world}
            trials.append({"bench": "collective", "params": params, "outcome": "ok", "samples_s": samples})
    found_rate, found_latency = fitted_link(trials)
    assert found_rate.value == pytest.approx(rate, rel=0.05)
    assert found_latency.value == pytest.approx(latency_s, rel=0.1)
    assert found_rate.low < found_rate.value < found_rate.high


def test_the_link_of_a_simulated_card_is_found_though_its_law_is_another() -> None:
    device = open_device("mock:a100-sxm4-80gb#3")
    specs = collectives(device.hardware(), 4)
    trials = [trial_entry(spec, device.run(spec)) for spec in specs]
    rate, _ = fitted_link(trials)
    large = dataclasses.replace(specs[-1], params={"op": "all_gather", "bytes": 4096 * MIB, "world_size": 4})
    truth = device.run(large).samples_s
    assert 3 * (4096 * MIB / 4) / rate.value == pytest.approx(float(np.median(truth)), rel=0.1)


def test_more_gpus_than_there_are_is_refused() -> None:
    class Two:
        id = "cuda:0"

        def peers(self) -> int:
            return 2

    assert checked_gpus(Two(), None) == 2  # type: ignore[arg-type]
    assert checked_gpus(Two(), 1) == 1  # type: ignore[arg-type]
    for asked in (0, 3):
        with pytest.raises(InputError, match="--num-gpus"):
            checked_gpus(Two(), asked)  # type: ignore[arg-type]


def test_a_cpu_runs_as_many_processes_as_it_has_cores() -> None:
    """Two always, so that a single core too can say what its collectives take."""
    device = open_device("cpu")
    assert checked_gpus(device, 2) == 2
    with pytest.raises(InputError, match=r"--num-gpus 100000 .* this CPU runs at most \d+ processes"):
        checked_gpus(device, 100_000)
