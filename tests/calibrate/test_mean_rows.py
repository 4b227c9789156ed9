"""Rows of a table whose samples are not packed and of which the mean length is stated: compared in samples."""

from __future__ import annotations

from typing import Any

import pytest

import tunecast
from tunecast.calibrate.run_columns import meant_by
from tunecast.calibrate.validate import Entry, judge, read_entries
from tunecast.model.priors import load_priors

ROW = {
    "id": "R-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "rank": "16", "lora_targets": "all-linear",
    "quant": "none", "compute_dtype": "bf16", "seq_len": "4096", "packed": "no", "mean_tokens": "600",
    "micro_batch": "4", "grad_accum": "4", "gpus": "1", "gpu": "H100 SXM", "grad_checkpointing": "yes",
    "attention_impl": "sdpa", "framework": "TRL", "optimizer": "adamw_torch", "samples_per_s": "5.1",
}  # fmt: skip
SAME: dict[str, Any] = {
    "method": "lora", "gpu": "h100-sxm5-80gb", "stack": "trl", "lora_r": 16, "lora_target_modules": "all-linear",
    "dtype": "bf16", "max_length": 4096, "mean_tokens": 600, "num_samples": 1000, "packing": False,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "optim": "adamw_torch",
}  # fmt: skip


def read(**cells: str) -> Entry:
    (entry,) = read_entries([{name: text for name, text in {**ROW, **cells}.items() if text is not None}])
    return entry


@pytest.mark.parametrize(
    ("cells", "same"),
    [
        ({}, {}),
        ({"mean_tokens": "2000"}, {"mean_tokens": 2000}),
        ({"gpus": "4", "parallelism": "ddp"}, {"num_gpus": 4, "sharding": "ddp"}),
        ({"micro_batch": "1"}, {"per_device_train_batch_size": 1}),
        ({"seq_len": "600"}, {"max_length": 600}),
    ],
)
def test_a_row_takes_what_the_same_estimate_takes(cells: dict[str, str], same: dict[str, Any]) -> None:
    judged = judge(read(**cells), lambda _: load_priors())
    assert judged.prediction is not None
    (told,) = tunecast.estimate("meta-llama/Llama-3.1-8B", **{**SAME, **same})
    assert judged.prediction.step.step_time_s.value == pytest.approx(told.step_time_s.value, rel=0.005)


def test_samples_and_the_time_of_a_step_say_the_same() -> None:
    by_samples, by_step = read(), read(samples_per_s="", step_time_s=str(16 / 5.1))
    assert by_samples.run is not None
    assert by_step.run is not None
    assert by_samples.run.tokens_per_s == pytest.approx(by_step.run.tokens_per_s)
    judged = judge(by_samples, lambda _: load_priors())
    assert judged.speed is not None
    samples_per_s = judged.speed.predicted.value / judged.speed.measured * 5.1
    assert judged.prediction is not None
    assert samples_per_s == pytest.approx(16 / judged.prediction.step.step_time_s.value)


def test_the_interval_reaches_as_far_as_lengths_may_be_unlike() -> None:
    """Samples that fill the row that four of a mean are padded to have a length that is known."""
    widths = []
    filled: tuple[dict[str, str], ...] = ({}, {"seq_len": "1249", "mean_tokens": "1249"})
    for cells in filled:
        judged = judge(read(**cells), lambda _: load_priors())
        assert judged.speed is not None
        widths.append(judged.speed.predicted.high / judged.speed.predicted.low)
    assert widths[0] > 1.5 * widths[1]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"samples_per_s": "", "tokens_per_s": "6000"}, "write samples_per_s, or step_time_s"),
        ({"samples_per_s": ""}, "no speed is stated"),
        ({"seq_len": "512"}, "mean_tokens '600' is above seq_len 512"),
        ({"mean_tokens": "about half"}, "mean_tokens"),
        ({"packed": "perhaps"}, "packed 'perhaps' is not in the vocabulary"),
    ],
)
def test_what_is_not_compared_says_why(cells: dict[str, str], said: str) -> None:
    entry = read(**cells)
    assert entry.run is None or entry.run.tokens_per_s is None
    assert said in entry.reason


def test_packed_rows_need_no_mean() -> None:
    entry = read(packed="yes", samples_per_s="", tokens_per_s="6000")
    assert entry.run is not None
    assert (entry.run.mean_tokens, entry.run.tokens_per_s) == (None, 6000.0)
    plain = read(packed="yes", samples_per_s="", tokens_per_s="6000", mean_tokens="")
    assert plain.run is not None
    assert plain.run.run == entry.run.run


@pytest.mark.parametrize(
    "heading", ["avg tokens", "mean length", "average sample length", "tokens_per_sample", "mean tokens"]
)
def test_other_words_for_the_column_are_told(heading: str) -> None:
    assert meant_by(heading) == "mean_tokens"
