"""What a tornado and a what-if say of samples of which only the mean length is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.model.parallel_scaling import LONGER_ROWS
from tunecast.sweep import sweep
from tunecast.sweep_result import Bar, Sweep
from tunecast.unlike_lengths import LENGTHS

MODEL, GPU = "meta-llama/Llama-3.1-8B", "h100-sxm5-80gb"
PADDED: dict[str, Any] = {
    "method": "lora", "num_gpus": 8, "sharding": "ddp", "num_samples": "200k", "mean_tokens": 500, "packing": False,
    "per_device_train_batch_size": 4, "max_length": 2048,
}  # fmt: skip
PACKED: dict[str, Any] = {
    "method": "lora", "attn_implementation": "flash_attention_2", "max_length": 131072, "packing": True,
    "padding_free": True, "mean_tokens": 16000, "tokens": "100M",
}  # fmt: skip


def bars(metric: str | None = None, **options: Any) -> dict[str, Bar]:
    found = sweep(MODEL, gpu=GPU, metric=metric, **options)
    return {bar.name: bar for bar in found.bars}


def what_if(**options: Any) -> Sweep:
    return sweep(MODEL, gpu=GPU, analysis="what-if", **options)


def test_rows_of_samples_all_alike_cost_what_an_estimate_of_those_costs() -> None:
    bar = bars("cost", **PADDED)[LENGTHS]
    alike = {**PADDED, "max_length": 500, "mean_tokens": 500}
    (told,) = tunecast.estimate(MODEL, gpu=GPU, **alike)
    assert told.cost_usd is not None
    assert bar.low == pytest.approx(told.cost_usd.value)
    assert bar.high is not None
    assert bar.low < bar.base < bar.high


@pytest.mark.parametrize(
    "options",
    [
        {"method": "qlora", "mean_tokens": 200, "per_device_train_batch_size": 2, "num_gpus": 1, "sharding": None},
        pytest.param(
            {"mean_tokens": 600, "per_device_train_batch_size": 1, "num_gpus": 2, "gradient_accumulation_steps": 4},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"mean_tokens": 600, "group_by_length": True}, marks=pytest.mark.thorough),
        {"mean_tokens": 200, "num_samples": None, "max_steps": 5000},
    ],
)
def test_what_is_asked_lies_between_the_ends(options: dict[str, Any]) -> None:
    """A mean of steps is longer than the step of the mean row, where hosts decide short ones; the high end has that.
    Where they decide all of them, shorter rows take as long."""
    bar = bars("time", **{**PADDED, **options})[LENGTHS]
    assert bar.low is not None
    assert bar.high is not None
    assert bar.low <= bar.base < bar.high


@pytest.mark.parametrize("packing", [False, True])
def test_bytes_that_a_token_is_assumed_to_have_move_a_data_file(tmp_path: Path, packing: bool) -> None:
    """Without a tokenizer a token is 3 to 5 bytes; with fewer bytes there are more of them."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * (40 * i)}) + "\n" for i in range(1, 60)), encoding="utf-8")
    options = {"method": "lora", "dataset": str(data), "max_length": 2048, "packing": packing}
    bar = bars("time", **options, per_device_train_batch_size=2)[LENGTHS]
    assert (bar.low_setting, bar.high_setting) == ("5 bytes a token", "3 bytes a token")
    assert bar.low is not None
    assert bar.high is not None
    assert bar.low < bar.base < bar.high


def test_an_amount_in_tokens_keeps_its_samples() -> None:
    in_samples = bars("time", **PADDED)[LENGTHS]
    in_tokens = bars("time", **{**PADDED, "num_samples": None, "tokens": "100M"})[LENGTHS]
    assert (in_tokens.low, in_tokens.high) == pytest.approx((in_samples.low, in_samples.high), rel=1e-6)


@pytest.mark.parametrize("amount", [{"tokens": "100M"}, {"tokens": None, "num_samples": 6250}])
def test_documents_of_packed_rows_are_moved_too(amount: dict[str, Any]) -> None:
    bar = bars("cost", **{**PACKED, **amount})[LENGTHS]
    assert bar.low is not None
    assert bar.high is not None
    assert bar.low < bar.base < bar.high


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        ("memory", PADDED),
        ("speed", PADDED),
        ("cost", {**PADDED, "mean_tokens": 2048}),
        ("cost", {**PADDED, "packing": True, "mean_tokens": None, "num_samples": None, "tokens": "100M"}),
    ],
)
def test_nothing_is_moved_where_it_is_known_or_not_looked_at(metric: str, options: dict[str, Any]) -> None:
    assert LENGTHS not in bars(metric, **options)


def test_a_what_if_of_padded_rows_says_what_its_tokens_are() -> None:
    assert any("tokens/s count padding" in note for note in what_if(**PADDED).notes)
    assert not any("tokens/s count padding" in note for note in what_if(**{**PADDED, "mean_tokens": 2048}).notes)


def test_copies_that_wait_for_longer_rows_are_told_as_that() -> None:
    """No part of a step is slower under DDP: a copy's own rows are shorter than those that it waits for."""
    (padded,) = tunecast.estimate(MODEL, gpu=GPU, **PADDED)
    (packed,) = tunecast.estimate(MODEL, gpu=GPU, **{**PADDED, "packing": True})
    assert padded.scaling is not None
    assert packed.scaling is not None
    assert padded.scaling.bound_by == LONGER_ROWS
    assert packed.scaling.bound_by != LONGER_ROWS
    assert packed.scaling.efficiency > 0.95
