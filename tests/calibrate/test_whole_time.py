"""Rows that state their whole time and work alone, or a speed in FLOPs."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_rows import one

from tunecast.calibrate.priors_problem import timed_rows
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
ROW = {
    "id": "a-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "seq_len": "2048", "micro_batch": "2",
    "grad_accum": "4", "gpus": "2", "gpu_canonical_id": "a100-sxm4-80gb", "parallelism": "zero2", "packed": "yes",
}  # fmt: skip
TOKENS_PER_STEP = 2048 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("time", "amount", "tokens", "seconds"),
    [
        ("1.5", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1.5 h", "600 optimizer steps", 600 * TOKENS_PER_STEP, 5400),
        ("~90 min", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("5400 s", "0.6k steps", 600 * TOKENS_PER_STEP, 5400),
        ("1:30:00", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1h30m", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1h 30min", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1 hour and 30 minutes", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1h 29m 60s", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("90m", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("0d 1.5h", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1h30", "600 iterations", 600 * TOKENS_PER_STEP, 5400),
        ("5,400 s", "600 iters", 600 * TOKENS_PER_STEP, 5400),
        ("1,830 h", "600 opt steps", 600 * TOKENS_PER_STEP, 1830 * 3600),
        ("1.5", "600 updates", 600 * TOKENS_PER_STEP, 5400),
        ("1.5", "3 epochs (600 steps)", 600 * TOKENS_PER_STEP, 5400),
        ("1.5", "max_steps=600", 600 * TOKENS_PER_STEP, 5400),
        ("3 A100 hours", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("1.5", "10M tokens", 10e6, 5400),
        ("1,5", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("0 days 01:30:00", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("0 days 01:30:00.250000", "600 steps", 600 * TOKENS_PER_STEP, 5400.25),
        ("2 days 01:02:03", "600 steps", 600 * TOKENS_PER_STEP, 2 * 86400 + 3723),
        ("1 day, 1:02:03", "600 steps", 600 * TOKENS_PER_STEP, 86400 + 3723),
        ("1:30:00.5", "600 steps", 600 * TOKENS_PER_STEP, 5400.5),
        ("3 GPU-hours", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("~3 A100 GPU hours", "600 steps", 600 * TOKENS_PER_STEP, 5400),
        ("6k GPUh", "60B tokens", 60e9, 3000 * 3600),
        ("60000 days", "3T tokens", 3e12, 60000 * 86400),
        ("60000 days", "3 trillion tokens", 3e12, 60000 * 86400),
        ("1.5", "about 10 million tokens", 10e6, 5400),
        ("1.5", "10,000,000 tokens", 10e6, 5400),
        ("1.5", "600 steps (19,660,800 tokens)", 600 * TOKENS_PER_STEP, 5400),
        ("1.5", "600 steps, about 19.7M tokens", 19.7e6, 5400),
        ("1.5", "600 steps of 32,768 tokens", 600 * TOKENS_PER_STEP, 5400),
    ],
)
def test_a_whole_time_and_its_work_are_a_speed(time: str, amount: str, tokens: float, seconds: float) -> None:
    run = one({**ROW, "total_time_h": time, "total_tokens_or_steps": amount})
    assert run.tokens_per_s == pytest.approx(tokens / seconds)
    assert "whole wall time" in run.whole_time


@pytest.mark.parametrize(
    ("time", "amount", "why"),
    [
        ("1.5", "", "total_time_h '1.5' needs total_tokens_or_steps beside it: write 600 steps or 10M tokens"),
        ("1.5", "600", "total_tokens_or_steps '600' states neither tokens nor optimizer steps"),
        ("1.5", "5000 samples, 1 epoch", "states neither tokens nor optimizer steps"),
        ("1.5", "1000 micro-batches", "states neither tokens nor optimizer steps"),
        ("1.5", "3 epochs", "states neither tokens nor optimizer steps"),
        ("1.5", "max_steps=600 zebras", "states neither tokens nor optimizer steps"),
        ("1.5", "600 zebra steps", "states neither tokens nor optimizer steps"),
        ("1.5", "0 steps", "states neither tokens nor optimizer steps"),
        ("1.5", "0 tokens", "says nothing above 0"),
        ("1.5", "600 steps (1M tokens)", "contradicts the row, whose step is of 32,768 tokens"),
        ("1.5", "600 steps of 524288 tokens", "contradicts the row"),
        ("0", "600 steps", "total_time_h '0' is no time above 0: write 1.5 h"),
        ("long", "600 steps", "total_time_h 'long' is no time above 0"),
        ("1,500", "600 steps", "total_time_h '1,500' may be 1.500 or 1500 hours: write it without a comma"),
        ("~1,830", "600 steps", "total_time_h '~1,830' may be 1.830 or 1830 hours: write it without a comma"),
        ("1 day", "", "total_time_h '1 day' needs total_tokens_or_steps beside it"),
        ("0 days 00:00:00", "600 steps", "total_time_h '0 days 00:00:00' is no time above 0"),
        ("1 week 01:00:00", "600 steps", "total_time_h '1 week 01:00:00' is no time above 0"),
        ("30min 2h", "600 steps", "total_time_h '30min 2h' is no time above 0: write 1.5 h, 2h 30min, 90 min or 1:30"),
        ("3 H200 hours", "600 steps", "total_time_h '3 H200 hours' is no time above 0"),
        ("1h75", "600 steps", "total_time_h '1h75' is no time above 0"),
        ("1,830 zebras", "600 steps", "total_time_h '1,830 zebras' is no time above 0"),
        ("1:30", "600 steps", "total_time_h '1:30' is no time above 0"),
        ("0h 0m", "600 steps", "total_time_h '0h 0m' is no time above 0"),
        ("h", "600 steps", "total_time_h 'h' is no time above 0"),
    ],
)
def test_a_whole_time_that_says_no_speed_leaves_the_memory_and_says_why(time: str, amount: str, why: str) -> None:
    cells = {"peak_mem_gib": "40", "reserved_or_allocated": "allocated"}
    run = one({**ROW, **cells, "total_time_h": time, "total_tokens_or_steps": amount})
    assert (run.tokens_per_s, run.whole_time) == (None, "")
    assert why in run.why_no_speed
    assert run.peak_bytes == 40 * 2**30


def test_iterations_of_litgpt_are_micro_batches() -> None:
    cells = {"total_time_h": "1.5", "total_tokens_or_steps": "600 iterations", "framework": "LitGPT", "gpus": "1"}
    alike = {**ROW, **cells, "parallelism": "single", "rank": "8", "lora_targets": "all linear"}
    assert "which are micro-batches: write optimizer steps" in one(alike).why_no_speed
    assert one({**alike, "grad_accum": "1"}).tokens_per_s == pytest.approx(600 * 2048 * 2 / 5400)


def test_a_speed_that_is_stated_goes_before_the_whole_time() -> None:
    cells = {"total_time_h": "1.5", "total_tokens_or_steps": "600 steps"}
    run = one({**ROW, **cells, "tokens_per_s": "7000"})
    assert (run.tokens_per_s, run.whole_time) == (7000.0, "")
    assert one({**ROW, "total_time_h": "long", "step_time_s": "4"}).tokens_per_s == TOKENS_PER_STEP / 4


def test_a_whole_time_beyond_the_cards_is_refused() -> None:
    _, (skipped,) = read_runs([{**ROW, "total_time_h": "1 min", "total_tokens_or_steps": "10B tokens"}])
    assert skipped.reason.startswith("total_time_h '1 min': ")
    assert "would be an MFU of" in skipped.reason
    _, (skipped,) = read_runs([{**ROW, "total_time_h": "1000", "total_tokens_or_steps": "1 step"}])
    assert "check its unit" in skipped.reason


def test_a_run_that_ran_out_of_memory_has_no_speed_by_its_time() -> None:
    cells = {"total_time_h": "OOM", "total_tokens_or_steps": "600 steps"}
    (entry,) = read_entries([{**ROW, **cells}])
    assert entry.out_of_memory == "stated"
    (entry,) = read_entries([{**ROW, **cells, "total_time_h": "0.01", "notes": "OUT OF MEMORY at step 3"}])
    assert entry.out_of_memory == "stated"
    assert entry.run is not None
    assert entry.run.tokens_per_s is None


def test_padded_samples_of_unknown_length_have_no_speed() -> None:
    cells = {"packed": "no", "total_time_h": "1.5", "total_tokens_or_steps": "600 steps"}
    (entry,) = read_entries([{**ROW, **cells}])
    found = judge(entry, shipped)
    assert (found.speed, found.whole_time) == (None, "")
    assert "padded samples of unknown length" in found.why_no_speed


def test_nothing_is_fitted_to_a_whole_time() -> None:
    stated = one({**ROW, "tokens_per_s": "1820"})
    whole = one({**ROW, "id": "a-2", "total_time_h": "1.5", "total_tokens_or_steps": "300 steps"})
    assert [row.run.id for row in timed_rows([stated, whole])] == ["a-1"]


@pytest.mark.parametrize("table", ["published-runs.csv", "unseen-runs.csv"])
def test_no_row_of_the_collected_tables_is_measured_by_its_whole_time(table: str) -> None:
    """Their figures, and the fit, rest on speeds that are stated."""
    runs, _ = read_runs(read_table(PUBLISHED / table))
    assert runs
    assert [run.id for run in runs if run.whole_time] == []


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"tflops_per_gpu": "180"}, "tflops_per_gpu"),
        ({"mfu": "0.4", "tflops_per_gpu": ""}, "mfu"),
        ({"mfu": "0.4", "tflops_per_gpu": "180"}, "tflops_per_gpu and mfu"),
        ({"mfu": "0.4", "tokens_per_s": "7000"}, ""),
        ({"mfu": "n/a"}, ""),
    ],
)
def test_a_speed_in_flops_alone_is_none_and_is_named(cells: dict[str, str], named: str) -> None:
    run = one({**ROW, **cells})
    why = f"it is stated as {named} alone, whose count of FLOPs differs between sources"
    assert run.why_no_speed == (why if named else "")
