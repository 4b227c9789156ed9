"""The committed validation pages say what their JSON says, and the JSON's summaries follow from its rows."""

from __future__ import annotations

import csv
import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunecast.model.priors import load_priors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "validation"
WORST = 20


def loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.fixture
def page_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[dict[str, Any]], str]]:
    """Each page's function, from the scripts that write them."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    modules = {"time": "validation_pages", "memory": "validation_memory_page"}
    return lambda name: getattr(importlib.import_module(modules[name]), f"{name}_page")


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    path = ROOT / "results" / "published" / "published-runs.csv"
    with path.open(encoding="utf-8", newline="") as handle:
        return {row["id"]: row for row in csv.DictReader(handle)}


@pytest.mark.parametrize("name", ["time", "memory"])
def test_a_page_is_made_from_its_json(page_of: Callable[[str], Callable[[dict[str, Any]], str]], name: str) -> None:
    page = page_of(name)(loaded(name))
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == page


def test_a_run_that_is_split_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    pages = importlib.import_module("validation_pages")
    row = {"model": "a/b", "method": "full", "batch": 1, "length": 2048, "num_gpus": 64, "sharding": "none"}
    assert pages.run_text({**row, "degrees": ["tp8", "pp8"]}) == "b full 1 x 2048, 64 x tp8 pp8"
    assert pages.run_text({**row, "sharding": "fsdp"}) == "b full 1 x 2048, 64 x fsdp"


def test_auxiliary_rows_are_no_row_of_the_fit_and_of_no_figure(table: dict[str, dict[str, str]]) -> None:
    content = loaded("time")
    checked = {row["id"] for row in content["auxiliary"]["rows"]}
    assert checked
    assert {table[row_id]["set"] for row_id in checked} == {"auxiliary"}
    assert not checked & ({row["id"] for row in content["rows"]} | set(load_priors()["rows_used"]))


@pytest.mark.parametrize("name", ["time", "memory"])
def test_summaries_follow_from_the_rows(name: str) -> None:
    content = loaded(name)
    rows, summary = content["rows"], content["summary"]
    errors = [row["value"] / row["measured"] - 1 for row in rows]
    assert [row["error"] for row in rows] == pytest.approx(errors)
    assert summary["n"] == len(rows)
    assert summary["median_abs_error"] == pytest.approx(statistics.median(map(abs, errors)))
    assert summary["bias"] == pytest.approx(sum(errors) / len(errors))
    inside = [row["low"] <= row["measured"] <= row["high"] for row in rows]
    assert summary["coverage"] == pytest.approx(sum(inside) / len(inside))
    by_source: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        by_source.setdefault(row["id"].split("-")[0], []).append(abs(error))
    medians = [statistics.median(found) for found in by_source.values()]
    assert summary["median_of_sources"] == pytest.approx(statistics.median(medians))


def test_measured_values_are_the_tables(table: dict[str, dict[str, str]]) -> None:
    for row in loaded("time")["rows"]:
        assert row["measured"] == pytest.approx(float(table[row["id"]]["tokens_per_s"]))
    for row in loaded("memory")["rows"]:
        assert row["measured"] == pytest.approx(float(table[row["id"]]["peak_mem_gib"]))
        assert table[row["id"]]["reserved_or_allocated"].startswith(("allocated", "reserved"))


@pytest.mark.parametrize("name", ["time", "memory"])
def test_only_training_rows_that_are_not_low_are_scored_and_no_row_is_lost(
    name: str, table: dict[str, dict[str, str]]
) -> None:
    content = loaded(name)
    scored = [row["id"] for row in content["rows"]]
    skipped = [row_id for ids in content["skipped"].values() for row_id in ids]
    assert sorted([*scored, *skipped]) == sorted(table)
    assert {table[row_id]["set"] for row_id in scored} == {"training"}
    assert "low" not in {table[row_id]["confidence"] for row_id in scored}


@pytest.mark.parametrize("name", ["time", "memory"])
def test_the_worst_rows_are_explained(name: str) -> None:
    rows = sorted(loaded(name)["rows"], key=lambda row: -abs(row["error"]))
    assert [row["id"] for row in rows[:WORST] if not row["why"]] == []


def test_the_classic_estimate_by_hand() -> None:
    """FM-001: 0.35 of an A100's 312 TFLOP/s over 6 x 7.24B parameters is 2,513 tokens/s."""
    (row,) = [row for row in loaded("time")["rows"] if row["id"] == "FM-001"]
    assert row["classic"]["value"] == pytest.approx(0.35 * 312e12 / (6 * 7.241732096e9), rel=1e-6)


def test_pages_explain_a_verdict_and_a_peak_of_one_row_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--pages`` takes the sentence of a row's own kind, whatever is said of it elsewhere."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("validate_published")
    rows = {kind: [{"rows": ["Z-1"], "why": f"of {kind}"}] for kind in ("time", "memory", "verdict")}
    content = {"rows": [{"id": "Z-1", "why": ""}], "called_wrong": [{"id": "Z-1", "why": ""}]}
    (tmp_path / "explanations.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "memory.json").write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(script, "OUT", tmp_path)
    (found,) = script.written(["memory"]).values()
    assert (found["rows"][0]["why"], found["called_wrong"][0]["why"]) == ("of memory", "of verdict")
