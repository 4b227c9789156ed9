"""Splits of the layers that a search tries, and what it does with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.fits import TIGHT_BELOW
from tunecast.model.fitting import what_would_fit
from tunecast.model.largest import changed
from tunecast.model.layer_splits import INNER, gpus_per_copy, split_words, splits_tried, ways_tried
from tunecast.model.num_gpus import LEAST_PROBABILITY, fewest_gpus, is_whole, with_count
from tunecast.model.plans import WORTH, Job, global_batch, gpu_counts, plans_that_may_fit
from tunecast.model.question import Question
from tunecast.model.resolve_stacks import of_stack
from tunecast.model.target import resolve_targets

LARGE = "meta-llama/Llama-3.1-70B"


def ask(model: str, **options: Any) -> Question:
    asked = {"method": "full", "max_length": 4096, **options}
    return Question(architecture=of_stack(load_architecture(model), asked), options=asked)


@pytest.mark.parametrize("stack", [None, "hf-peft", "trl", "axolotl", "torchtune", "litgpt"])
def test_stacks_that_shard_by_data_parallelism_alone_split_no_layers(stack: str | None) -> None:
    assert [dict(split) for split in splits_tried({"stack": stack})] == [{}]


@pytest.mark.parametrize("asked", [{"tp": 2}, {"pp": 1}, {"cp": 2}])
def test_a_split_that_is_asked_for_stays(asked: dict[str, int]) -> None:
    assert [dict(split) for split in splits_tried({"stack": "megatron", **asked})] == [{}]


@pytest.mark.parametrize("machine", [1, 4, 6, 8])
@pytest.mark.parametrize("stack", ["megatron", "nemo", "torchtitan"])
def test_splits_grow_and_tensors_stay_inside_a_machine(stack: str, machine: int) -> None:
    splits = [{"tp": 1, "pp": 1, **split} for split in splits_tried({"stack": stack, "gpus_per_node": machine})]
    assert splits[0] == {"tp": 1, "pp": 1}
    assert all(machine % split["tp"] == 0 for split in splits)
    assert len({(split["tp"], split["pp"]) for split in splits}) == len(splits)
    for one, two in pairwise(splits):
        smaller, larger = (gpus_per_copy(split, *INNER) for split in (one, two))
        assert smaller < larger or (smaller == larger and one["tp"] > two["tp"])
    sizes = {gpus_per_copy(split, *INNER) for split in splits}
    assert {2**power for power in range(5)} <= sizes
    assert {3, 6, 12} <= sizes, "24 GPUs in three machines"


def test_auto_takes_the_least_split_on_the_fewest_gpus_that_fit() -> None:
    """70B with fp32 states beside 16-bit weights: no copy of it fits a card whole, however many share its states."""
    question = ask(LARGE, stack="megatron", num_gpus="auto")
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    asked, note = fewest_gpus(question, target)
    count, chosen = asked.options["num_gpus"], {name: asked.options[name] for name in ("tp", "pp")}
    assert split_words(chosen) in note
    assert {asked.option_origins[name] for name in ("num_gpus", *chosen)} == {"searched"}
    found = forecast(asked, target).fit_probability
    assert found is not None
    assert found >= LEAST_PROBABILITY
    ways = [
        (gpus, split)
        for split in splits_tried(question.options)
        for gpus in (count, max(n for n in gpu_counts(128) if n < count))
        if is_whole(gpus, split) and (gpus < count or gpus_per_copy(split, *INNER) < gpus_per_copy(chosen, *INNER))
    ]
    assert ways
    for gpus, split in ways:
        less = forecast(with_count(question, gpus, split), target).fit_probability
        assert less is not None
        assert less < LEAST_PROBABILITY
    others = [
        split
        for split in splits_tried(question.options)
        if gpus_per_copy(split, *INNER) == gpus_per_copy(chosen, *INNER)
    ]
    step_s = forecast(asked, target).step_time_s.value
    assert len(others) > 1
    for split in others:
        other = forecast(with_count(question, count, split), target)
        assert other.fit_probability is not None
        assert other.fit_probability < LEAST_PROBABILITY or other.step_time_s.value >= (1.0 - WORTH) * step_s


def test_a_deadline_is_asked_of_the_least_split_that_fits_each_number() -> None:
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    question = ask(
        "meta-llama/Llama-3.1-8B", stack="megatron", num_gpus="auto", tokens="10B", gradient_checkpointing=True
    )
    asked, note = fewest_gpus(question, target, 0.01)
    assert "are not done within" in note
    assert asked.options["num_gpus"] == 128
    assert asked.options.get("tp") in (None, 1)


def test_plans_of_such_a_stack_keep_the_global_batch_in_every_layout() -> None:
    counts = (1, 2, 4, 8, 16)
    job = Job(
        architecture=ask("meta-llama/Llama-3.1-8B", stack="megatron").architecture,
        options={"max_length": 2048, "stack": "megatron"},
        option_origins={},
        methods=("full",),
        counts=counts,
        batch=global_batch({}, counts, 16),
    )
    (card,) = resolve_targets(["h100-sxm5-80gb"], {})
    runs = [plan.run for plan in plans_that_may_fit(job, card, roomiest_bytes=80e9)]
    layouts = {(run.num_gpus, run.tp, run.pp) for run in runs}
    assert {(8, 1, 1), (8, 2, 1), (8, 8, 1), (16, 8, 2), (16, 4, 4)} <= layouts
    assert (1, 1, 1) not in layouts, "18 bytes of each of 8 billion parameters"
    for run in runs:
        copies = run.num_gpus // (run.tp * run.pp)
        assert run.per_device_train_batch_size * run.gradient_accumulation_steps * copies == 16
        assert run.sharding == ("zero1" if copies > 1 else "none")


@pytest.mark.parametrize(("stack", "alone"), [("megatron", {"none", "zero1"}), ("torchtitan", {"none", "fsdp"})])
def test_what_would_fit_is_spread_as_the_stack_spreads(stack: str, alone: set[str]) -> None:
    question = ask(
        "meta-llama/Llama-3.1-8B", stack=stack, gradient_accumulation_steps=4, num_gpus=2, gradient_checkpointing=True
    )
    (target,) = resolve_targets(["a100-sxm4-40gb"], {})
    before = forecast(question, target)
    assert before.fit_probability is not None
    assert before.fit_probability < TIGHT_BELOW
    spread = [change for change in what_would_fit(question, target) if "num_gpus" in change.options]
    assert spread
    for change in spread:
        found = forecast(changed(question, change.options), target)
        assert found.fit_probability is not None
        assert found.fit_probability >= TIGHT_BELOW
        assert found.run.tokens_per_step == before.run.tokens_per_step
        assert found.run.sharding in alone


def test_long_rows_go_in_parts_of_a_machine_and_short_ones_do_not() -> None:
    def parts(**options: Any) -> set[int]:
        return {split.get("cp", 1) for split in ways_tried({"max_length": 131072, **options}, 32)}

    assert parts() == parts(stack="megatron") == {1, 2, 4, 8}
    assert parts(gpus_per_node=4) == {1, 2, 4}
    assert parts(max_length=8192) == parts(cp=1) == parts(tp=2) == {1}
    assert parts(stack="unsloth") == parts(stack="litgpt") == {1}, "neither has context parallelism"


def test_stages_that_are_alike_are_interleaved_unless_the_user_says_how() -> None:
    """NVIDIA's own 70B over four stages of 20 layers has five chunks in each."""
    ways = list(ways_tried({"stack": "megatron", "max_length": 4096}, 80))
    chunks = {way["pp"]: way["pp_interleave"] for way in ways if "pp_interleave" in way}
    assert chunks == {2: 5, 4: 5, 8: 5, 16: 5}
    assert all("pp_interleave" not in way for way in ways_tried({"stack": "megatron", "pp_interleave": 2}, 80))


def test_rows_in_parts_are_plans_that_fit_where_whole_rows_do_not() -> None:
    """131,072 tokens of 8B in full training: no 80 GB card holds a row; beside its parts FSDP shards the model."""
    asked = {"max_length": 131072, "max_steps": 1}
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    counts = gpu_counts(8)
    job = Job(
        architecture=load_architecture("meta-llama/Llama-3.1-8B"),
        options=asked,
        option_origins={},
        methods=("full",),
        counts=counts,
        batch=global_batch(asked, counts, 4),
    )
    runs = [plan.run for plan in plans_that_may_fit(job, target, roomiest_bytes=79e9)]
    assert runs
    assert min(run.cp for run in runs) > 1
    assert {run.sharding for run in runs} <= {"fsdp", "hsdp"}
    assert all(run.dp * run.per_device_train_batch_size * run.gradient_accumulation_steps == 4 for run in runs)
