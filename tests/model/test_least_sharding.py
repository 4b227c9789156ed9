"""Which sharding several GPUs get where nobody names one: the least that surely fits, not one that may."""

from __future__ import annotations

from typing import Any

import pytest

import tunecast
from tunecast.model.fits import TIGHT_BELOW, chance_said

LLAMA_70B = "meta-llama/Llama-3.1-70B"


def asked(gpu: str, **options: Any) -> Any:
    (found,) = tunecast.estimate(LLAMA_70B, gpu=gpu, max_length=2048, **options)
    return found


@pytest.mark.parametrize(("gpu", "method"), [("h200-sxm5-141gb", "lora"), ("l40s-48gb", "qlora")])
def test_a_sharding_that_may_not_fit_gives_way_to_one_that_does(gpu: str, method: str) -> None:
    """ZeRO-1 of 8 GPUs leaves the weights whole: on these cards that is a toss-up."""
    toss_up = asked(gpu, method=method, num_gpus=8, sharding="zero1")
    assert 0.3 < toss_up.fit_probability < TIGHT_BELOW
    found = asked(gpu, method=method, num_gpus=8)
    assert (found.run.sharding, found.verdict) == ("fsdp", "fits")
    assert "--sharding not given: fsdp is the least that fits" in found.notes


def test_the_chance_is_that_of_the_runs_own_code_and_length() -> None:
    """Short rows and other stacks have overheads of their own: what is chosen is what is shown."""
    for options in ({"max_length": 512}, {"stack": "torchtune"}, {"stack": "unsloth"}):
        (found,) = tunecast.estimate(
            LLAMA_70B, gpu="h200", method="lora", num_gpus=8, **{"max_length": 2048, **options}
        )
        assert found.verdict == "fits", options


def test_the_smallest_comes_closest_where_none_fits() -> None:
    """Gradients accumulate: FSDP holds them whole, ZeRO-3 does not."""
    asked_for = {"method": "full", "num_gpus": 8, "gradient_accumulation_steps": 8}
    found = asked("h100-sxm5-80gb", **asked_for)
    assert "--sharding not given: none fits, zero3 comes closest" in found.notes
    fsdp = asked("h100-sxm5-80gb", sharding="fsdp", **asked_for)
    assert found.memory.process_bytes.value < fsdp.memory.process_bytes.value


def test_where_none_surely_fits_the_likeliest_is_taken_and_said() -> None:
    found = asked("h100-sxm5-80gb", method="full", num_gpus=8)
    assert any("comes closest" in note or "likeliest to fit" in note for note in found.notes)
    assert found.run.sharding in ("fsdp", "zero3")


def test_enough_gpus_for_a_deadline_are_found_though_whole_weights_hardly_fit() -> None:
    found = asked("h200-sxm5-141gb", method="lora", num_gpus="auto", deadline="1h", tokens="10M")
    assert found.total_time_h is not None
    assert found.total_time_h.value <= 1.0
    assert found.verdict == "fits"


@pytest.mark.parametrize("method", ["lora", "full"])
def test_torchtune_has_no_deepspeed_nor_copies(method: str) -> None:
    """Its recipes for several GPUs are FSDP's (recipes/full_finetune_distributed.py, lora_finetune_distributed.py)."""
    (found,) = tunecast.estimate(
        "meta-llama/Llama-3.1-8B", gpu="a100-sxm4-80gb", method=method, num_gpus=8, stack="torchtune"
    )
    assert found.run.sharding == "fsdp"
    searched = tunecast.recommend("meta-llama/Llama-3.1-70B", method="lora", stack="torchtune", tokens="1M", gpu="h200")
    assert {picked.forecast.run.pp for picked in searched.front} == {1}


@pytest.mark.parametrize(
    ("chance", "bar", "said"),
    [
        (0.8950, 0.9, "89%"), (0.89999, 0.9, "89%"), (0.9, 0.9, "90%"), (0.9049, 0.9, "90%"), (0.72, 0.9, "72%"),
        (0.996, 0.9, "100%"), (0.4962, 0.5, "49%"), (0.949, 0.95, "94%"), (0.8949, 0.9, "89%"),
    ],
)  # fmt: skip
def test_a_chance_below_the_bar_does_not_read_as_the_bar(chance: float, bar: float, said: str) -> None:
    assert chance_said(chance, bar) == said
