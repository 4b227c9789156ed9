"""Rows of the committed table mean the same by pieces as by whole cells; auxiliary rows are read, or truly not."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from tunecast.calibrate import vocabulary
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.row_cells import VOCABULARY_COLUMNS
from tunecast.calibrate.run_table import SkipRowError, read_table

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
EXACT_ALONE = {
    "compute_dtype": ("fp8 (Transformer Engine)", "bf16 autocast, fp32 master weights"),
    "parallelism": ("fsdp2 dp32 x tp1 x cp2",),
}
"""Cells that mean more than their pieces: Megatron's casts once a step; accumulation without no_sync."""
WHY_AUXILIARY_ROWS_ARE_SKIPPED = {
    "MX": ("padded samples of unknown length",),
    "NG": ("grad_checkpointing",),
    "NC": ("'muon': this optimizer is not built",),
    "GA": ("Gaudi accelerators are not built",),
    "PD": ("padded samples of unknown length",),
    "OT": ("does not state whether samples are packed",),
    "UL": (
        "does not say which of rtx-pro-6000-blackwell-ws-96gb",
        "transformers has no sdpa attention for gemma2",
        "'model-specific file' is not in the vocabulary",
    ),
}
"""By the id's prefix, what those rows do not state or ask for; each is in the table for anyone to see."""
READ_OF_AUXILIARY = {"SU": 35, "UL": 10, "OT": 2}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return read_table(TABLE)


@pytest.fixture(scope="module")
def runs(rows: list[dict[str, str]]) -> dict[str, PublishedRun]:
    return {run.id: run for run in read_runs(rows)[0]}


def by_pieces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = vocabulary.vocabulary()
    empty = {column: {text: says for text, says in known[column].items() if not text} for column in VOCABULARY_COLUMNS}
    monkeypatch.setattr(vocabulary, "vocabulary", lambda: {**known, **empty})


def test_rows_mean_the_same_by_pieces_where_all_of_them_are_known(
    rows: list[dict[str, str]], runs: dict[str, PublishedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pieces_alone(monkeypatch)
    plain = [
        row
        for row in rows
        if row["id"] in runs and not any(row[column] in texts for column, texts in EXACT_ALONE.items())
    ]
    again = {run.id: run for run in read_runs(plain)[0] if run.id in runs}
    training = {row["id"] for row in rows if row["set"] == "training"}
    for row_id, run in again.items():
        different = {f.name for f in fields(run) if f.compare and getattr(run, f.name) != getattr(runs[row_id], f.name)}
        assert not different, (row_id, {name: getattr(run, name) for name in different})
    assert len(training & again.keys()) > 250


def test_training_rows_need_no_pieces(
    rows: list[dict[str, str]], runs: dict[str, PublishedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fit uses is read by entries for whole cells and values of options: no new wording can change it."""

    def refuse(column: str, text: str, gpus: int = 1) -> None:
        raise SkipRowError(f"{column} {text!r} was read in pieces")

    monkeypatch.setattr(vocabulary, "in_pieces", refuse)
    training = [row for row in rows if row["set"] == "training"]
    again = {run.id: run for run in read_runs(training)[0]}
    assert again == {row["id"]: runs[row["id"]] for row in training if row["id"] in runs}
    assert len(again) > 400


def test_an_unknown_word_in_any_cell_skips_the_row_and_is_named(
    rows: list[dict[str, str]], runs: dict[str, PublishedRun]
) -> None:
    chosen = [row for row in rows if row["id"] in runs][::40]
    for row in chosen:
        for column in VOCABULARY_COLUMNS:
            if not row[column]:
                continue
            _, (skipped,) = read_runs([{**row, column: f"{row[column]} (zorblax)"}])
            assert "zorblax" in skipped.reason, (row["id"], column)
            assert column in skipped.reason, (row["id"], column)


def test_auxiliary_rows_are_read_or_skipped_for_what_is_so(
    rows: list[dict[str, str]], runs: dict[str, PublishedRun]
) -> None:
    chosen = [row for row in rows if row["set"] == "auxiliary" and row["confidence"] in ("medium", "high")]
    read, skipped = read_runs(chosen)
    assert Counter(run.source for run in read) == READ_OF_AUXILIARY
    for skip in skipped:
        reasons = WHY_AUXILIARY_ROWS_ARE_SKIPPED[skip.id.split("-")[0]]
        assert any(told in skip.reason for told in reasons), (skip.id, skip.reason)


def test_what_the_reasons_say_is_in_the_table(rows: list[dict[str, str]]) -> None:
    """The facts behind the reasons above, read from the cells themselves."""
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["set"] == "auxiliary" and row["confidence"] != "low":
            groups.setdefault(row["id"].split("-")[0], []).append(row)
    assert all("padded to longest" in row["packed"] for name in ("MX", "PD") for row in groups[name])
    assert all(not row["grad_checkpointing"] and not row["micro_batch"] for row in groups["NG"])
    assert all("Muon" in row["optimizer"] for row in groups["NC"])
    assert all(row["gpu"] == "Gaudi2" for row in groups["GA"])
    assert Counter(row["packed"] for row in groups["OT"])["unknown"] == 4


def test_what_unsloths_competitor_measured_is_read_as_unsloths_code(runs: dict[str, PublishedRun]) -> None:
    """Quantized, offloaded, fused and 8-bit: all by the cells or by the stack of the time; nothing of the forecast."""
    run = runs["SU-001"].run
    assert (runs["SU-001"].stack, run.stack) == ("unsloth", "unsloth")
    assert (run.method, run.bnb_4bit_quant_type) == ("qlora", "nf4")
    assert (run.optim, run.activation_offloading, run.torch_compile) == ("adamw_8bit", True, False)
    assert run.fused_kernels == ("rms_norm", "rope", "swiglu", "lora")
    assert runs["UL-002"].run.keeps_outputs
    assert runs["OT-025"].run.loss_type == "cut_cross_entropy"
