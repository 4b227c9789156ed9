"""LitGPT's published peaks, which its code decides and nothing was fitted to; FSDP 1's flat gradients, really made."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from gloo_processes import started_and_ended

from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import judge, read_entries
from tunecast.model.memory import memory_timeline
from tunecast.model.priors import load_priors

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in read_table(TABLE) if row["id"].startswith(("LG-", "LH-"))}


def errors_of(rows: dict[str, dict[str, str]], prefix: str, gpus: str) -> list[float]:
    """Forecast over measured, less one, of every row with a peak."""
    chosen = [row for name, row in rows.items() if name.startswith(prefix) and (row["gpus"] == "1") == (gpus == "one")]
    stated = ({**row, "packed": "yes"} for row in chosen if row["peak_mem_gib"])
    runs, _ = read_runs(stated)
    assert all(run.stack == "litgpt" for run in runs)
    assert all(run.counter == "allocated" for run in runs)
    found = ((memory_timeline(run.architecture, run.run).allocated_bytes, run.peak_bytes) for run in runs)
    return [ours / theirs - 1.0 for ours, theirs in found if theirs is not None]


@pytest.mark.parametrize(
    ("prefix", "gpus", "count", "typical", "worst"),
    [("LG", "one", 17, 0.002, 0.004), ("LG", "several", 10, 0.025, 0.04), ("LH", "one", 31, 0.005, 0.03)],
)
def test_peaks(
    rows: dict[str, dict[str, str]], prefix: str, gpus: str, count: int, typical: float, worst: float
) -> None:
    """A100s with the longest sample first, by FSDP on two and four of them, and A10Gs with samples of up to 512."""
    errors = errors_of(rows, prefix, gpus)
    assert len(errors) == count
    assert median(abs(error) for error in errors) < typical
    assert max(abs(error) for error in errors) < worst


def test_every_run_that_is_stated_to_be_out_of_memory_is_told_so(rows: dict[str, dict[str, str]]) -> None:
    failed = [entry for entry in read_entries(rows.values()) if entry.out_of_memory == "stated"]
    priors = load_priors()
    verdicts = [judge(entry, lambda _: priors).prediction for entry in failed]
    assert len(verdicts) == 13
    assert [prediction and prediction.verdict for prediction in verdicts] == ["no"] * 13


def test_the_length_of_the_longest_sample_comes_from_the_notes(rows: dict[str, dict[str, str]]) -> None:
    assert rows["LG-011"]["seq_len"] == ""
    (found,), _ = read_runs([{**rows["LG-011"], "packed": "yes"}])
    assert "longest sample (1304 tokens)" in rows["LG-011"]["notes"]
    assert (found.run.max_length, found.tokens_per_s) == (1304, None)


@pytest.mark.slow
def test_a_gradient_for_every_weight_of_a_block_and_none_for_the_root(tmp_path: Path) -> None:
    """What `model.litgpt_sharding` counts: whole under ``no_sync``, frozen weights included."""
    pytest.importorskip("torch.distributed.fsdp")
    started_and_ended("flat_worker.py", tmp_path, 2)
    root, *blocks = json.loads((tmp_path / "flat.json").read_text())
    assert root == [8 * 64, 0]
    assert blocks == [[64 * 64 + 2 * 2 * 64] * 2] * 2
