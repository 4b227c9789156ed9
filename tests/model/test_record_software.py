"""What a record takes from published runs for software and links that it has not measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.forecast import Forecast
from tunecast.model.on_device import target_factors
from tunecast.model.priors import load_priors
from tunecast.model.question import Question
from tunecast.model.run import Run
from tunecast.model.target import Target, resolve_targets

RECORDS = sorted((Path(__file__).parents[2] / "results" / "records").glob("h100-*.json"))
CARD = "h100-sxm5-80gb"


@pytest.fixture(scope="module")
def recorded() -> Target:
    from tunecast.calibrate.fitted_records import fitted_records

    return resolve_targets([CARD], fitted_records(RECORDS[:1]))[0]


def ask(target: Target, **options: Any) -> Forecast:
    whole = {"method": "full", "max_length": 4096, **options}
    return forecast(Question(architecture=load_architecture("meta-llama/Llama-3.1-8B"), options=whole), target)


def width(found: Forecast) -> float:
    return math.log(found.step_time_s.high / found.step_time_s.low)


@pytest.mark.parametrize("stack", ["hf-peft", "trl", "llama-factory"])
def test_code_that_the_record_ran_is_as_measured(recorded: Target, stack: str) -> None:
    assert recorded.record is not None
    own = factor_set_from_record(recorded.record)
    found = target_factors(recorded, Run(method="lora", max_length=512, stack=stack))
    assert found.factors["scale.gemm"] == own.factors["scale.gemm"]
    assert not any("not measured by this record" in note for note in found.notes)


def test_other_code_is_slower_by_the_difference_that_published_runs_show(recorded: Target) -> None:
    assert recorded.record is not None
    own = factor_set_from_record(recorded.record)
    found = target_factors(recorded, Run(method="lora", max_length=512, stack="torchtune"))
    for kind in ("gemm", "attention", "memory"):
        published = load_priors()["effects_by_kind"][f"stack.{kind}"]
        slower = published["torchtune"]["value"] - published["hf-peft"]["value"]
        ratio = found.factors[f"scale.{kind}"].value / own.factors[f"scale.{kind}"].value
        assert ratio == pytest.approx(math.exp(slower))
    (note,) = [note for note in found.notes if "as published runs say of torchtune" in note]
    assert "the interval allows for more" in note
    assert found.factors["scale.dequant"] == own.factors["scale.dequant"]


def test_other_code_is_less_sure_than_what_was_measured(recorded: Target) -> None:
    plain, other = ask(recorded, method="lora"), ask(recorded, method="lora", stack="torchtune")
    unknown = ask(recorded, method="lora", stack="unsloth")
    assert width(plain) < width(other) < width(ask(resolve_targets([CARD], {})[0], method="lora", stack="torchtune"))
    assert width(plain) < width(unknown)


def test_links_that_no_record_measured_are_as_doubtful_as_without_one(recorded: Target) -> None:
    """Eight machines at 800 Gbit/s wait for their links for a fifth of the step and more: by a record as without one,
    since neither has measured what hides."""
    split: dict[str, Any] = {"num_gpus": 64, "sharding": "fsdp", "internode_gbps": 800}
    alone, eight = ask(recorded), ask(recorded, **split)
    by_priors = ask(resolve_targets([CARD], {})[0], **split)
    assert eight.time_parts_s["communication"] > 0.2 * eight.step_time_s.value
    assert eight.time_parts_s["communication"] == pytest.approx(by_priors.time_parts_s["communication"], rel=0.05)
    assert 2.0 * width(alone) < width(eight) < width(by_priors)
