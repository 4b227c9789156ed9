"""Scoring of published runs against hand-computed tables: what is compared, what is not, and the statistics."""

from __future__ import annotations

import importlib
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.calibrate.priors_memory import memory_overheads
from tunecast.calibrate.priors_problem import beliefs
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import Compared, Entry, Judged, Prediction, judge, predict, read_entries
from tunecast.calibrate.validate_folds import (
    gpu_of,
    honest_priors,
    leave_out,
    shipped,
    source_of,
)
from tunecast.calibrate.validate_summary import (
    GROUPS,
    by_group,
    ids_by_reason,
    median_of_sources,
    memories,
    speeds,
    stats_of,
    validation_to_dict,
    verdict_shares,
)
from tunecast.model.inventory import step_operations
from tunecast.model.on_device import job_factors
from tunecast.model.priors import load_priors
from tunecast.model.target import resolve_targets
from tunecast.model.time import step_time
from tunecast.model.timing import linked
from tunecast.model.units import GIB
from tunecast.model.value import Z80, Value
from tunecast.validation_table import half_reasons, sample_lines

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in read_table(TABLE)}


def compared(measured: float, predicted: float, low: float, high: float) -> Compared:
    return Compared(measured=measured, predicted=Value(value=predicted, low=low, high=high))


FOUR = [
    compared(100, 110, 95, 130),  # +10%, inside, half-width 17.5 / 110
    compared(100, 80, 70, 90),  # -20%, outside, half-width 10 / 80
    compared(100, 105, 100, 110),  # +5%, inside (the end counts), half-width 5 / 105
    compared(200, 280, 250, 300),  # +40%, outside, half-width 25 / 280
]


def test_error_is_predicted_over_measured_less_one() -> None:
    assert [item.error for item in FOUR] == pytest.approx([0.10, -0.20, 0.05, 0.40])
    assert [item.inside for item in FOUR] == [True, False, True, False]


def test_statistics_of_four_rows_by_hand() -> None:
    found = stats_of(FOUR)
    assert found.n == 4
    assert found.median_abs_error == pytest.approx(0.15)  # between 0.10 and 0.20
    assert found.p90_abs_error == pytest.approx(0.34)  # 0.20 + 0.7 x (0.40 - 0.20)
    assert found.bias == pytest.approx(0.0875)
    assert found.coverage == 0.5
    assert found.median_half_width == pytest.approx((10 / 80 + 25 / 280) / 2)


def test_nothing_scored_is_unknown_not_zero() -> None:
    assert stats_of([]).as_dict() == {
        "n": 0,
        "median_abs_error": None,
        "p90_abs_error": None,
        "bias": None,
        "coverage": None,
    }


def judged(rows: dict[str, dict[str, str]], row_id: str, item: Compared | None, source: str, **more: Any) -> Judged:
    """A judged row with a comparison made by hand."""
    (entry,) = read_entries([rows[row_id]])
    assert entry.run is not None
    return Judged(entry=replace(entry, run=replace(entry.run, source=source)), speed=item, **more)


def test_groups_and_the_median_of_sources(rows: dict[str, dict[str, str]]) -> None:
    """Three rows of one source at 10, 20 and 5%, one of another at 40%: medians 10% and 40%, theirs 25%."""
    items = [judged(rows, "FM-025", item, "X") for item in FOUR[:3]] + [judged(rows, "VL-001", FOUR[3], "Y")]
    groups = by_group(items, GROUPS["source"], speeds)
    assert list(groups) == ["X", "Y"]
    assert [groups[name].n for name in groups] == [3, 1]
    assert median_of_sources(items, speeds) == pytest.approx(0.25)
    assert set(by_group(items, GROUPS["method"], speeds)) == {"lora", "full"}
    assert by_group(items, GROUPS["source"], memories) == {}


@pytest.mark.parametrize(
    ("gpus", "parallelism", "name"),
    [
        ("8", "TP=2, DP=4", "8 x tp2"),
        ("64", "TP=8, PP=8", "64 x tp8 pp8"),
        ("4", "CP=4", "4 x cp4"),
        ("16", "FSDP, TP=2", "16 x fsdp tp2"),
        ("8", "TP=2, distributed optimizer", "8 x zero1 tp2"),
        ("8", "DDP", "8 x ddp"),
        ("8", "ZeRO-3", "8 x zero3"),
        ("1", "single", "one GPU"),
    ],
)
def test_a_layout_is_named_with_every_degree(gpus: str, parallelism: str, name: str) -> None:
    cells = {"gpu": "H100 80GB SXM", "gpus": gpus, "parallelism": parallelism, "tokens_per_s": "9000"}
    row = {"id": "a", "model": "Llama 3.1 8B", "method": "full", "seq_len": "2048", "micro_batch": "1", **cells}
    (entry,) = read_entries([row])
    assert entry.run is not None, entry.reason
    assert GROUPS["parallelism"](entry.run) == name


def test_speed_and_memory_are_compared_like_with_like(rows: dict[str, dict[str, str]]) -> None:
    """FM states allocated, FT reserved, TT active bytes: the last is listed, never scored."""
    allocated, reserved, active = (judge(read_entries([rows[i]])[0], shipped) for i in ("FM-025", "FT-006", "TT-017"))
    assert allocated.speed is not None
    assert allocated.memory is not None
    assert allocated.prediction is not None
    assert allocated.speed.measured == pytest.approx(float(rows["FM-025"]["tokens_per_s"]))
    assert allocated.memory.measured == pytest.approx(float(rows["FM-025"]["peak_mem_gib"]) * GIB)
    assert allocated.memory.predicted == allocated.prediction.memory.allocated_bytes
    assert reserved.memory is not None
    assert reserved.prediction is not None
    assert reserved.memory.predicted == reserved.prediction.memory.reserved_bytes
    assert active.memory is None
    assert "neither allocated nor reserved" in str(active.reason)


def test_an_authors_own_loop_holds_what_its_code_says(rows: dict[str, dict[str, str]]) -> None:
    """Its peak is as unsure as that of code that was never compared; its speed is read as before, and no Trainer slows
    it."""
    texts = ("transformers + PEFT", "own training loop, transformers + PEFT")
    row = {**rows["FM-025"], "source_date": "2026-06"}
    entries = [read_entries([{**row, "framework": text}])[0] for text in texts]
    plain, own = (judge(entry, shipped) for entry in entries)
    assert plain.memory is not None
    assert own.memory is not None
    read = entries[1].run
    assert read is not None
    logits = 2 * read.run.tokens_per_micro_batch * read.architecture.vocab_size  # the result, in 16 bits
    assert own.memory.predicted.value - plain.memory.predicted.value == pytest.approx(logits, rel=0.02)
    spread = math.log(own.memory.predicted.high / own.memory.predicted.value) / Z80
    assert spread == pytest.approx(load_priors()["memory_overhead_bytes"]["other_code_log_sd"], rel=0.05)
    assert math.log(plain.memory.predicted.high / plain.memory.predicted.value) < 0.02
    assert own.speed is not None
    assert plain.speed is not None
    assert 1.0 < own.speed.predicted.value / plain.speed.predicted.value < 1.01


def test_low_confidence_is_never_scored_and_no_confidence_is(rows: dict[str, dict[str, str]]) -> None:
    row = rows["FM-025"]
    low = judge(read_entries([{**row, "confidence": "low"}])[0], shipped)
    assert (low.scored, low.reason) == (False, "low confidence")
    without = {name: value for name, value in row.items() if name != "confidence"}
    assert judge(read_entries([without])[0], shipped).scored


def test_auxiliary_rows_are_listed_only(rows: dict[str, dict[str, str]]) -> None:
    entry = read_entries([{**rows["FM-025"], "set": "auxiliary"}])[0]
    assert entry.run is None
    assert "auxiliary" in entry.reason


def test_samples_of_unknown_length_keep_their_memory(rows: dict[str, dict[str, str]]) -> None:
    item = judge(read_entries([{**rows["FM-025"], "packed": "no"}])[0], shipped)
    assert item.speed is None
    assert item.memory is not None
    assert str(item.reason).startswith("speed: packed 'no'")


def test_memory_at_a_length_that_may_be_a_mean_is_not_compared(rows: dict[str, dict[str, str]]) -> None:
    (entry,) = read_entries([{**rows["FM-025"], "packed": "no (1024 = mean length)"}])
    assert entry.run is None
    assert "not in the vocabulary" in entry.reason


def test_out_of_memory_rows_test_the_verdict_only(rows: dict[str, dict[str, str]]) -> None:
    """70B in 16 bits needs 130 GiB for its weights alone: on one 80 GB card the verdict must be no."""
    none = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gib"), "")
    row = {**rows["FM-025"], "model": "meta-llama/Llama-2-70b-hf", "params_b": "70", **none}
    stated = judge(read_entries([{**row, "notes": "OUT OF MEMORY on this card. " + row["notes"]}])[0], shipped)
    presumed = judge(read_entries([{**row, "notes": "OUT OF MEMORY (presumed): none. " + row["notes"]}])[0], shipped)
    assert (stated.entry.out_of_memory, presumed.entry.out_of_memory) == ("stated", "presumed")
    assert not stated.scored
    assert stated.prediction is not None
    assert stated.prediction.verdict == "no"
    ran = judge(read_entries([rows["FM-025"]])[0], shipped)
    assert verdict_shares([ran, stated, presumed]) == {"ran": (1, 1), "stated": (1, 1), "presumed": (1, 1)}


def test_stated_runs_of_72b_on_two_cards_by_a_device_map(rows: dict[str, dict[str, str]]) -> None:
    """ms-swift: ran with 512, 1,024 and 2,048 tokens, out of memory with 4,096 and 8,192."""
    ids = ("SW-026", "SW-027", "SW-009", "SW-028", "SW-029")
    judged = [judge(read_entries([rows[row_id]])[0], shipped) for row_id in ids]
    assert [item.entry.out_of_memory for item in judged] == ["", "", "", "stated", "stated"]
    assert not any(item.scored for item in judged)
    assert verdict_shares(judged) == {"ran": (3, 3), "stated": (2, 2), "presumed": (0, 0)}


def test_reasons_are_counted(rows: dict[str, dict[str, str]]) -> None:
    entries = read_entries([rows["TT-002"], {**rows["FM-025"], "optimizer": "Zorro"}, rows["FM-025"]])
    found = ids_by_reason(judge(entry, shipped) for entry in entries)
    counts = {reason: len(ids) for reason, ids in found.items()}
    assert counts == {"low confidence": 1, "optimizer 'Zorro' is not in the vocabulary": 1}


def test_reasons_of_several_sentences_are_told_whole(
    rows: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remedy stands behind a semicolon, and may name the other half; pages and tables keep them whole."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    skipped = importlib.import_module("validate_published").skipped
    unread = "packed 'maybe' is not in the vocabulary; write packed; memory: yes"
    half = "step_time_s '1' may be of a micro-batch; write tokens_per_s"
    (run,) = (entry.run for entry in read_entries([rows["FM-025"]]))
    items = [
        Judged(entry=Entry(id="Z-1", run=None, reason=unread), skipped=unread),
        Judged(entry=Entry(id="Z-2", run=run), memory=compared(1, 1, 1, 1), why_no_speed=half),
    ]
    assert skipped(items, speeds) == {unread: ["Z-1"], half: ["Z-2"]}
    assert skipped(items, memories) == {unread: ["Z-1"]}
    assert half_reasons(items) == {f"speed: {half}": ["Z-2"]}
    assert [item.reason for item in items] == [unread, f"speed: {half}"]


def test_json_has_the_documented_shape(rows: dict[str, dict[str, str]]) -> None:
    items = [judged(rows, "FM-025", FOUR[0], "X", memory=compared(2 * GIB, 3 * GIB, 1 * GIB, 4 * GIB))]
    items.append(Judged(entry=Entry(id="Z-1", run=None, reason="low confidence"), skipped="low confidence"))
    found = validation_to_dict(items)
    assert found["schema"] == "tunecast.validation/1"
    assert found["rows"][0]["speed"] == pytest.approx(
        {"measured": 100, "value": 110, "low": 95, "high": 130, "error": 0.1}
    )
    assert found["rows"][0]["memory"] == pytest.approx({"measured": 2, "value": 3, "low": 1, "high": 4, "error": 0.5})
    assert found["rows"][1] == {
        "id": "Z-1",
        "status": "skipped",
        "reason": "low confidence",
        "in_sample": False,
        "whole_time": False,
        "speed": None,
        "memory": None,
    }
    assert found["summary"]["verdicts"]["stated"] == {"right": 0, "of": 0}
    assert found["summary"]["memory"] == pytest.approx(
        {"n": 1, "median_abs_error": 0.5, "p90_abs_error": 0.5, "bias": 0.5, "coverage": 1.0}
    )


def test_rows_of_the_fit_are_labelled_and_counted(rows: dict[str, dict[str, str]]) -> None:
    items = [judged(rows, "FM-025", FOUR[0], "X", in_sample=True), judged(rows, "FM-026", FOUR[1], "X")]
    found = validation_to_dict(items)
    assert [row["in_sample"] for row in found["rows"]] == [True, False]
    assert (found["summary"]["in_sample_rows"], found["summary"]["left_out_rows"]) == (1, 0)
    assert validation_to_dict(items[1:], 1)["summary"]["left_out_rows"] == 1
    assert "fitted to 1 row;" in sample_lines(items, 0)[0]
    assert "own source left out" in sample_lines(items[1:], 1)[0]
    assert sample_lines(items[1:], 0) == []


def test_a_row_of_several_gpus_is_as_unsure_as_its_estimate(rows: dict[str, dict[str, str]]) -> None:
    """Links count in both intervals: four A10G over PCIe, by the run's own options and the shipped priors."""
    (entry,) = read_entries([rows["LH-012"]])
    assert entry.run is not None
    predicted = predict(entry.run, load_priors()).step.step_time_s
    architecture, run = entry.run.architecture, replace(entry.run.run, stack=entry.run.stack)
    factors = job_factors(resolve_targets([entry.run.gpu], {})[0], architecture, run)
    operations = step_operations(architecture, run)
    without = step_time(operations, factors, run=run)
    assert run.num_gpus == 4
    assert predicted == linked(without, operations, factors, run).step_time_s
    assert predicted.high > 1.01 * without.step_time_s.high


@pytest.fixture(scope="module")
def five(rows: dict[str, dict[str, str]]) -> list[PublishedRun]:
    entries = read_entries(rows[i] for i in ("FM-025", "FM-026", "VL-010", "FT-006", "FT-010", "NA-004"))
    return [entry.run for entry in entries if entry.run is not None]


@pytest.mark.parametrize("group_of", [source_of, gpu_of])
def test_a_fold_does_not_depend_on_what_it_leaves_out(five: list[PublishedRun], group_of: Any) -> None:
    """Halving the speed and memory of the rows left out changes nothing in the priors they are forecast with."""
    name = group_of(five[0])
    worse = [
        replace(run, tokens_per_s=run.tokens_per_s / 2, peak_bytes=run.peak_bytes and run.peak_bytes / 2)
        if group_of(run) == name and run.tokens_per_s
        else run
        for run in five
    ]
    told: list[str] = []
    leaving = leave_out(five, group_of, told.append)
    before, after = leaving(five[0]), leave_out(worse, group_of)(worse[0])
    assert leaving(five[0]) is before
    groups = len({group_of(run) for run in five})
    assert told == [f"refitting the priors without {name}, 1 of {groups}"], "told once, as it is fitted once"
    assert before == after
    assert not set(before["rows_used"]) & {run.id for run in five if group_of(run) == name}
    assert leave_out(five, group_of)(five[3])["efficiency"] != leave_out(worse, group_of)(five[3])["efficiency"]


def test_groups_that_are_left_out_beside_each_other_get_the_priors_of_each_alone(five: list[PublishedRun]) -> None:
    told: list[str] = []
    beside, alone = leave_out(five, gpu_of, told.append, all_at_once=True), leave_out(five, gpu_of)
    assert [beside(run) for run in five] == [alone(run) for run in five]
    groups = len({gpu_of(run) for run in five})
    assert len(told) == 1 + groups
    assert told[-1].endswith(f"{groups} of {groups} times")


def test_only_a_table_with_every_fitted_run_can_leave_sources_out(rows: dict[str, dict[str, str]]) -> None:
    some = read_entries([rows["FM-025"], rows["VL-001"]])
    honest = honest_priors(some)
    assert (honest.priors_of is shipped, honest.left_out) == (True, False)
    assert honest.in_sample == honest.fitted == {"FM-025", "VL-001"}
    others = read_entries([{**rows["FM-025"], "tokens_per_s": "1234"}, {**rows["VL-001"], "id": "FM-026"}])
    assert not honest_priors(others).fitted, "another measurement of that id is none that the fit has seen"
    every = read_entries(rows.values())
    honest = honest_priors(every)
    assert (honest.priors_of is not shipped, honest.left_out) == (True, True)
    assert not honest.in_sample
    shipped_priors = load_priors()
    assert honest.fitted == {*shipped_priors["rows_used"], *shipped_priors["memory_rows_used"]}
    assert len(shipped_priors["memory_rows_used"]) > 100


def test_memory_of_the_whole_table_is_forecast_without_its_own_source(rows: dict[str, dict[str, str]]) -> None:
    """A fold that left out all rows with counters would forecast memory as if it were exact."""
    entries = read_entries(rows.values())
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    memory = set(load_priors()["memory_rows_used"])
    sources = {run.source for run in runs if run.id in memory}
    assert len(sources) > 2
    for name in sources:
        others = [run for run in runs if run.source != name]
        found = memory_overheads(others, beliefs()["context"])
        assert found["allocated_log_sd"] > 0
        assert found["context_per_thread_high"] > found["context_per_thread_low"]


def test_predictions_with_the_shipped_priors_match_their_fit(rows: dict[str, dict[str, str]]) -> None:
    """The time model of forecasts and the one of the fit are the same: the fit's rows come out near what it saw. One
    in three of them is asked."""
    errors, asked = [], load_priors()["rows_used"][::3]
    for row_id in asked:
        item = judge(read_entries([rows[row_id]])[0], shipped)
        assert isinstance(item.prediction, Prediction)
        assert item.speed is not None
        errors.append(abs(item.speed.error))
    assert statistics.median(errors) < statistics.median(
        abs(load_priors()["left_out_log_errors"]["by_source"][row_id]) for row_id in asked
    )
