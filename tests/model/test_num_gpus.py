"""``--num-gpus auto``: fewest GPUs that fit, and that are in time."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.num_gpus import LEAST_PROBABILITY, fewest_gpus, parse_hours, parse_num_gpus, ways_for, with_count
from tunecast.model.question import Question
from tunecast.model.target import resolve_targets


def ask(model: str, **options: Any) -> Question:
    return Question(architecture=load_architecture(model), options={"num_gpus": "auto", **options})


def test_the_fewest_fit_and_half_of_them_do_not() -> None:
    """70B in bf16 is 141 GB: one 80 GB card cannot hold it; every smaller number that was passed over is too few."""
    question = ask("meta-llama/Llama-3.1-70B", method="lora", max_length=1024)
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    asked, note = fewest_gpus(question, target)
    count = asked.options["num_gpus"]
    assert count in (2, 4, 8)
    tried = ", ".join(str(2**power) for power in range(count.bit_length()))
    assert f"the first of {tried} that fit with a probability of 90%" in note
    probability = forecast(asked, target).fit_probability
    assert probability is not None
    assert probability >= LEAST_PROBABILITY
    fewer = forecast(with_count(question, count // 2), target).fit_probability
    assert fewer is not None
    assert fewer < LEAST_PROBABILITY


def test_a_small_run_takes_one_and_a_deadline_takes_more() -> None:
    question = ask("meta-llama/Llama-3.1-8B", method="lora", max_length=2048, tokens="100M")
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    alone, _ = fewest_gpus(question, target)
    assert alone.options["num_gpus"] == 1
    hours = forecast(alone, target).total_time_h
    assert hours is not None
    several, note = fewest_gpus(question, target, hours.value / 2)
    count = several.options["num_gpus"]
    assert count > 1
    assert "done within" in note
    in_time = forecast(several, target).total_time_h
    assert in_time is not None
    assert in_time.value <= hours.value / 2
    too_few = forecast(with_count(question, count // 2), target).total_time_h
    assert too_few is not None
    assert too_few.value > hours.value / 2


def test_an_impossible_deadline_says_so() -> None:
    question = ask("meta-llama/Llama-3.1-8B", method="lora", tokens="100M")
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    asked, note = fewest_gpus(question, target, 0.01)
    assert asked.options["num_gpus"] >= 8
    assert "even" in note
    assert "not done within 0.6 min" in note


@pytest.mark.parametrize(("splits", "gpus"), [({"cp": 129}, 129), ({"tp": 2, "pp": 256}, 512)])
def test_splits_over_more_gpus_than_are_tried_are_refused(splits: dict[str, int], gpus: int) -> None:
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    with pytest.raises(InputError) as refused:
        fewest_gpus(ask("meta-llama/Llama-3.1-8B", method="lora", **splits), target)
    assert " x ".join(f"--{name} {value}" for name, value in splits.items()) in str(refused.value)
    assert f"type --num-gpus {gpus}," in str(refused.value)


@pytest.mark.parametrize(("splits", "counts"), [({"pp": 3}, (3, 6, 12)), ({"cp": 5, "max_length": 1000}, (5, 10, 20))])
def test_numbers_tried_are_copies_of_the_split_that_is_asked_for(
    splits: dict[str, int], counts: tuple[int, ...]
) -> None:
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    question = ask("meta-llama/Llama-3.1-8B", method="lora", **splits)
    assert tuple(count for count, _ in ways_for(question, target))[:3] == counts
    assert fewest_gpus(question, target)[0].options["num_gpus"] == counts[0]


def test_a_deadline_needs_an_amount() -> None:
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    with pytest.raises(InputError, match="--tokens"):
        fewest_gpus(ask("meta-llama/Llama-3.1-8B", method="lora"), target, 24.0)


def test_counts_and_hours_as_typed() -> None:
    assert (parse_num_gpus("auto"), parse_num_gpus("8")) == ("auto", 8)
    assert [parse_hours(text) for text in ("24h", "90min", "3d", 5, "0.5")] == [24.0, 1.5, 72.0, 5.0, 0.5]
    for bad in ("0", "many", "-1", "2.5"):
        with pytest.raises(InputError, match="--num-gpus"):
            parse_num_gpus(bad)
    for worse in ("soon", "0h", "-2h"):
        with pytest.raises(InputError, match="--deadline"):
            parse_hours(worse)


def test_one_gpu_keeps_as_weights_what_shards_kept() -> None:
    """Mixed precision without FSDP trains the fp32 weights themselves."""
    shards = {"method": "full", "sharding": "fsdp", "dtype": "bf16", "precision": "bf16-autocast"}
    asked = with_count(ask("Qwen/Qwen2.5-0.5B", **shards, master_dtype="fp32"), 1).options
    assert (asked["dtype"], asked.get("master_dtype"), asked.get("sharding")) == ("fp32", None, None)
    assert with_count(ask("Qwen/Qwen2.5-0.5B", **shards, master_dtype="fp32"), 8).options["master_dtype"] == "fp32"
