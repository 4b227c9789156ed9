"""The shipped priors are what the committed command makes of the committed rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.priors_fit import (
    SHARED,
    Row,
    believed,
    fit_priors,
    fit_rows,
    predicted_log_s,
    training_rows,
    unseen_log_errors,
    width_of,
)
from tunecast.calibrate.priors_records import shipped_records
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.curves import columns, seconds
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import (
    STEP_PARAMS,
    clock_effects,
    device_effect,
    load_priors,
    prior_factors,
    source_effects,
    step_covariance,
    with_attention_kernel,
)
from tunecast.model.resolve import resolve_run
from tunecast.model.time import step_time
from tunecast.model.value import Z80

SLOWED = {
    **{f"scale.{kind}": kind for kind in ("gemm", "attention", "memory", "dequant", "link")},
    "scale.loss": "memory",
    "scale.optimizer": "memory",
}
"""Slowdowns of a step, by the kind of work whose rate they follow."""
TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.fixture(scope="module")
def timed() -> tuple[list[Row], dict[str, str]]:
    return training_rows(TABLE)


@pytest.fixture(scope="module")
def rows(timed: tuple[list[Row], dict[str, str]]) -> list[Row]:
    return timed[0]


@pytest.fixture(scope="module")
def refitted(timed: tuple[list[Row], dict[str, str]]) -> dict[str, Any]:
    return fit_priors(TABLE, timed, shipped_records())


def assert_same(left: Any, right: Any, path: str = "") -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, float):
        # Two machines' linear algebra may stop the search for spreads (within 0.01 in logs) a little apart.
        assert left == pytest.approx(right, rel=6e-2, abs=5e-3), path
    elif path == "/covariance/values":
        # Spreads within 6%, so variances within 12%; the overlap of links has a kink, where searches end on one side.
        assert np.array(left) == pytest.approx(np.array(right), rel=0.12, abs=1e-3)
    else:
        assert left == right, path


def test_the_shipped_priors_are_reproduced(refitted: dict[str, Any]) -> None:
    assert_same(refitted, load_priors())


def test_low_confidence_and_auxiliary_rows_fit_nothing() -> None:
    used = set(load_priors()["rows_used"])
    assert used
    sources = {"FM", "QW", "MF", "VL", "FT", "TT", "NA", "NB", "NV", "TI", "XT", "FF", "SW"}
    assert {row_id.split("-")[0] for row_id in used} <= sources


def test_efficiencies_are_fractions_with_intervals_and_origins() -> None:
    for efficiency in load_priors()["efficiency"].values():
        assert 0 < efficiency["low"] < efficiency["value"] <= efficiency["high"] <= 1
        assert efficiency["origin"] in ("published", "assumed")


def test_known_efficiencies_are_recovered_from_rows_made_with_them(rows: list[Row]) -> None:
    """Rows whose measured time is our own time model's at hidden efficiencies lead back to those."""
    some = [row for row in rows if row.run.source in ("FM", "VL", "QW")]
    truth = {"gemm": 0.82, "attention": 0.35, "memory": 0.9, "dequant": 0.5, "link": 0.7}
    truth |= {name: float(believed(name)["value"]) for name in SHARED if name not in truth}
    made = [replace(row, measured_s=math.exp(predicted_log_s(row, truth))) for row in some]
    found = fit_rows(made)
    missed, _ = unseen_log_errors(found, made)
    assert np.abs(missed).max() < 0.05


def test_a_card_among_the_rows_is_surer_than_one_that_is_not() -> None:
    gpus = load_gpus()

    def sd(gpu: str) -> float:
        factors = prior_factors(gpus[gpu])
        return float(np.sqrt(np.array(factors.step_covariance)[0, 0]))

    assert sd("a100-sxm4-80gb") < sd("l40s-48gb") < sd("v100-sxm2-32gb")


def test_a_card_that_no_row_has_starts_from_the_clock_that_it_holds() -> None:
    """Without its rows a T4's products are slowed by 1590 / 900 MHz, with the belief's doubt; its memory is not."""
    priors = load_priors()
    without = {**priors, "effects_by_kind": {**priors["effects_by_kind"], "clock": {}}}
    (effect,) = clock_effects(load_gpus()["t4-16gb"], without)
    assert math.exp(effect.value) == pytest.approx(1590 / 900, rel=2e-3)
    assert (effect.moves, effect.log_sd) == (("gemm", "attention"), 0.2)
    assert clock_effects(load_gpus()["a100-sxm4-80gb"], without) == ()


def test_spreads_of_efficiencies_and_effects_add_up_in_the_factors() -> None:
    """One row of work: variance of its efficiency, of its effects, twice their covariances; all by the width."""
    priors = load_priors()
    names, values = priors["covariance"]["names"], np.array(priors["covariance"]["values"])
    effect = device_effect(load_gpus()["a100-sxm4-80gb"], priors)
    found = np.array(step_covariance(priors, (effect,), 0.7))
    memory, device = names.index("memory"), names.index("device:a100-sxm4-80gb")
    by_hand = values[memory, memory] + values[device, device] - 2 * values[memory, device]
    assert found[2, 2] == pytest.approx(0.7**2 * by_hand)
    assert np.linalg.eigvalsh(found).min() > -1e-9


def test_what_nobody_knows_of_a_new_source_widens_each_kind_of_work_by_its_own_spread() -> None:
    priors = load_priors()
    found = np.array(step_covariance(priors, source_effects(priors), 0.7)) - np.array(step_covariance(priors, (), 0.7))
    spreads = {name: priors["spreads"][f"source.{kind}"] * 0.7 for name, kind in SLOWED.items()}
    for place, name in enumerate(STEP_PARAMS):
        assert found[place, place] == pytest.approx(spreads.get(name, 0.0) ** 2, abs=1e-12)
    memory, loss, gemm = (STEP_PARAMS.index(f"scale.{kind}") for kind in ("memory", "loss", "gemm"))
    assert found[memory, loss] == pytest.approx(found[memory, memory])
    assert found[memory, gemm] == pytest.approx(0.0, abs=1e-12)


def test_a_forecast_bound_by_bandwidth_is_less_sure_than_one_bound_by_products() -> None:
    """The same card and an unknown stack: many small updates against long products, by what each kind leaves open."""
    spread = {}
    for bound, options in {
        "compute": {"method": "full", "max_length": 2048, "per_device_train_batch_size": 8},
        "bandwidth": {"method": "full", "max_length": 128, "per_device_train_batch_size": 1},
    }.items():
        architecture = load_architecture("meta-llama/Llama-3.1-8B")
        run = replace(resolve_run(architecture, options, gpu_has_bf16=True).run, stack="nobody-has-seen-it")
        factors = prior_factors(load_gpus()["a100-sxm4-80gb"], run)
        found = step_time(step_operations(architecture, run), factors, run=run)
        assert found.bound_by == bound
        spread[bound] = found.log_sd
    assert spread["bandwidth"] > 1.2 * spread["compute"]


def test_a_stack_among_the_rows_is_surer_than_one_that_is_not() -> None:
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"method": "lora"}, gpu_has_bf16=True).run

    def sds(stack: str) -> dict[str, float]:
        factors = prior_factors(load_gpus()["a100-sxm4-80gb"], replace(run, stack=stack))
        return dict(zip(STEP_PARAMS, np.sqrt(np.diag(factors.step_covariance)), strict=True))

    known, unknown = sds("hf-peft"), sds("nobody-has-seen-it")
    assert all(known[f"scale.{kind}"] < unknown[f"scale.{kind}"] for kind in ("gemm", "attention", "memory"))
    assert known["scale.dequant"] == unknown["scale.dequant"]  # whose kernel unpacks is no matter of the stack


def test_an_older_attention_kernel_is_slower_as_believed_or_as_its_rows_say() -> None:
    """FlashAttention in Triton: 1 / 0.55 of the time where no row has it, with the belief's doubt."""
    priors = load_priors()
    factors = prior_factors(load_gpus()["a100-sxm4-80gb"], None, priors)
    place, plain = STEP_PARAMS.index("scale.attention"), factors.factors["scale.attention"].value

    def ratio(known: dict[str, Any]) -> tuple[float, float]:
        own = {**priors, "effects_by_kind": {**priors["effects_by_kind"], "attention_kernel": known}}
        found = with_attention_kernel(factors, "flash-1-triton", own)
        more = found.step_covariance[place][place] - factors.step_covariance[place][place]
        return found.factors["scale.attention"].value / plain, more

    assert ratio({}) == pytest.approx((1 / 0.55, 0.2**2))
    assert ratio({"flash-1-triton": {"value": math.log(1.5)}}) == pytest.approx((1.5, 0.0))
    assert with_attention_kernel(factors, "", priors) is factors


def test_a_card_without_published_runs_says_so() -> None:
    assert any("no published run on l40s-48gb" in note for note in prior_factors(load_gpus()["l40s-48gb"]).notes)
    assert prior_factors(load_gpus()["a100-sxm4-80gb"]).notes == ()


def test_the_width_holds_four_in_five_rows_of_sources_left_out(rows: list[Row]) -> None:
    """Ten rows of one source, z of 0.1 to 1.0 intervals: 0.8 of them hold eight. A source of one row weighs as one
    of the square root of ten."""
    ten = [row for row in rows if row.run.source == "FM"][:10]
    errors = {row.run.id: (0.1 * (i + 1) * Z80, 1.0) for i, row in enumerate(ten)}
    assert width_of(ten, errors) == pytest.approx(0.8)
    one = next(row for row in rows if row.run.source == "VL")
    assert width_of([*ten, one], {**errors, one.run.id: (9.0 * Z80, 1.0)}) == pytest.approx(9.0)


def test_a_kernel_that_unpacks_weights_is_its_library_s_whatever_stack_calls_it() -> None:
    """Only torchtune brings one of its own; the time of the release decides which of bitsandbytes'."""
    priors, gpu = load_priors(), load_gpus()["a100-sxm4-80gb"]
    scales = {}
    for stack in ("hf-peft", "unsloth", "axolotl", "llama-factory", "trl", "torchtune"):
        run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"method": "qlora", "stack": stack}).run
        factors = prior_factors(gpu, run, priors).factors
        scales[stack] = factors["scale.dequant"].value
    assert len({scales[stack] for stack in scales if stack != "torchtune"}) == 1
    assert scales["torchtune"] != scales["hf-peft"]
    plain = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"method": "qlora"}).run
    old = replace(plain, hf_code="4.45")
    assert prior_factors(gpu, old, priors).factors["scale.dequant"].value > scales["hf-peft"]


def test_fused_attention_is_slower_on_short_sequences_in_the_priors_as_measured_ones_are() -> None:
    """Published: 0.75 of the rate of 8,192 tokens at 512 without a causal mask; the mask's diagonal costs more."""
    curve = prior_factors(load_gpus()["a100-sxm4-80gb"]).curves["attention.bf16.forward"]

    def rate(length: int) -> float:
        flops = 2.0 * 32 * length * length * 128
        shape = (64, 32, 8, length, length, 128)
        operation = Operation(
            name="flash", kind=Kind.ATTENTION, phase=Phase.FORWARD, dtype="bf16", shape=shape, flops=64 * flops
        )
        return float(64 * flops / seconds(curve, columns([operation])).seconds[0])

    assert 0.5 < rate(512) / rate(8192) < 0.75
    assert rate(1024) < rate(2048) < rate(16384)


def test_no_card_moves_bytes_faster_than_its_datasheet() -> None:
    """Whatever stack the rows say is quick: those rows moved fewer bytes than were counted."""
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"method": "lora", "stack": "trl"}).run
    stacks = ("", *load_priors()["effects_by_kind"]["stack.memory"])
    for gpu in load_gpus().values():
        for stack in stacks:
            factors = prior_factors(gpu, replace(run, stack=stack) if stack else None).factors
            for name in ("scale.memory", "scale.loss", "scale.optimizer"):
                assert factors[name].value >= 1.0, (gpu.id, stack, name)


def test_what_ddp_hides_is_believed_where_no_row_has_it() -> None:
    """Rows of FSDP and ZeRO wait for what the next layer needs; DDP reduces beside the backward."""
    architecture, gpu = load_architecture("meta-llama/Llama-3.1-8B"), load_gpus()["h100-sxm5-80gb"]
    ddp, fsdp = (
        prior_factors(gpu, resolve_run(architecture, {"method": "full", "num_gpus": 8, "sharding": name}).run)
        for name in ("ddp", "fsdp")
    )
    assert "ddp" not in load_priors()["sharding_effects"]
    assert (ddp.factors["overlap_frac"].origin, fsdp.factors["overlap_frac"].origin) == ("assumed", "published")
    assert ddp.factors["overlap_frac"].value == believed("overlap_frac")["value"]
    place = STEP_PARAMS.index("overlap_frac")
    assert ddp.step_covariance[place][place] == pytest.approx(believed("overlap_frac")["log_sd"] ** 2)


def test_llm_int8_is_less_sure_than_its_like_in_four_bits() -> None:
    architecture, gpu = load_architecture("meta-llama/Llama-3.1-8B"), load_gpus()["rtx-3090-24gb"]
    place = STEP_PARAMS.index("scale.gemm")
    four, eight = (
        prior_factors(gpu, resolve_run(architecture, {"method": "qlora", "quant_method": name}).run)
        for name in ("bnb-4bit", "bnb-8bit")
    )
    belief = load_priors()["beliefs"]["int8_products"]["log_sd"]
    more = eight.step_covariance[place][place] - four.step_covariance[place][place]
    assert more == pytest.approx(belief**2, rel=1e-6)
