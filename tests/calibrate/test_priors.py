"""The shipped priors are what the committed command makes of the committed rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.priors_fit import as_shipped, fit_priors, fit_rows, least_width
from tunecast.calibrate.priors_left_out import Unseen, slower_of, unseen_of, width_of
from tunecast.calibrate.priors_problem import SHARED, Row, Training, believed, predicted_log_s, read_training
from tunecast.calibrate.priors_records import shipped_records
from tunecast.calibrate.run_table import read_table
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.curves import columns, seconds
from tunecast.model.exposed import SHARES
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.prior_effects import clock_effects, device_effect, source_effects
from tunecast.model.priors import STEP_PARAMS, load_priors, prior_factors, step_covariance
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
def training() -> Training:
    return read_training(TABLE)


@pytest.fixture(scope="module")
def rows(training: Training) -> list[Row]:
    return training.rows


@pytest.fixture(scope="module")
def refitted(training: Training) -> dict[str, Any]:
    return fit_priors(training, shipped_records())


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
    table, used = {row["id"]: row for row in read_table(TABLE)}, load_priors()["rows_used"]
    assert used
    assert len(used) == len(set(used))
    assert {table[row_id]["set"] for row_id in used} == {"training"}
    assert "low" not in {table[row_id]["confidence"] for row_id in used}


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
    assert max(abs(item.missed) for item in unseen_of(found, made)) < 0.05


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
    assert known["scale.dequant"] == pytest.approx(
        unknown["scale.dequant"]
    )  # whose kernel unpacks is no matter of the stack


def test_an_older_attention_kernel_is_slower_as_believed_or_as_its_rows_say() -> None:
    """FlashAttention in Triton: 1 / 0.55 of the time where no row has it, with the belief's doubt; what rows leave open
    of it is theirs together with everything else that slows attention, by the priors' width."""
    priors, gpu, kernel = load_priors(), load_gpus()["a100-sxm4-80gb"], "flash-1-triton"
    names, values = priors["covariance"]["names"], np.array(priors["covariance"]["values"])
    own_place, base_place = names.index(f"attention_kernel:{kernel}"), names.index("attention")
    values[own_place, :] = values[:, own_place] = 0.0
    values[own_place, own_place] = 0.09
    values[own_place, base_place] = values[base_place, own_place] = 0.01
    plain = prior_factors(gpu, None, priors)
    place = STEP_PARAMS.index("scale.attention")

    def ratio(known: dict[str, Any]) -> tuple[float, float]:
        own = {
            **priors,
            "effects_by_kind": {**priors["effects_by_kind"], "attention_kernel": known},
            "covariance": {"names": names, "values": values.tolist()},
        }
        found, without = (prior_factors(gpu, None, own, attention_kernel=name) for name in (kernel, ""))
        more = found.step_covariance[place][place] - without.step_covariance[place][place]
        return found.factors["scale.attention"].value / plain.factors["scale.attention"].value, more

    assert ratio({}) == pytest.approx((1 / 0.55, 0.2**2))
    left_open = priors["width"] ** 2 * (0.09 - 2.0 * 0.01)  # an efficiency is the inverse of a slowdown
    assert ratio({kernel: {"value": math.log(1.5)}}) == pytest.approx((1.5, left_open))
    assert prior_factors(gpu, None, priors, attention_kernel="") == plain


def test_a_card_without_published_runs_says_so() -> None:
    assert any("no published run on l40s-48gb" in note for note in prior_factors(load_gpus()["l40s-48gb"]).notes)
    assert prior_factors(load_gpus()["a100-sxm4-80gb"]).notes == ()


def unseen(missed: float, *, log_sd: float = 1.0, new_log_sd: float = 0.0, work_share: float = 1.0) -> Unseen:
    return Unseen(missed=missed, log_sd=log_sd, new_log_sd=new_log_sd, work_share=work_share)


@pytest.fixture(scope="module")
def ten_and_two(rows: list[Row]) -> list[Row]:
    """Ten rows of one source, then one each of two others."""
    others = [next(row for row in rows if row.run.source == source) for source in ("VL", "XT")]
    return [*[row for row in rows if row.run.source == "FM"][:10], *others]


def test_the_width_holds_four_in_five_rows_of_sources_left_out(ten_and_two: list[Row]) -> None:
    """Ten rows of one source, z of 0.1 to 1.0 intervals: 0.8 of them hold eight. A source of one row weighs as much as
    one of ten, so that two such sources decide alone."""
    ten = ten_and_two[:10]
    errors = {row.run.id: unseen(0.1 * (i + 1) * Z80) for i, row in enumerate(ten)}
    assert width_of(ten, errors, 0.0) == pytest.approx(0.8)
    near, far = (row.run.id for row in ten_and_two[10:])
    more = {**errors, near: unseen(-0.01), far: unseen(-9.0 * Z80)}
    assert width_of(ten_and_two, more, 0.0) == pytest.approx(9.0)
    assert width_of(ten, {row_id: unseen(item.missed + 0.3) for row_id, item in errors.items()}, 0.3) == pytest.approx(
        0.8
    )


def test_shipped_priors_are_no_narrower_than_the_spreads_of_their_fit() -> None:
    sds = {"new": 0.03, "seen": 0.02}
    shared = {"step_log_sd": sds, "spreads": {"row": 0.1}, "least_width": 1.2}
    narrow, wide = ({"width": width, **shared} for width in (0.6, 1.7))
    shipped = as_shipped(narrow)
    assert shipped["width"] == 1.2
    assert shipped["left_out_width"] == 0.6
    assert shipped["step_log_sd"] == {"new": pytest.approx(0.06), "seen": 0.02}
    assert shipped["spreads"] == narrow["spreads"]
    assert as_shipped(wide) == {**wide, "left_out_width": 1.7}
    assert narrow["width"] == 0.6, "what was given stays"


@pytest.mark.parametrize("sources", [4, 14])
def test_a_spread_of_few_sources_is_widened_until_it_holds_one_more(sources: int) -> None:
    """A normal spread estimated from so many draws, and one draw more: 80% inside, in 200,000 repetitions."""
    draws = np.random.default_rng(11).standard_normal((200_000, sources + 1))
    estimated = draws[:, :-1].std(axis=1, ddof=1)
    inside = np.abs(draws[:, -1]) <= Z80 * least_width(sources) * estimated
    assert inside.mean() == pytest.approx(0.8, abs=0.005)
    assert (np.abs(draws[:, -1]) <= Z80 * estimated).mean() < inside.mean()


def test_a_forecast_by_shipped_priors_is_wider_than_left_out_sources_need() -> None:
    priors, gpu = load_priors(), load_gpus()["a100-sxm4-80gb"]
    assert priors["width"] >= 1.0 > priors["left_out_width"]
    as_judged = {**priors, "width": priors["left_out_width"]}
    wide, narrow = (np.diag(np.asarray(prior_factors(gpu, None, own).step_covariance)) for own in (priors, as_judged))
    assert np.all(wide >= narrow)
    assert np.any(wide > narrow)


def test_the_width_widens_only_what_it_goes_for(ten_and_two: list[Row]) -> None:
    """A card that no row has keeps its own spread: the multiple of the rest is what the two in squares need."""
    ten = ten_and_two[:10]
    errors = {row.run.id: unseen(0.1 * (i + 1) * Z80, log_sd=0.5, new_log_sd=0.6) for i, row in enumerate(ten)}
    width = width_of(ten, errors, 0.0)
    assert math.hypot(width * 0.5, 0.6) == pytest.approx(0.8)
    sure = {row_id: unseen(0.1, new_log_sd=5.0) for row_id in errors}
    assert width_of(ten, sure, 0.0) == 0.5


def test_sources_left_out_say_by_how_much_a_new_one_is_slower(ten_and_two: list[Row]) -> None:
    """The multiple of the work's share with the least sum of absolute misses, every source weighing the same."""
    rng = np.random.default_rng(5)
    found = {
        row.run.id: unseen(miss, work_share=share)
        for row, miss, share in zip(ten_and_two, rng.normal(0.05, 0.1, 12), rng.uniform(0.2, 1.0, 12), strict=True)
    }

    def misses(slower: float) -> float:
        sizes = [abs(item.missed - slower * item.work_share) for item in found.values()]
        return sum(sizes[:10]) / 10 + sum(sizes[10:])

    slower = slower_of(ten_and_two, found)
    assert misses(slower) <= min(misses(at) for at in np.linspace(-0.5, 0.5, 2001)) + 1e-9
    assert slower_of(ten_and_two, {}) == 0.0


def test_forecasts_are_slower_by_what_sources_left_out_were() -> None:
    """In the device's work, not in links, not in the host; moved bytes stay at what a card can move."""
    priors = load_priors()

    def values(slower: float) -> dict[str, float]:
        own = {**priors, "source_effect": {"value": slower}}
        return {
            name: factor.value
            for name, factor in prior_factors(load_gpus()["h100-sxm5-80gb"], None, own).factors.items()
        }

    without, slowed = values(0.0), values(0.1)
    moved = {name: slowed[name] / without[name] for name in slowed if slowed[name] != without[name]}
    assert set(moved) == {f"scale.{kind}" for kind in ("gemm", "attention", "dequant", "memory", "loss", "optimizer")}
    assert (moved["scale.gemm"], moved["scale.attention"]) == pytest.approx((math.exp(0.1), math.exp(0.1)))
    assert 1.0 < moved["scale.memory"] <= math.exp(0.1) * (1 + 1e-9)


def test_left_out_errors_of_the_shipped_priors_are_as_often_fast_as_slow() -> None:
    """By source: what remains after the effect of a new source is centred, each source weighing the same."""
    errors: dict[str, list[float]] = {}
    for row_id, error in load_priors()["left_out_log_errors"]["by_source"].items():
        errors.setdefault(row_id.split("-")[0], []).append(error)
    fast = np.mean([np.mean(np.array(own) > 0.0) for own in errors.values()])
    assert fast == pytest.approx(0.5, abs=0.04)


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


def test_what_zero3_exposes_is_told_apart_from_what_others_do() -> None:
    """It asks for a layer as it needs it, FSDP one layer ahead: the rows of either say so, whatever is believed."""
    exposed, late = (load_priors()[name] for name in SHARES)
    assert exposed["origin"] == "published"
    assert exposed["high"] < late["value"] <= 1.0
    assert late["low"] > exposed["value"]


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
