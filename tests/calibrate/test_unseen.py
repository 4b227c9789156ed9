"""Runs that judge: nothing is fitted to them, and their page says what is forecast of them today."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import judge_all, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.model.priors import load_priors

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"


def column(name: str, table: str) -> set[str]:
    with (PUBLISHED / table).open(encoding="utf-8", newline="") as handle:
        return {row[name] for row in csv.DictReader(handle)}


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "results" / "validation" / "unseen.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", ["id", "source"])
def test_no_row_and_no_source_is_in_the_fitted_table(name: str) -> None:
    assert not column(name, "unseen-runs.csv") & column(name, "published-runs.csv")


def test_no_row_is_among_those_that_the_priors_used() -> None:
    assert not column("id", "unseen-runs.csv") & set(load_priors()["rows_used"])


@pytest.mark.parametrize("third", some_for_ci(range(3), 3))
def test_the_page_is_of_the_forecasts_of_today(stored: dict[str, Any], third: int) -> None:
    judged = judge_all(read_entries(read_table(PUBLISHED / "unseen-runs.csv")[third::3]), shipped)
    asked = {item.entry.id for item in judged}
    for half, rows in (("speed", stored["rows"]), ("memory", [*stored["memory"]["rows"], *stored["process"]["rows"]])):
        compared = {item.entry.id: getattr(item, half) for item in judged}
        now = {name: found.error for name, found in compared.items() if found is not None}
        assert {row["id"]: row["error"] for row in rows if row["id"] in asked} == pytest.approx(now, abs=0.002)
        assert now


def test_its_summary_follows_from_its_rows(stored: dict[str, Any]) -> None:
    rows, page = stored["rows"], (ROOT / "results" / "validation" / "unseen.md").read_text(encoding="utf-8")
    for half in (stored, stored["memory"], stored["process"]):
        inside = [row["low"] <= row["measured"] <= row["high"] for row in half["rows"]]
        errors = [abs(row["error"]) for row in half["rows"]]
        assert half["summary"]["coverage"] == pytest.approx(statistics.fmean(inside))
        assert half["summary"]["median_abs_error"] == pytest.approx(statistics.median(errors))
    assert f"**{len(rows)} of " in page
    assert all(f"| {row['id']} |" in page for row in rows)
