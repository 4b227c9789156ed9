"""Memory terms are read off the steps of a record, each where the device reports it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tunecast.calibrate.fit_memory import gauge_memory
from tunecast.calibrate.fit_trials import Trial
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.model.architectures import load_architecture
from tunecast.model.memory import memory_timeline
from tunecast.model.replay import replayed_bytes
from tunecast.model.resolve import resolve_run
from tunecast.model.units import GIB
from tunecast.model.value import Z80

ARCHITECTURE = load_architecture("HuggingFaceTB/SmolLM2-135M")
RUN = resolve_run(ARCHITECTURE, {"method": "lora", "max_length": 256}).run
PARAMS = {"architecture": architecture_to_dict(ARCHITECTURE), "run": run_to_dict(RUN)}
ALLOCATED = memory_timeline(ARCHITECTURE, RUN).allocated_bytes


def step(**memory: float) -> Trial:
    found: dict[str, Any] = {"bench": "step", "params": PARAMS, "outcome": "ok", "samples_s": [1.0]}
    return {**found, "memory": {f"{name}_bytes": value for name, value in memory.items()}}


def test_context_is_beyond_reserved_and_fragmentation_per_transient_byte() -> None:
    readings = [(10, 4, 11.5, 12.0), (20, 12, 22, 22.5), (5, 1, 6, 6.5)]
    trials = [step(allocated=a * GIB, at_rest=b * GIB, reserved=r * GIB, process=p * GIB) for a, b, r, p in readings]
    found = gauge_memory(trials, platform="cuda")
    assert found["context"] == pytest.approx(0.5 * GIB)
    assert found["fragmentation_frac"] == pytest.approx(0.25)
    assert found["fragmentation_frac_low"] <= found["fragmentation_frac"] <= found["fragmentation_frac_high"]


def test_a_cpu_has_a_context_beyond_its_tensors_and_no_fragmentation() -> None:
    found = gauge_memory([step(allocated=ALLOCATED, process=ALLOCATED + GIB)], platform="cpu")
    assert found["context"] == pytest.approx(GIB)
    assert "fragmentation_frac" not in found


def replayable(max_length: int, beyond: float, share: float) -> Trial:
    """A step whose allocator holds what a replay gives and `beyond`, and a `share`, of the transient more."""
    run = resolve_run(ARCHITECTURE, {"method": "lora", "max_length": max_length}).run
    timeline, replayed = memory_timeline(ARCHITECTURE, run), replayed_bytes(ARCHITECTURE, run, "cuda")
    assert replayed is not None
    transient = timeline.allocated_bytes - timeline.at_rest_bytes
    base = timeline.allocated_bytes + share * transient if share else replayed
    reading = {"allocated": timeline.allocated_bytes, "at_rest": timeline.at_rest_bytes}
    trial = step(**reading, reserved=base + beyond * transient)
    return {**trial, "params": {**PARAMS, "run": run_to_dict(run)}}


LENGTHS = (256, 384, 512, 640, 768, 1024)


def test_the_width_of_replays_is_their_mean_square_about_the_median() -> None:
    """Five of six are exact and one is off by 0.02 of its transient: 0.02 / sqrt(6) about 0, in either direction."""
    off = [0.0] * 5 + [0.02]
    trials = [replayable(length, beyond, 0.0) for length, beyond in zip(LENGTHS, off, strict=True)]
    found = gauge_memory(trials, platform="cuda")
    assert found["replayed_frac"] == pytest.approx(0.0, abs=1e-6)
    assert found["replayed_frac_high"] == pytest.approx(Z80 * 0.02 / math.sqrt(6), rel=1e-6)
    assert found["replayed_frac_low"] == pytest.approx(-found["replayed_frac_high"])


def test_a_card_that_follows_one_share_is_not_replayed() -> None:
    """A simulated card, say: the share tells all of its steps, a replay none."""
    found = gauge_memory([replayable(length, 0.0, 0.2) for length in LENGTHS], platform="cuda")
    assert found["fragmentation_frac"] == pytest.approx(0.2)
    assert "replayed_frac" not in found


@pytest.mark.parametrize(("count", "platform"), [(4, "cuda"), (6, "cpu")])
def test_few_steps_or_a_cpu_say_nothing_of_replays(count: int, platform: str) -> None:
    trials = [replayable(length, 0.0, 0.0) for length in LENGTHS[:count]]
    assert "replayed_frac" not in gauge_memory(trials, platform=platform)


def test_the_width_of_allocated_is_how_far_the_formula_was_off() -> None:
    trials = [step(allocated=ALLOCATED * factor) for factor in (0.9, 1.0, 1.1)]
    found = gauge_memory(trials, platform="cuda")["allocated_log_sd"]
    assert math.log(1.0) < found < math.log(1 / 0.9) / 1.28 + 1e-9


def test_what_was_not_read_is_absent() -> None:
    assert gauge_memory([step()], platform="cuda") == {}
