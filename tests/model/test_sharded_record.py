"""A record's forecast of several GPUs takes over what published runs say of the sharding, and is as unsure of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.gpus import find_gpu
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.priors import HOOKS, load_priors, prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.sharded_record import with_sharding
from tunecast.model.time import COLUMNS, scalars, scales

PRIORS = Path(__file__).parents[2] / "results" / "priors.json"
MEASURED = "measured:a.json"


def run_of(**options: Any) -> Run:
    return resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"method": "lora", **options}).run


def record() -> FactorSet:
    def factor(value: float) -> Factor:
        return Factor(value=value, low=0.98 * value, high=1.02 * value, unit="", origin=MEASURED)

    names = ("scale.gemm", "scale.memory", "scale.cached", "host_s_per_launch")
    return FactorSet(
        gpu="h100-sxm5-80gb", curves={}, factors={name: factor(1.0) for name in names}, step_log_sd=0.02, notes=()
    )


def sharded(run: Run) -> FactorSet:
    return with_sharding(record(), prior_factors(find_gpu("h100-sxm5-80gb"), run), run, load_priors())


def test_one_gpu_is_as_the_record_says() -> None:
    assert sharded(run_of()) == record()


@pytest.mark.parametrize("sharding", ["zero2", "fsdp", "zero3"])
def test_work_is_slowed_as_published_runs_of_the_sharding_are(sharding: str) -> None:
    found = sharded(run_of(num_gpus=4, sharding=sharding))
    stored = json.loads(PRIORS.read_text(encoding="utf-8"))["sharding_effects"][sharding]["value"]
    for name in ("scale.gemm", "scale.memory"):
        assert found.factors[name].value == pytest.approx(math.exp(stored))
        assert found.factors[name].high / found.factors[name].low == pytest.approx(1.02 / 0.98)
    assert found.factors["host_s_per_launch"].value == 1.0
    assert found.step_log_sd > 0.02


@pytest.mark.parametrize("sharding", ["zero2", "fsdp", "zero3"])
def test_all_columns_of_a_step_are_slowed_alike(sharding: str) -> None:
    """Kernels in the cache have memory's factor and one of their own on top: slowed once, not twice."""
    run = run_of(num_gpus=4, sharding=sharding)
    before, after = (scales(scalars(factors)) for factors in (record(), sharded(run)))
    slower = dict(zip(COLUMNS, after / before, strict=True))
    assert slower["cached"] == pytest.approx(slower["memory"])
    assert slower["gemm"] == pytest.approx(slower["memory"])
    assert slower["memory"] != pytest.approx(1.0, abs=1e-4)


def test_zero3_alone_brings_hooks_and_as_much_doubt_as_hosts_differ() -> None:
    found, prior = sharded(run_of(num_gpus=4, sharding="zero3")), load_priors()
    hooks = found.factors[HOOKS]
    assert hooks.value == prior["host_hooks"]["value"]
    assert math.log(hooks.high / hooks.low) > 2 * 1.28 * prior["spreads"]["host"]
    assert any("hooks" in note for note in found.notes)
    assert HOOKS not in sharded(run_of(num_gpus=4, sharding="fsdp")).factors


def test_grad_op_is_as_slow_as_the_fsdp_whose_code_it_is_and_less_sure() -> None:
    """SHARD_GRAD_OP has no published run: the same hooks, copies and streams, but for one gather."""
    priors = load_priors()
    assert "fsdp-grad-op" not in priors["sharding_effects"]
    full, kept = (sharded(run_of(num_gpus=4, sharding=sharding)) for sharding in ("fsdp", "fsdp-grad-op"))
    assert kept.factors["scale.gemm"].value == full.factors["scale.gemm"].value
    apart = math.sqrt(kept.step_log_sd**2 - full.step_log_sd**2)
    assert apart == pytest.approx(priors["spreads"]["sharding"])
    gpu = find_gpu("h100-sxm5-80gb")
    plain, alike = (
        prior_factors(gpu, run_of(num_gpus=4, method="full", sharding=sharding))
        for sharding in ("fsdp", "fsdp-grad-op")
    )
    assert alike.factors["scale.gemm"].value == plain.factors["scale.gemm"].value
    assert alike.step_covariance[0][0] > plain.step_covariance[0][0]


def test_a_sharding_without_published_runs_moves_nothing_and_is_unsure() -> None:
    run = replace(run_of(num_gpus=4, sharding="fsdp"), sharding="unheard-of")
    found = sharded(run)
    assert found.factors["scale.gemm"].value == 1.0
    assert found.step_log_sd == pytest.approx(math.hypot(0.02, load_priors()["spreads"]["sharding"]))
