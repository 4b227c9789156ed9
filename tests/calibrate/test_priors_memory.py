"""What allocators and contexts hold beyond tensors: quantiles of what runs state, every source weighing the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.calibrate.priors_memory import Counters, counted_runs, memory_overheads, quantiles
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.model.units import MIB

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
CONTEXT = {"values_mib": [300, 500]}


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    names = ("FM-025", "FM-049", "FT-001", "FT-010")
    return read_runs(row for row in read_table(TABLE) if row["id"] in names)[0]


def counters(**more: float) -> Counters:
    given = {"allocated_bytes": 1000.0, "reserved_bytes": 1030.0, "process_bytes": 1500.0, "transient_bytes": 100.0}
    return Counters(source="S", **{**given, **more})  # type: ignore[arg-type]


def test_fragmentation_is_what_is_reserved_beyond_tensors_over_the_transient() -> None:
    assert counters().fragmentation(400) == pytest.approx(0.3)
    assert Counters(
        source="S", allocated_bytes=1000, reserved_bytes=None, process_bytes=1500, transient_bytes=100
    ).fragmentation(460) == pytest.approx(0.4)
    assert counters(reserved_bytes=990.0).fragmentation(0) == 0


def test_a_source_of_many_rows_weighs_as_much_as_one_of_few() -> None:
    """Ninety-nine ones and a single three of another source: the upper tenth is the three's."""
    assert quantiles({"many": [1.0] * 99, "one": [3.0]})[2] == 3.0
    assert quantiles({"all": [1.0] * 99 + [3.0]})[2] == 1.0
    assert quantiles({"same": [2.0, 2.0]}) == (2.0, 2.0, 2.0)


def test_terms_of_runs_that_state_their_counters(runs: list[PublishedRun]) -> None:
    """By hand: FT's notes say 141 MiB beyond reserved; with 300 and 500 cited the middle of the three is 300."""
    assert {row.source for row in counted_runs(runs)} == {"FM", "FT"}
    terms = memory_overheads(runs, CONTEXT)
    assert terms["context"] == pytest.approx(300 * MIB)
    assert terms["context_low"] == pytest.approx(141 * MIB, rel=0.01)
    shares = sorted(row.fragmentation(300 * MIB) for row in counted_runs(runs))
    assert shares[0] <= terms["fragmentation_frac_low"] < terms["fragmentation_frac"] < terms["fragmentation_frac_high"]
    assert terms["fragmentation_frac_high"] <= shares[-1]


def test_no_counters_no_terms(runs: list[PublishedRun]) -> None:
    assert memory_overheads([run for run in runs if run.source == "none"], CONTEXT) == {}
