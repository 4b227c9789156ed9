"""Walks over a model's modules: the trial against the Trainer's own calls, and what a record then says of its time."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from scripted_device import HARDWARE

from tunecast.calibrate.bench import run_bench
from tunecast.calibrate.devices.cpu import CpuBackend
from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.fit_rates import walk_factors
from tunecast.calibrate.mock.device import MockDevice, open_mock
from tunecast.calibrate.plan import calibration_plan
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import HOST_S_PER_LAUNCH, Factor, FactorSet
from tunecast.model.resolve import resolve_run
from tunecast.model.shared_host import HostRecord, with_shared_host
from tunecast.model.trainer_loop import (
    HOST_WALKS,
    IN_THE_TRAINER,
    WALK_LAUNCHES,
    WALKS_OF_A_STEP,
    walk_log_sd,
    walk_origin,
    walk_origins,
)
from tunecast.model.value import Z80

NAME = "mock:a100-sxm4-80gb#4"


def spec_of(hardware: Hardware) -> TrialSpec:
    (found,) = (spec for spec in calibration_plan(hardware, "quick") if spec.bench == "modules")
    return found


def trial_of(device: MockDevice) -> dict[str, Any]:
    spec = spec_of(device.hardware())
    result = device.run(spec)
    return {
        "bench": spec.bench, "params": spec.params, "outcome": "ok", "samples_s": result.samples_s,
        "extra": result.extra,
    }  # fmt: skip


def test_the_trial_goes_over_a_model_as_big_as_those_that_are_trained() -> None:
    """0.5B parameters with adapters on all maps are 2,001 modules, and so many are gone over: really, on the CPU."""
    result = run_bench(replace(spec_of(HARDWARE), repeats=3), CpuBackend())
    assert result.outcome == "ok"
    assert result.extra["modules"] == 2001
    assert len(result.samples_s) == 3
    assert all(math.isfinite(sample) and sample > 0 for sample in result.samples_s)


def test_what_it_calls_is_what_the_trainer_calls() -> None:
    """Every call that goes over all modules is in the Trainer's own code, where the steps are driven."""
    transformers = pytest.importorskip("transformers")
    from tunecast.calibrate.bench.module_walks import walk_over

    calls: list[str] = []

    class Model:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any, **kwargs: Any) -> Iterator[Any]:
                calls.append(name)
                return iter(())

            return called

    walk_over(Model())
    trainer = inspect.getsource(transformers.Trainer)
    assert len(calls) == WALKS_OF_A_STEP
    assert all(f"model.{name}(" in trainer for name in calls)


@pytest.mark.parametrize("seed", range(5))
def test_a_simulated_hosts_walks_are_found(seed: int) -> None:
    """Whatever a launch costs it: the seconds of a module are those of its physics, and the Trainer's some longer."""
    device = open_mock(f"mock:l40s-48gb#{seed}")
    truth_s = device.physics.host.walk_s
    for host_s in (3e-6, 30e-6):
        (factor,) = walk_factors([trial_of(device)], host_s).values()
        assert truth_s < factor.value * host_s < 1.5 * truth_s
        assert factor.low < factor.value < factor.high
        assert factor.origin == "measured"
    assert walk_factors([], 3e-6) == {}


def test_how_much_longer_walks_take_within_the_trainer_is_as_measured() -> None:
    """On a processor, the Trainer's own calls over the same ones by themselves: the constant lies within the rounds."""
    path = Path(__file__).parents[2] / "results" / "validation" / "trainer-walks.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    ratios = [each["in_the_trainer_s"] / each["alone_s"] for each in found["in_place"]]
    assert len(ratios) >= 6
    assert min(ratios) < IN_THE_TRAINER < max(ratios)
    assert median(ratios) == pytest.approx(IN_THE_TRAINER, rel=0.1)


def host_only(values: dict[str, Factor]) -> FactorSet:
    return FactorSet(
        gpu="l40s-48gb", curves={}, factors=values, step_log_sd=0.0, memory_overhead_bytes={}, synchronous=False,
        step_params=(HOST_S_PER_LAUNCH,), step_covariance=((0.16,),),
    )  # fmt: skip


def a_factor(value: float, log_sd: float, unit: str, origin: str = "measured") -> Factor:
    wide = math.exp(Z80 * log_sd)
    return Factor(value=value, low=value / wide, high=value * wide, unit=unit, origin=origin)


def test_a_record_that_measured_it_is_surer_and_says_so() -> None:
    measured = host_only({HOST_WALKS: a_factor(0.3, 0.1, "1")})
    assumed, run = host_only({}), resolved("lora")
    assert walk_log_sd(measured) == pytest.approx(0.1)
    assert walk_log_sd(assumed) > 0.1
    assert (walk_origin(measured), walk_origin(assumed)) == ("measured", "assumed")
    assert (walk_origins(run, measured), list(walk_origins(run, assumed).values())) == ({}, ["assumed"])


def resolved(method: str) -> Any:
    options = {"method": method, "max_length": 512, "per_device_train_batch_size": 1, "gradient_checkpointing": False}
    return resolve_run(load_architecture("Qwen/Qwen2.5-0.5B"), options, gpu_has_bf16=True).run


def test_a_shared_host_brings_its_walks() -> None:
    """Between what is assumed of any host and what this one's record measured, as far as the launch moves."""
    known = {HOST_S_PER_LAUNCH: a_factor(20e-6, 0.05, "s"), HOST_WALKS: a_factor(0.3, 0.2, "1")}
    prior = host_only({HOST_S_PER_LAUNCH: a_factor(7e-6, 0.4, "s")})
    moved = with_shared_host(prior, HostRecord(gpu="a40-48gb", factors=host_only(known))).factors
    assert WALK_LAUNCHES < moved[HOST_WALKS].value < 0.3
    assert moved[HOST_WALKS].value == pytest.approx(0.3, rel=0.1)
