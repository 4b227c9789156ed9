"""What is said to fit fits, one more does not, and every proposed change is one that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ci_share import fewer_in_ci
from hypothesis import given, settings
from hypothesis import strategies as st

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.fits import LIKELY, TIGHT_BELOW
from tunecast.model.fitting import candidates, fits_with, more_gpus, suggestions, what_would_fit
from tunecast.model.largest import (
    MOST_SAMPLES,
    changed,
    largest_micro_batch,
    largest_that,
    longest_sequence,
    question_that_fits,
    run_fits,
)
from tunecast.model.plans import divisors
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.run import Run
from tunecast.model.target import Target, resolve_targets

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
CARDS = ("rtx-4090-24gb", "l40s-48gb", "a100-sxm4-80gb", "t4-16gb")
RUNS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(("lora", "qlora", "full")),
        "gradient_checkpointing": st.booleans(),
        "gradient_accumulation_steps": st.sampled_from((1, 2)),
    }
)


def card(name: str) -> Target:
    (target,) = resolve_targets([name], {})
    return target


@given(threshold=st.integers(0, 400), most=st.integers(1, 300))
def test_the_search_finds_the_last_number_that_holds(threshold: int, most: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= threshold

    assert largest_that(holds, most) == min(threshold, most)
    assert all(1 <= number <= most for number in asked)
    assert len(asked) <= 2 * most.bit_length() + 2


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(options=RUNS, name=st.sampled_from(CARDS), length=st.integers(64, 4096))
def test_the_largest_micro_batch_fits_and_one_more_does_not(
    make: Make, run_of: RunOf, options: dict[str, Any], name: str, length: int
) -> None:
    qwen, target = make("qwen2.5-0.5b"), card(name)
    run = run_of(qwen, max_length=length, **options)
    found = largest_micro_batch(qwen, run, target)
    if found:
        assert run_fits(qwen, replace(run, per_device_train_batch_size=found), target)
    if found < MOST_SAMPLES:
        assert not run_fits(qwen, replace(run, per_device_train_batch_size=found + 1), target)


@settings(max_examples=fewer_in_ci(10, 3), deadline=None)
@given(options=RUNS, name=st.sampled_from(CARDS), batch=st.integers(1, 6))
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    make: Make, run_of: RunOf, options: dict[str, Any], name: str, batch: int
) -> None:
    qwen, target = make("qwen2.5-7b"), card(name)
    run = run_of(qwen, per_device_train_batch_size=batch, **options)
    found = longest_sequence(qwen, run, target)
    assert qwen.max_position is not None
    if found:
        assert run_fits(qwen, replace(run, max_length=found), target)
    if found < qwen.max_position:
        assert not run_fits(qwen, replace(run, max_length=found + 1), target)


NO_ROOM = [
    ("llama-3.1-8b", "a100-sxm4-80gb", {"method": "full", "max_length": 8192, "per_device_train_batch_size": 4}),
    ("llama-3.1-8b", "l40s-48gb", {"method": "lora", "max_length": 4096, "gradient_checkpointing": False}),
    ("llama-3.1-8b", "l40s-48gb", {"method": "lora", "max_length": 4096, "per_device_train_batch_size": 12}),
    ("llama-3.1-70b", "h100-sxm5-80gb", {"method": "lora", "max_length": 2048}),
]


@pytest.mark.parametrize(("model", "name", "options"), NO_ROOM)
def test_every_proposed_change_fits_keeps_the_global_batch_and_is_priced(
    make: Make, model: str, name: str, options: dict[str, Any]
) -> None:
    target, question = card(name), Question(architecture=make(model), options=options)
    before = forecast(question, target)
    assert before.fit_probability is not None
    assert before.fit_probability < LIKELY
    changes = what_would_fit(question, target)
    assert changes
    assert [c.gpu_time_ratio for c in changes] == sorted(c.gpu_time_ratio for c in changes)
    for change in changes:
        after = forecast(changed(question, change.options), target)
        assert after.verdict == "fits"
        assert after.fit_probability == change.fit_probability
        assert after.memory.process_bytes is not None
        assert after.memory.process_bytes.value == change.process_bytes
        assert after.step_time_s.value == change.step_time_s
        if "num_gpus" not in change.options:
            assert after.run.tokens_per_step == before.run.tokens_per_step


def test_known_ways_out_are_among_the_changes(make: Make) -> None:
    model, name, options = NO_ROOM[1]
    changes = what_would_fit(Question(architecture=make(model), options=options), card(name))
    assert "--gradient-checkpointing" in {change.typed for change in changes}
    model, name, options = NO_ROOM[2]
    changes = what_would_fit(Question(architecture=make(model), options=options), card(name))
    smaller = [change.options for change in changes if "per_device_train_batch_size" in change.options]
    assert smaller
    assert all(o["per_device_train_batch_size"] * o["gradient_accumulation_steps"] == 12 for o in smaller)


def test_experts_in_4_bits_are_a_way_out() -> None:
    """53 GiB of 16-bit experts beside a base in 4 bits: packed they fit where adapters are on attention alone, which
    needs no second card; of LLaMA-Factory nobody packs them."""
    model = load_architecture("Qwen/Qwen3-30B-A3B")
    options = {"method": "qlora", "lora_target_modules": "q_proj,v_proj", "max_length": 512}
    found = what_would_fit(Question(architecture=model, options=options), card("l40s-48gb"))
    assert found[0].options == {"quantize_moe_experts": True}
    assert 0.9 < found[0].gpu_time_ratio < 1.3
    for other in ({"lora_target_modules": "all-linear"}, {"stack": "llama-factory"}):
        ways = what_would_fit(Question(architecture=model, options={**options, **other}), card("l40s-48gb"))
        assert not any("quantize_moe_experts" in way.options for way in ways)


def test_a_smaller_batch_is_the_largest_divisor_that_fits(make: Make) -> None:
    model, name, options = NO_ROOM[2]
    target, question = card(name), Question(architecture=make(model), options=options)
    run = forecast(question, target).run
    (found,) = [o for o in candidates(question, target, run) if "per_device_train_batch_size" in o]
    most = largest_micro_batch(question.architecture, run, target)
    assert found["per_device_train_batch_size"] == max(d for d in (1, 2, 3, 4, 6) if d <= most)


def test_searched_options_say_so(make: Make) -> None:
    question, target = Question(architecture=make("llama-3.1-8b"), options={"method": "qlora"}), card("l40s-48gb")
    asked, note = question_that_fits(question, target, "max_length")
    found = forecast(asked, target)
    assert found.verdict == "fits"
    assert f"--max-length {found.run.max_length} is the largest" in note
    assert found.run_origins["max_length"] == "searched"


@pytest.mark.parametrize(
    ("more", "step"),
    [
        ({"num_gpus": 2, "tp": 2}, 2),
        ({"num_gpus": 2, "tp": 2, "sequence_parallel": False}, 1),
        ({"num_gpus": 2, "cp": 2}, 4),
        ({"num_gpus": 4, "tp": 2, "cp": 2}, 4),
        ({"num_gpus": 3, "cp": 3}, 6),
        ({"attention_length": 512, "attn_implementation": "flash_attention_2"}, 1),
    ],
)
def test_searched_lengths_are_those_that_the_splits_deal_out(make: Make, more: dict[str, Any], step: int) -> None:
    """No other length is tried: each would be refused, and nobody typed it. One step more does not fit."""
    options = {"method": "lora", "sharding": "ddp", **more} if more.get("cp") else {"method": "lora", **more}
    question, target = Question(architecture=make("llama-3.1-8b"), options=options), card("l40s-48gb")
    asked, note = question_that_fits(question, target, "max_length")
    length = asked.options["max_length"]
    assert length % step == 0
    assert length > 512
    assert f"--max-length {length} is the largest {f'multiple of {step} ' if step > 1 else ''}that fits" in note
    assert forecast(asked, target).verdict == "fits"
    assert forecast(changed(question, {"max_length": length + step}), target).verdict != "fits"


def test_documents_that_do_not_fit_name_their_own_length(make: Make) -> None:
    options = {"method": "full", "attention_length": 512, "attn_implementation": "flash_attention_2"}
    question = Question(architecture=make("llama-3.1-70b"), options=options)
    _, note = question_that_fits(question, card("l4-24gb"), "max_length")
    assert note == "--max-length 512 does not fit on l4-24gb either"


def test_nothing_fits_is_said() -> None:
    huge = load_architecture("meta-llama/Llama-3.1-405B")
    question, target = Question(architecture=huge, options={"method": "full"}), card("t4-16gb")
    assert question_that_fits(question, target, "max_length")[1] == "--max-length 1 does not fit on t4-16gb either"
    (only,) = suggestions(question, target)
    assert only == "nothing that was tried, one change or two at once, makes it fit on t4-16gb"


WAYS_OUT = [
    ("google/gemma-2-9b", "l4-24gb", {"method": "qlora", "max_length": 8192},
     {"attn_implementation": "flash_attention_2", "loss_type": "chunked_nll"}),
    ("meta-llama/Llama-3.1-405B", "h100-sxm5-80gb", {"method": "full"},
     {"method": "lora", "num_gpus": 32, "sharding": "fsdp"}),  # in 4 bits its base does not load on one card
    ("meta-llama/Llama-3.1-8B", "rtx-4090-24gb", {"method": "lora", "stack": "trl"}, {"dtype": "bf16"}),
    ("deepseek-ai/DeepSeek-V2-Lite", "l4-24gb", {"method": "lora"}, {"num_gpus": 4, "sharding": "fsdp"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name", "options", "way"), WAYS_OUT)
def test_a_way_out_is_found_where_there_is_one(
    model: str, name: str, options: dict[str, Any], way: dict[str, Any]
) -> None:
    """Two changes where one is not enough; what fits only tightly (two L4 at 53%) is not told while more GPUs fit."""
    question = Question(architecture=load_architecture(model), options=options)
    changes = what_would_fit(question, card(name))
    assert way in [change.options for change in changes]
    assert all(forecast(changed(question, change.options), card(name)).verdict == "fits" for change in changes)
    if "dtype" in way:
        assert changes[0].options == way


@pytest.mark.parametrize(
    ("asked", "offload"),
    [
        ({"gpu": "l4-24gb", "method": "lora", "num_gpus": 8}, "all"),
        ({"gpu": "t4-16gb", "method": "qlora", "attn_implementation": "eager"}, "all"),
    ],
)
def test_host_memory_is_the_last_way_out(asked: dict[str, Any], offload: str) -> None:
    (found,) = tunecast.estimate("meta-llama/Llama-3.1-70B", max_length=1024, **asked)
    assert found.verdict == "no"
    (told,) = (note for note in found.notes if "would make it fit" in note)
    assert f"--offload {offload}" in told
    (again,) = tunecast.estimate("meta-llama/Llama-3.1-70B", max_length=1024, **asked, offload=offload)
    assert again.verdict == "fits"


def test_what_fits_only_tightly_says_so(make: Make) -> None:
    """A card with just the room that a micro-batch of one sample takes at the median."""
    question, target = Question(architecture=make("llama-3.1-8b"), options={"method": "qlora"}), card("l40s-48gb")
    need = forecast(question, target).memory.process_bytes
    assert need is not None
    just = replace(target, usable_bytes=need.value)
    asked, note = question_that_fits(question, just, "per_device_train_batch_size")
    assert forecast(asked, just).verdict == "tight"
    assert re.fullmatch(
        r"--per-device-train-batch-size 1 fits only tightly \(probability [5-8]\d%\) on l40s-48gb", note
    )


def test_a_card_of_unknown_room_is_refused(make: Make, run_of: RunOf) -> None:
    llama, target = make("llama-3.1-8b"), replace(card("l40s-48gb"), usable_bytes=None)
    with pytest.raises(InputError, match=r"usable memory of l40s-48gb is unknown.*; leave --max-batch and"):
        largest_micro_batch(llama, run_of(llama), target)


def test_a_way_out_over_machines_whose_network_is_unknown_is_no_way_out() -> None:
    """Six RTX 3090 do not hold 70B; twelve would, but nothing says how two such machines are joined."""
    options = {"method": "lora", "num_gpus": 6, "sharding": "fsdp"}
    question = Question(architecture=load_architecture("meta-llama/Llama-2-70b-hf"), options=options)
    (target,) = resolve_targets(["rtx-3090-24gb"], {})
    assert "num_gpus" not in {name for change in what_would_fit(question, target) for name in change.options}
    joined = replace(question, options={**options, "internode_gbps": 100.0})
    assert "num_gpus" in {name for change in what_would_fit(joined, target) for name in change.options}


def test_a_huge_batch_is_asked_about_as_fast_as_a_small_one(make: Make) -> None:
    """Divisors by hand: of 360 there are (3 + 1)(2 + 1)(1 + 1) = 24, of a prime 2, of 10^12 13 x 13 = 169."""
    assert [len(divisors(number)) for number in (1, 360, 10**6 + 3, 10**12)] == [1, 24, 2, 169]
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    question = Question(architecture=make("llama-3.1-8b"), options={"per_device_train_batch_size": 10**6})
    (change, *_) = what_would_fit(question, card("h100-sxm5-80gb"))
    batch = change.options["per_device_train_batch_size"]
    assert batch * change.options["gradient_accumulation_steps"] == 10**6
    larger = next(d for d in divisors(10**6) if d > batch)
    run = resolve_run(question.architecture, {"per_device_train_batch_size": larger}).run
    assert not run_fits(question.architecture, run, card("h100-sxm5-80gb"))


@pytest.fixture
def short_samples(tmp_path: Path) -> dict[str, Any]:
    """Of a file whose longest sample is far below ``--max-length``, rows of one sample each."""
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * words}) + "\n" for words in (20, 60, 120)), encoding="utf-8")
    return {"method": "lora", "max_length": 8192, "dataset": str(data), "packing": False}


def test_the_searched_batch_is_of_the_longest_sample(make: Make, short_samples: dict[str, Any]) -> None:
    """It fits as the forecast sees it, twice as many samples do not, and full rows would allow far fewer."""
    target = card("l40s-48gb")
    question = Question(architecture=make("llama-3.1-8b"), options=short_samples)
    asked, _ = question_that_fits(question, target, "per_device_train_batch_size")
    found = forecast(asked, target)
    most = found.run.per_device_train_batch_size
    assert found.verdict == "fits"
    assert forecast(changed(question, {"per_device_train_batch_size": 2 * most}), target).verdict != "fits"
    assert most > 4 * largest_micro_batch(question.architecture, found.run, target)


def test_proposed_changes_are_judged_at_the_longest_sample(make: Make, short_samples: dict[str, Any]) -> None:
    """A smaller batch of short samples is enough, though full rows of as many would not fit."""
    target, options = card("l40s-48gb"), {**short_samples, "per_device_train_batch_size": 256}
    question = Question(architecture=make("llama-3.1-8b"), options={**options, "gradient_checkpointing": False})
    assert forecast(question, target).verdict == "no"
    changes = what_would_fit(question, target)
    smaller = [c for c in changes if set(c.options) == {"per_device_train_batch_size", "gradient_accumulation_steps"}]
    assert smaller
    for change in smaller:
        after = forecast(changed(question, change.options), target)
        assert after.verdict == "fits"
        assert not run_fits(question.architecture, after.run, target)


@pytest.mark.parametrize("size", [4, 8])
def test_larger_groups_of_shards_are_proposed_where_groups_are_why_it_does_not_fit(size: int) -> None:
    options = {"method": "full", "max_length": 2048, "num_gpus": 32, "sharding": "fsdp", "dp_shard_size": size}
    question = Question(architecture=load_architecture("meta-llama/Llama-3.1-70B"), options=options)
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    assert forecast(question, target).verdict == "no"
    groups = [change for change in what_would_fit(question, target) if "dp_shard_size" in change.options]
    assert [change.options.keys() for change in groups] == [{"dp_shard_size"}]
    found = forecast(changed(question, groups[0].options), target)
    assert found.fit_probability is not None
    assert found.fit_probability >= TIGHT_BELOW
    larger = int(groups[0].options["dp_shard_size"])
    assert larger % size == 0
    assert larger // 2 == size or not fits_with(question, target, {"dp_shard_size": larger // 2})


def test_a_long_row_is_proposed_in_the_fewest_parts_that_fit_and_a_short_one_in_none() -> None:
    options = {"method": "full", "max_length": 131072, "num_gpus": 8, "sharding": "fsdp"}
    question = Question(architecture=load_architecture("meta-llama/Llama-3.1-8B"), options=options)
    target = card("h100-sxm5-80gb")
    before = forecast(question, target)
    assert before.verdict == "no"
    (parts,) = [change for change in what_would_fit(question, target) if "cp" in change.options]
    after = forecast(changed(question, parts.options), target)
    assert after.verdict == "fits"
    assert after.run.tokens_per_step == before.run.tokens_per_step
    fewer = {"cp": int(parts.options["cp"]) // 2, "gradient_accumulation_steps": int(parts.options["cp"]) // 2}
    assert not fits_with(question, target, fewer)
    short = replace(question, options={**options, "max_length": 8192, "per_device_train_batch_size": 16})
    assert not any("cp" in change.options for change in what_would_fit(short, target))


@pytest.mark.parametrize(
    ("spread", "proposed"),
    [
        ({"num_gpus": 8, "sharding": "ddp"}, {"sharding": "fsdp"}),
        ({"num_gpus": 8, "sharding": "fsdp"}, {"num_gpus": 16}),
        ({"num_gpus": 8, "sharding": "zero2"}, {"sharding": "zero3"}),
        ({"num_gpus": 8, "sharding": "zero3"}, {"num_gpus": 16}),
        (
            {"num_gpus": 1, "gradient_accumulation_steps": 4},
            {"num_gpus": 2, "sharding": "fsdp", "gradient_accumulation_steps": 2},
        ),
    ],
)
def test_more_gpus_keep_what_the_optimizer_keeps(spread: dict[str, Any], proposed: dict[str, Any]) -> None:
    """DeepSpeed's optimizer has fp32 copies, FSDP's has none of 16-bit weights; what is set is not proposed again."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    run = resolve_run(llama, {"method": "full", **spread}).run
    first = next(more_gpus(run))
    assert first == proposed
    more = resolve_run(llama, {"method": "full", **spread, **first}).run
    assert (more.sharding in ZERO) == (run.sharding in ZERO)
    assert more.tokens_per_step >= run.tokens_per_step
