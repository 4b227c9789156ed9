"""What allocators and contexts hold beyond tensors: quantiles of what runs state, every source weighing the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tunecast.calibrate.priors_memory import (
    Counters,
    counted_runs,
    memory_codes,
    memory_overheads,
    memory_priors,
    other_code_log_sd,
    quantiles,
    tensors,
)
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.model.memory_codes import COMPARED, OTHER
from tunecast.model.units import GIB, MIB
from tunecast.model.value import Z80

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
CONTEXT = {"values_mib": [300, 500]}
KNOWN = {"traced": ["hf-peft one GPU"], "same": {}}


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


def read(*names: str) -> list[PublishedRun]:
    return read_runs(row for row in read_table(TABLE) if row["id"] in names)[0]


def test_spread_of_code_without_peaks_of_allocated_memory() -> None:
    """One row of one such source (torchtune, which states active bytes: 23.1 GiB): its own error is the spread."""
    (row,) = read("TT-021")
    allocated, _ = tensors(row.architecture, row.run, row.gpu)
    found = other_code_log_sd([row], KNOWN, [], 0.33)
    assert found is not None
    assert found * Z80 == pytest.approx(abs(math.log(allocated / (23.1 * GIB))))
    assert other_code_log_sd([row], KNOWN, ["torchtune one GPU compiled"], 0.33) is None


def test_a_reserved_peak_is_compared_with_what_an_allocator_reserves() -> None:
    """TI-003 states 76.8 GiB reserved: tensors and a third of what the step adds."""
    (row,) = read("TI-003")
    allocated, resting = tensors(row.architecture, row.run, row.gpu)
    found = other_code_log_sd([row], KNOWN, [], 1 / 3)
    assert found is not None
    predicted = allocated + (allocated - resting) / 3
    assert found * Z80 == pytest.approx(abs(math.log(predicted / (76.8 * GIB))), rel=1e-3)


def test_traced_code_is_not_other_code(runs: list[PublishedRun]) -> None:
    """FT states reserved bytes of plain code on one GPU, which was traced: nothing of it is an unknown code's."""
    assert {run.counter.split()[0] for run in runs} >= {"allocated", "reserved"}
    assert other_code_log_sd(runs, KNOWN, [], 0.33) is None


def test_codes_are_those_of_rows_that_state_allocated_memory() -> None:
    """By the table: FM-025 on one card, FM-026 on two under FSDP; TI states reserved bytes, TT active ones."""
    found = memory_codes(read("FM-025", "FM-026", "TI-003", "TT-021"), {})
    assert found == ["hf-peft fsdp", "hf-peft one GPU"]


def test_the_spread_of_other_code_stays_outside_of_what_was_compared() -> None:
    priors = memory_priors(read("FM-025", "FT-001", "FT-010", "TT-021"), {"context": CONTEXT, "memory_codes": KNOWN})
    terms = priors["memory_overhead_bytes"]
    assert 0 < terms[COMPARED] < terms[OTHER]


def test_what_other_code_was_off_by_stays_when_some_of_it_is_modelled() -> None:
    """A row that is met nearly leaves the belief of code that nobody has modelled."""
    rows = read("FM-025", "FT-001", "FT-010", "TT-021")
    known = {**KNOWN, "unmodelled_log_sd": 0.154}
    own = memory_priors(rows, {"context": CONTEXT, "memory_codes": KNOWN})["memory_overhead_bytes"]
    found = memory_priors(rows, {"context": CONTEXT, "memory_codes": known})["memory_overhead_bytes"]
    assert own["other_code_log_sd"] < 0.154
    assert found["other_code_log_sd"] == 0.154
