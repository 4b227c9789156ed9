"""Amounts of data become optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.amount import parse_count, resolve_amount
from tunecast.model.run import Run

RUN = Run(method="full", max_length=1000, per_device_train_batch_size=2, gradient_accumulation_steps=5, num_gpus=3)
"""30,000 tokens per optimizer step."""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10M", 10e6),
        ("1.5B", 1.5e9),
        ("15T", 15e12),
        ("250000", 250e3),
        ("2e6", 2e6),
        ("3k", 3e3),
        ("10_000_000", 1e7),
        ("1,500,000", 1.5e6),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, count: float) -> None:
    assert parse_count(text, name="--tokens") == count


@pytest.mark.parametrize("text", ["", "ten", "-5M", "0", "1.2.3M", "nan", "10X", "inf", "1,5", "1_5M", ",500"])
def test_a_bad_count_is_refused_with_the_option_and_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"--tokens.*10M"):
        parse_count(text, name="--tokens")


@pytest.mark.parametrize("name", ["--tokens", "--num-samples"])
def test_a_part_of_a_sample_is_refused_and_a_mean_may_have_one(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} is '1\.5', which is not a whole number"):
        parse_count("1.5", name=name)
    assert parse_count("1.5k", name=name) == 1500
    assert parse_count("487.5", name="--mean-tokens") == 487.5


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"tokens": "3M"}, 100),
        ({"tokens": "3M", "num_train_epochs": 2}, 200),
        ({"tokens": "3000001"}, 101),
        ({"num_samples": 300}, 10),
        ({"num_samples": 3000, "mean_tokens": 100, "packing": True}, 10),
        ({"num_samples": 3000, "mean_tokens": 100, "packing": True, "num_train_epochs": 3}, 30),
        ({"num_samples": 3000, "mean_tokens": 100}, 100),
        ({"num_samples": 3000, "mean_tokens": 100, "num_train_epochs": 3}, 300),
        ({"tokens": "3M", "mean_tokens": 100}, 1000),
        ({"max_steps": 7}, 7),
    ],
)
def test_steps_cover_the_data(options: dict[str, Any], steps: int) -> None:
    amount = resolve_amount(RUN, options)
    assert amount is not None
    assert amount.steps == steps


@pytest.mark.parametrize("amount", [{"max_steps": 7}, {"tokens": "3M"}, {"num_samples": 300}])
@pytest.mark.parametrize(("mean", "said"), [(-5.0, "not above 0"), (float("nan"), "not above 0"),
                                            (1001.0, "above --max-length 1000")])  # fmt: skip
def test_a_mean_length_that_no_sample_can_have_is_refused_beside_any_amount(
    amount: dict[str, Any], mean: float, said: str
) -> None:
    with pytest.raises(InputError, match=f"--mean-tokens.*{said}"):
        resolve_amount(RUN, {**amount, "mean_tokens": mean})


def test_rows_of_unknown_lengths_are_as_unsure_by_steps_as_by_samples() -> None:
    """300 samples are 10 steps: the same work, so the same doubt of it."""
    unpacked = {"packing": False, "mean_tokens": 200}
    by_steps, by_samples = (
        resolve_amount(RUN, {**unpacked, **how}) for how in ({"max_steps": 10}, {"num_samples": 300})
    )
    assert by_steps is not None
    assert by_samples is not None
    assert (by_steps.steps, by_steps.least, by_steps.most) == (by_samples.steps, by_samples.least, by_samples.most)
    assert by_steps.least < 1.0 < by_steps.most


def test_without_an_amount_there_is_no_total() -> None:
    assert resolve_amount(RUN, {}) is None


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": "3M", "max_steps": 5},
        {"max_steps": 0},
        {"max_steps": -1},
        {"num_train_epochs": 2},
        {"tokens": "3M", "num_train_epochs": 0},
        {"num_samples": 10, "mean_tokens": 2000},
        {"num_samples": -1},
    ],
)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--"):
        resolve_amount(RUN, options)
