"""Kernels that stay in the last-level cache, against published copies by size and against cards that gain nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.priors_problem import beliefs
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.cached_copies import SCALE_CACHED, cache_log_sd, cache_params
from tunecast.model.cold_kernels import CASTS, is_cold
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curve_shares import shares
from tunecast.model.curves import Columns, bandwidth, columns
from tunecast.model.estimate import forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import datasheet_factors, load_priors, prior_factors
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.sharding_copies import COPIED_BY
from tunecast.model.tape import LEAF_SUM
from tunecast.model.target import resolve_targets
from tunecast.model.value import Value

MIB = 2**20
PUBLISHED_GB_PER_S = {2: 3254.4, 16: 3645.0, 32: 2318.4, 64: 819.6}
"""Copies of so many MiB back and forth on an RTX 4090 (smallscientist1/cuda_microbenchmark, analysis_RTX4090.md)."""
WITHIN = 1.5
"""Factor by which the soft edge of the cache may miss one of them."""
IN_THE_CACHE = ("rtx-4090-24gb", "l40s-48gb", "l4-24gb", "rtx-5090-32gb", "rtx-pro-6000-blackwell-ws-96gb")
AS_FAST_AS_MEMORY = ("a100-sxm4-80gb", "a100-pcie-40gb", "h100-sxm5-80gb", "h200-sxm5-141gb", "b200-sxm-180gb")
SMALL = {"method": "lora", "max_length": 256, "per_device_train_batch_size": 4, "gradient_checkpointing": False}


def moved(*n_bytes: float) -> Columns:
    """One kernel each that moves so many bytes."""
    return columns([Operation(name="copy", kind=Kind.MEMORY, phase=Phase.FORWARD, bytes=each) for each in n_bytes])


def all_hot() -> dict[str, Any]:
    """The beliefs, of kernels that find and leave all of their bytes in the cache, as copies back and forth do."""
    return {**beliefs(), "cached_copies": {**beliefs()["cached_copies"], "hot": 1.0}}


def seconds_on(gpu: str, n_bytes: float, known: dict[str, Any] | None = None) -> float:
    """Without the floor of a kernel."""
    curve = datasheet_factors(load_gpus()[gpu], known or beliefs()).curves["memory"]
    return float(bandwidth({**curve.params, "t0_s": 0.0}, moved(n_bytes))[0])


@pytest.mark.parametrize("mib", PUBLISHED_GB_PER_S)
def test_copies_on_a_4090_are_as_fast_as_published(mib: int) -> None:
    reached = float(beliefs()["cached_copies"]["memory_reached"])
    rate = reached * 2 * mib * MIB / seconds_on("rtx-4090-24gb", 2 * mib * MIB, all_hot()) / 1e9
    assert PUBLISHED_GB_PER_S[mib] / WITHIN < rate < PUBLISHED_GB_PER_S[mib] * WITHIN


@pytest.mark.parametrize("gpu", IN_THE_CACHE)
def test_small_kernels_gain_and_large_ones_do_not(gpu: str) -> None:
    card = load_gpus()[gpu]
    assert card.l2_bytes
    small, large = (seconds_on(gpu, n_bytes) * card.bandwidth_bytes_per_s / n_bytes for n_bytes in (MIB, 4 * 2**30))
    assert small < 0.65
    assert large == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("gpu", AS_FAST_AS_MEMORY)
def test_cards_whose_memory_is_as_fast_gain_nothing(gpu: str) -> None:
    assert cache_params(load_gpus()[gpu], beliefs()) == {}
    assert cache_log_sd(load_gpus()[gpu], beliefs()) == 0.0
    assert seconds_on(gpu, MIB) == pytest.approx(MIB / load_gpus()[gpu].bandwidth_bytes_per_s)


def test_an_older_file_of_priors_knows_no_cache() -> None:
    older = {name: belief for name, belief in beliefs().items() if name != "cached_copies"}
    assert cache_params(load_gpus()["rtx-4090-24gb"], older) == {}


def test_weights_states_and_logits_stay_in_no_cache() -> None:
    curves = datasheet_factors(load_gpus()["rtx-4090-24gb"], beliefs()).curves
    assert {name for name, curve in curves.items() if "l2_bytes" in curve.params} == {"memory"}
    assert curves["optimizer"] == curves["loss"]
    assert curves["optimizer"].params["bytes_per_s"] == curves["memory"].params["bytes_per_s"]


@pytest.mark.parametrize(
    "operation",
    [
        Operation(name=LEAF_SUM, kind=Kind.MEMORY, phase=Phase.BACKWARD, bytes=MIB),
        Operation(name="adapter_cast", kind=Kind.MEMORY, phase=Phase.FORWARD, bytes=MIB),
        *(Operation(name=f"{first}.copy", kind=Kind.MEMORY, phase=Phase.BACKWARD, bytes=MIB) for first in COPIED_BY),
    ],
)
def test_what_was_touched_long_ago_is_in_no_cache(operation: Operation) -> None:
    factors = datasheet_factors(load_gpus()["rtx-4090-24gb"], beliefs())
    assert "l2_bytes" not in find_curve(curve_key(operation), factors).params
    without = datasheet_factors(load_gpus()["a100-sxm4-80gb"], beliefs())
    assert find_curve(curve_key(operation), without) == without.curves["memory"]


def test_casts_of_weights_have_the_names_that_are_cold(make: Callable[..., Architecture]) -> None:
    """Full training in fp32 under autocast: its casts are found among the operations of a step."""
    run = resolve_run(make("qwen3-0.6b"), {"method": "full", "dtype": "fp32", "precision": "bf16-autocast"}).run
    names = {operation.name for operation in step_operations(make("qwen3-0.6b"), run)}
    assert names & set(CASTS)
    assert any(is_cold(name) for name in names)


def test_shares_of_the_seconds_are_those_of_the_kernels() -> None:
    """Against the definition: the part that comes from the cache, over the whole."""
    curve = datasheet_factors(load_gpus()["rtx-4090-24gb"], all_hot()).curves["memory"]
    cols, params = moved(MIB, 100 * MIB), {**curve.params, "t0_s": 0.0}
    from_memory = bandwidth({**params, "cached_over_memory": 0.0}, cols)
    whole, floor = bandwidth(params, cols), curve.params["t0_s"]
    own, _, cached, fixed = shares(curve, cols)
    assert cached == pytest.approx((whole - from_memory) / (whole + floor))
    assert own == pytest.approx(from_memory / (whole + floor))
    assert fixed == pytest.approx(floor / (whole + floor))


def test_the_doubt_is_that_of_how_much_is_found_there() -> None:
    """Any share from the least to all is as likely: against draws."""
    card, draw = load_gpus()["rtx-4090-24gb"], np.random.default_rng(1)
    belief = beliefs()["cached_copies"]
    all_of_it = cache_params(card, all_hot())["cached_over_memory"]
    over = 1.0 - draw.uniform(belief["hot_least"], 1.0, 200_000) * (1.0 - all_of_it)
    assert cache_log_sd(card, beliefs()) == pytest.approx(float(np.std(over) / np.mean(over)), rel=0.02)


def small_step() -> Value:
    """A step of few tokens on an RTX 4090 that nobody has calibrated."""
    (target,) = resolve_targets(["rtx-4090-24gb"], {})
    return forecast(Question(architecture=load_architecture("llama-2-7b"), options=SMALL), target).step_time_s


@pytest.mark.parametrize("end", ["hot_least", "all"])
def test_the_interval_holds_a_step_with_the_least_and_with_all_of_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, belief = small_step(), load_priors()["beliefs"]["cached_copies"]
    monkeypatch.setitem(belief, "hot", belief.get(end, 1.0))
    found = small_step().value
    assert usual.low < found < usual.high
    assert found != pytest.approx(usual.value, rel=0.01)


def test_the_doubt_is_a_factor_of_its_own() -> None:
    factors = prior_factors(load_gpus()["rtx-4090-24gb"])
    place, covariance = factors.step_params.index(SCALE_CACHED), np.array(factors.step_covariance)
    doubt = cache_log_sd(load_gpus()["rtx-4090-24gb"], load_priors()["beliefs"])
    assert math.sqrt(covariance[place, place]) == pytest.approx(doubt)
    assert not np.delete(covariance[place], place).any()
    assert not np.delete(covariance[:, place], place).any()


def test_a_card_without_a_faster_cache_has_no_such_doubt() -> None:
    assert SCALE_CACHED not in prior_factors(load_gpus()["a100-sxm4-80gb"]).step_params


def test_steps_of_few_tokens_are_faster_for_it_and_those_of_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (target,) = resolve_targets(["rtx-4090-24gb"], {})
    architecture = load_architecture("llama-2-7b")
    plans = (SMALL, {**SMALL, "per_device_train_batch_size": 8, "max_length": 4096})
    with_it = [forecast(Question(architecture=architecture, options=plan), target).step_time_s.value for plan in plans]
    monkeypatch.delitem(load_priors()["beliefs"], "cached_copies")
    (target,) = resolve_targets(["rtx-4090-24gb"], {})
    without = [forecast(Question(architecture=architecture, options=plan), target).step_time_s.value for plan in plans]
    assert with_it[0] < 0.95 * without[0]
    assert with_it[1] == pytest.approx(without[1], rel=0.03)
