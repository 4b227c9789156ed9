"""Rows of a table whose samples are not packed and of which the mean length is stated: compared in samples."""

from __future__ import annotations

from typing import Any

import pytest

import tunecast
from tunecast.calibrate.mean_rows import rows_of, with_mean
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


FILLED = "samples fill seq_len"
FLAT = {"packed": "padding-free", "attention_impl": "flash_attention_2"}
PLAIN = {"step_time_s": "", "total_time_h": "", "total_tokens_or_steps": ""}


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


@pytest.mark.parametrize(
    ("text", "packed", "mean"),
    [
        ("no, mean length 600", "no", "600"),
        ("no, cut at 4096, average length of about 612.5 tokens", "no, cut at 4096", "612.5"),
        ("no (mean length 1,024)", "no", "1,024"),
        ("no, mean length 241.6 (median 217, longest 820)", "no", "241.6"),
        ("no, mean about 300 tokens a sample", "no, mean about 300 tokens a sample", None),  # rows of that length
        ("no, mean length not stated", "no, mean length not stated", None),
        ("mean length 600", "mean length 600", None),  # whether they are packed is not said
    ],
)
def test_a_mean_length_in_the_cell_about_packing_is_that_of_its_own_column(
    text: str, packed: str, mean: str | None
) -> None:
    found = with_mean({"packed": text})
    assert (found["packed"], found.get("mean_tokens")) == (packed, mean)


def test_a_mean_in_either_cell_is_the_same_row() -> None:
    own, beside = read(mean_tokens="600"), read(mean_tokens=None, packed="no, mean length 600")
    assert own.run is not None
    assert beside.run is not None
    assert beside.run.run == own.run.run
    assert beside.run.tokens_per_s == own.run.tokens_per_s


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
        ({"samples_per_s": "5000"}, "above 1"),
        ({"samples_per_s": "", "step_time_s": "4100"}, "may be 4100 milliseconds"),
        ({"step_time_s": "9"}, "contradict each other"),
        ({"packed": "yes", "samples_per_s": "", "tokens_per_s": "6000", "mean_tokens": "-500"}, "mean_tokens '-500'"),
        ({"packed": "yes", "samples_per_s": "", "tokens_per_s": "6000", "mean_tokens": "abc"}, "mean_tokens 'abc'"),
        ({"mean_tokens": "0.5"}, "mean_tokens '0.5' is below one token"),
        ({"tokens_per_s": "30000000"}, "tokens_per_s '30000000' contradicts the row's other speed"),
        ({"gpus": "4", "parallelism": "fsdp + cp 2"}, "padded samples whose tokens context parallelism splits"),
        (
            {"samples_per_s": "", "total_time_h": "1", "total_tokens_or_steps": "5.76M tokens"},
            "write samples_per_s, or step_time_s",
        ),
        ({"packed": "samples fill seq_len"}, "mean_tokens '600' contradicts packed 'samples fill seq_len'"),
        ({"packed": "yes and no"}, "packed 'yes and no' contradicts itself"),
        ({"packed": "not packed, packed 95%"}, "contradicts itself"),
        ({"packed": "no padding"}, "packed, or laid end to end"),
        ({"packed": "padding_free"}, "attention_impl 'sdpa' does not keep samples that lie end to end"),
        ({"packed": "no (DataCollatorWithFlattening)", "attention_impl": ""}, "sdpa attention does not keep samples"),
        ({**FLAT, "mean_tokens": ""}, "of unknown length: write their mean length into mean_tokens"),
        ({**FLAT, "tokens_per_s": "9000"}, "tokens_per_s '9000' and samples_per_s '5.1' contradict each other"),
        ({**FLAT, "mean_tokens": "5000"}, "mean_tokens '5000' is above seq_len 4096"),
        ({**FLAT, "gpus": "4", "parallelism": "fsdp + cp 2"}, "with context parallelism is not built yet"),
        (
            {**FLAT, "model": "Qwen/Qwen3.5-9B", "attention_impl": "flash_attention_2, no fla"},
            "linear attention of Qwen",
        ),
    ],
)
def test_what_is_not_compared_says_why(cells: dict[str, str], said: str) -> None:
    entry = read(**cells)
    assert entry.run is None or entry.run.tokens_per_s is None
    assert said in entry.reason


@pytest.mark.parametrize(
    ("cells", "samples_per_s"),
    [
        ({"samples_per_s": "1.5 per GPU", "gpus": "4", "parallelism": "ddp"}, 6.0),
        ({"samples_per_s": "", "total_time_h": "1.5", "total_tokens_or_steps": "600 steps"}, 600 * 16 / 5400),
        ({"samples_per_s": "", "step_time_s": "3.2 s"}, 5.0),
    ],
)
def test_a_speed_may_be_written_as_in_any_other_row(cells: dict[str, str], samples_per_s: float) -> None:
    written, plain = read(**cells), read(**{**cells, **PLAIN, "samples_per_s": str(samples_per_s)})
    assert written.run is not None
    assert plain.run is not None
    assert written.run.tokens_per_s == pytest.approx(plain.run.tokens_per_s)


@pytest.mark.parametrize(("text", "mean"), [("1,024", 1024.0), ("~600 tokens", 600.0), ("487.5", 487.5)])
def test_a_mean_may_be_written_as_lengths_are(text: str, mean: float) -> None:
    run = read(mean_tokens=text).run
    assert run is not None
    assert run.mean_tokens == mean


@pytest.mark.parametrize("cells", [{}, {"gpus": "8", "parallelism": "ddp"}, {"gpus": "8", "parallelism": "fsdp"}])
def test_tokens_are_those_that_an_estimate_counts(cells: dict[str, str]) -> None:
    """Padding of a copy's own rows, not that of the longest row of all copies."""
    same = {"num_gpus": int(cells.get("gpus", 1)), "sharding": cells.get("parallelism", "none")}
    judged = judge(read(**cells), lambda _: load_priors())
    (told,) = tunecast.estimate("meta-llama/Llama-3.1-8B", **{**SAME, **same})
    assert judged.prediction is not None
    assert judged.prediction.tokens_per_s.value == pytest.approx(told.tokens_per_s.value, rel=0.005)


@pytest.mark.parametrize("gpus", [2, 8])
def test_on_several_gpus_the_interval_holds_samples_that_are_all_alike(gpus: int) -> None:
    """What links take at the least is that of the rows assumed; rows of 600 tokens are no longer held by it."""
    cells = {"gpus": str(gpus), "parallelism": "ddp"}
    unlike = judge(read(**cells), lambda _: load_priors())
    alike = judge(read(**cells, packed=FILLED, seq_len="600", mean_tokens=""), lambda _: load_priors())
    assert unlike.speed is not None
    assert alike.speed is not None
    samples_per_s = [
        judged.prediction.tokens_per_s.value / length
        for judged, length in ((unlike, rows_of_mean(cells)), (alike, 600))
        if judged.prediction is not None
    ]
    fastest = unlike.speed.predicted.high / unlike.speed.predicted.value * samples_per_s[0]
    assert fastest > 0.97 * samples_per_s[1]


def rows_of_mean(cells: dict[str, str]) -> int:
    """Tokens of a copy's own mean row."""
    run = read(**cells).run
    assert run is not None
    assert run.mean_tokens is not None
    return rows_of(run.run, run.mean_tokens).own_length


@pytest.mark.parametrize("batch", ["1", "8"])
def test_padding_takes_its_memory_whether_or_not_its_mean_is_known(batch: str) -> None:
    cells = {"micro_batch": batch, "peak_mem_gib": "54", "reserved_or_allocated": "allocated"}
    peaks = [judge(read(**cells, mean_tokens=mean), lambda _: load_priors()).memory for mean in ("", "600")]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0].predicted == peaks[1].predicted


@pytest.mark.parametrize("tokens_per_s", ["3060", "6000", "20000"])
def test_tokens_beside_samples_may_or_may_not_count_padding(tokens_per_s: str) -> None:
    """5.1 samples/s of 600 tokens, padded to anything up to 4,096."""
    entry = read(tokens_per_s=tokens_per_s)
    assert entry.run is not None
    assert entry.run.tokens_per_s is not None


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


def test_a_speed_that_shorter_rows_could_have_is_not_called_impossible() -> None:
    """3.4 samples/s of 1,000 tokens are 44% of an A100's peak where they are all alike; rows padded to the longest of
    eight, which lengths of that mean may need, would be 119%. Even alike, 10 samples/s would be more than the card."""
    cells = {
        "gpus": "8", "parallelism": "fsdp", "gpu": "A100 80GB SXM", "mean_tokens": "1000", "micro_batch": "8",
        "method": "full", "lora_targets": "", "rank": "",
    }  # fmt: skip
    possible = read(**cells, samples_per_s="3.4 per GPU")
    assert possible.run is not None
    assert possible.run.tokens_per_s is not None
    assert "above 1" in read(**cells, samples_per_s="10 per GPU").reason


def test_tensor_parallel_rows_of_any_mean_are_read() -> None:
    cells = {"gpus": "8", "parallelism": "fsdp + tp 4", "mean_tokens": "1001", "framework": "torchtitan"}
    entry = read(**cells, method="full", lora_targets="", rank="")
    assert entry.run is not None, entry.reason
    assert entry.run.tokens_per_s is not None, entry.reason


def test_rows_in_the_order_of_their_lengths_are_shorter() -> None:
    """As ``--group-by-length`` forecasts them."""
    cells = {"micro_batch": "8", "samples_per_s": "5.1"}
    words = ("no", "group_by_length", "padded, group by length", "dynamic padding, grouped by length")
    each = [judge(read(**cells, packed=word), lambda _: load_priors()) for word in words]
    assert each[1].speed is not None
    assert {other.speed and other.speed.predicted for other in each[2:]} == {each[1].speed.predicted}
    (told,) = tunecast.estimate(
        "meta-llama/Llama-3.1-8B", **{**SAME, "per_device_train_batch_size": 8, "group_by_length": True}
    )
    assert each[0].prediction is not None
    assert each[1].prediction is not None
    assert each[1].prediction.step.step_time_s.value < 0.8 * each[0].prediction.step.step_time_s.value
    assert each[1].prediction.tokens_per_s.value == pytest.approx(told.tokens_per_s.value, rel=0.005)


@pytest.mark.parametrize(
    ("cells", "same"),
    [
        ({}, {}),
        ({"mean_tokens": "1500", "gpus": "8", "parallelism": "zero3"}, {"mean_tokens": 1500, "num_gpus": 8}),
        ({"mean_tokens": "1500", "seq_len": "2048"}, {"mean_tokens": 1500, "max_length": 2048}),  # rounded below it
        ({"mean_tokens": "1", "samples_per_s": "800"}, {"mean_tokens": 1}),
        ({"packed": "padding-free, grouped by length", "gpus": "4", "parallelism": "ddp"}, {"num_gpus": 4}),
        ({"micro_batch": "1", "seq_len": "600"}, {"per_device_train_batch_size": 1, "max_length": 600}),
    ],
)
def test_samples_that_lie_end_to_end_are_forecast_as_an_estimate_does(
    cells: dict[str, str], same: dict[str, Any]
) -> None:
    peak = {"peak_mem_gib": "40", "reserved_or_allocated": "allocated"}
    judged = judge(read(**{**FLAT, **peak, **cells}), lambda _: load_priors())
    assert judged.prediction is not None
    asked = {**SAME, "padding_free": True, "attn_implementation": "flash_attention_2", "num_samples": None, **same}
    asked |= {"sharding": cells["parallelism"]} if "parallelism" in cells else {}
    asked |= {"group_by_length": True} if "grouped" in cells.get("packed", "") else {}
    (told,) = tunecast.estimate("meta-llama/Llama-3.1-8B", **asked)
    assert judged.prediction.step.step_time_s.value == pytest.approx(told.step_time_s.value, rel=0.005)
    assert judged.prediction.step.step_time_s.high == pytest.approx(told.step_time_s.high, rel=0.01)
    assert judged.prediction.tokens_per_s.value == pytest.approx(told.tokens_per_s.value, rel=0.005)
    assert judged.prediction.memory.allocated_bytes.value == pytest.approx(told.memory.allocated_bytes.value, rel=1e-6)


@pytest.mark.parametrize(
    "speed",
    [
        {"tokens_per_s": "3060"},
        {"step_time_s": str(16 / 5.1)},
        {"total_time_h": "1", "total_tokens_or_steps": "11.016M tokens"},
    ],
)
def test_without_padding_tokens_and_samples_say_the_same(speed: dict[str, str]) -> None:
    by_samples, other = read(**FLAT), read(**{**FLAT, "samples_per_s": "", **speed})
    assert by_samples.run is not None
    assert other.run is not None, other.reason
    assert other.run.tokens_per_s == pytest.approx(by_samples.run.tokens_per_s)
    assert by_samples.run.tokens_per_s == pytest.approx(5.1 * 600)


def test_software_that_lays_samples_end_to_end_unless_told_is_read_so() -> None:
    """Unsloth since 2025.12.5; a cell that says that samples are padded is told."""
    uneven = {
        packed: getattr(read(packed=packed, framework=framework).run, "run", None)
        for packed, framework in (
            ("no", "Unsloth 2026.3.4"),
            ("no ", "Unsloth 2025.9.1"),
            ("no, padded to the longest of the batch", "Unsloth 2026.3.4"),
        )
    }
    laid, *padded = uneven.values()
    assert laid is not None
    assert laid.samples_unevenness is not None
    assert [run is not None and run.samples_unevenness for run in padded] == [None, None]


def test_a_mean_tells_how_far_attention_reaches_in_packed_rows_that_keep_samples_apart() -> None:
    cells = {"framework": "ms-swift 3.0", "kind": "sft", "attention_impl": "flash_attention_2", "packed": "yes"}
    spans = {}
    for mean in ("", "600", "4096"):
        run = read(**cells, mean_tokens=mean, samples_per_s="", tokens_per_s="6000").run
        assert run is not None
        spans[mean] = run.run.attention_length
    (told,) = tunecast.estimate(
        "meta-llama/Llama-3.1-8B",
        **{**SAME, "packing": True, "padding_free": True, "attn_implementation": "flash_attention_2"},
    )
    assert spans == {"": 2048, "600": told.run.attention_length, "4096": 4096}
