"""What allocators and contexts hold beyond tensors: quantiles of what runs state, every source weighing the same."""

from __future__ import annotations

import math
import statistics
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
    replayed_bounds,
    tensors,
)
from tunecast.calibrate.priors_problem import beliefs
from tunecast.calibrate.priors_records import RecordRuns, shipped_records
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.model.memory_codes import COMPARED, OTHER
from tunecast.model.units import GIB, MIB
from tunecast.model.value import Z80

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
T4_THREADS = 40 * 1024
CONTEXT = {"values_mib": {"a100-sxm4-80gb": 432, "rtx-4090-24gb": 768}, "few_log_sd": 0.3}
"""2 and 4 KiB for each of 108 x 2,048 and 128 x 1,536 threads."""
KNOWN = {"traced": ["hf-peft one GPU"], "same": {}}


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    names = ("FM-025", "FM-049", "FT-001", "FT-010")
    return read_runs(row for row in read_table(TABLE) if row["id"] in names)[0]


def counters(**more: float) -> Counters:
    given = {"allocated_bytes": 1000.0, "reserved_bytes": 1030.0, "process_bytes": 1500.0, "transient_bytes": 100.0}
    return Counters(source="S", threads=10, **{**given, **more})  # type: ignore[arg-type]


def test_fragmentation_is_what_is_reserved_beyond_tensors_over_the_transient() -> None:
    assert counters().fragmentation(40) == pytest.approx(0.3)
    assert counters(reserved_bytes=None).fragmentation(46) == pytest.approx(0.4), "46 bytes for each of ten threads"
    assert counters(reserved_bytes=990.0).fragmentation(0) == 0


def test_a_source_of_many_rows_weighs_as_much_as_one_of_few() -> None:
    """Ninety-nine ones and a single three of another source: the upper tenth is the three's."""
    assert quantiles({"many": [1.0] * 99, "one": [3.0]})[2] == 3.0
    assert quantiles({"all": [1.0] * 99 + [3.0]})[2] == 1.0
    assert quantiles({"same": [2.0, 2.0]}) == (2.0, 2.0, 2.0)


def test_terms_of_runs_that_state_their_counters(runs: list[PublishedRun]) -> None:
    """By hand: FT's notes say 141 MiB beyond reserved on a T4, 3.525 KiB for each of 40 x 1,024 threads: between the 2
    and 4 that are cited."""
    assert {row.source for row in counted_runs(runs)} == {"FM", "FT"}
    terms = memory_overheads(runs, CONTEXT)
    assert terms["context_per_thread"] == pytest.approx(141 * MIB / T4_THREADS, rel=0.01)
    assert (terms["context_per_thread_low"], terms["context_per_thread_high"]) == (2 * 1024, 4 * 1024)
    shares = sorted(row.fragmentation(terms["context_per_thread"]) for row in counted_runs(runs))
    assert shares[0] <= terms["fragmentation_frac_low"] < terms["fragmentation_frac"] < terms["fragmentation_frac_high"]
    assert terms["fragmentation_frac_high"] <= shares[-1]


def test_the_context_of_a_t4_is_told_by_larger_cards(counted: dict[str, list[PublishedRun]]) -> None:
    """22 runs state 141 MiB; bytes alone would say more than twice as much, as the cards of the others hold more."""
    terms = memory_overheads(counted["FM"], beliefs()["context"], shipped_records()[0])
    own = [row.process_bytes - row.reserved_bytes for row in counted_runs(counted["FT"]) if row.reserved_bytes]
    told = terms["context_per_thread"] * T4_THREADS
    assert len(own) == 22
    assert told == pytest.approx(statistics.median(own), rel=0.25)
    cited_bytes = beliefs()["context"]["values_mib"]["rtx-6000-ada-48gb"] * MIB
    assert cited_bytes > 2.0 * statistics.median(own)


def test_one_context_alone_says_nothing_of_how_contexts_differ() -> None:
    """FM's runs state none and one is cited: 2 KiB, give or take what is assumed."""
    found = memory_overheads(read("FM-025"), {"values_mib": {"a100-sxm4-80gb": 432}, "few_log_sd": 0.3})
    ends = [found[f"context_per_thread{end}"] for end in ("_low", "", "_high")]
    assert ends == pytest.approx([2048 / math.exp(Z80 * 0.3), 2048, 2048 * math.exp(Z80 * 0.3)])


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


def test_what_is_reserved_beyond_a_replay_stands_beside_what_is_reserved_beyond_tensors() -> None:
    assert counters(replayed_bytes=1010).replay(40) == [(pytest.approx(0.2), pytest.approx(0.3))]
    assert counters().replay(40) == []


def test_a_replay_has_the_bounds_of_the_source_that_follows_it_least() -> None:
    """One is exact, the other up to 0.4 over it: half of all figures, weighed by source, are at 0."""
    wide = [(value, 0.3 + value) for value in (-0.1, 0.0, 0.1, 0.2, 0.4)]
    found = replayed_bounds({"exact": [(0.0, share) for share in (0.1, 0.9)], "wide": wide})
    (low, _, high) = quantiles({"wide": [value for value, _ in wide]})
    assert found == {"replayed_frac_low": low, "replayed_frac": pytest.approx(0.0), "replayed_frac_high": high}
    assert (low, high) == (-0.1, 0.4)


def test_no_replay_where_a_share_tells_as_well() -> None:
    assert replayed_bounds({}) == {}
    assert replayed_bounds({"shared": [(0.1, 0.3), (0.2, 0.3), (0.5, 0.3)]}) == {}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[PublishedRun]]:
    """Every published run that states its counters, by source."""
    rows = [row for row in read_table(TABLE) if row["id"].startswith(("FM-", "FT-"))]
    found: dict[str, list[PublishedRun]] = {}
    for run in read_runs(rows)[0]:
        found.setdefault(run.source, []).extend([run] if counted_runs([run]) else [])
    return found


def reserved_errors(terms: dict[str, float], counted: list[Counters], *, replay: bool) -> list[float]:
    """|forecast / stated - 1| of the reserved bytes of runs that state them."""
    found = []
    for row in counted:
        assert row.reserved_bytes is not None
        assert row.replayed_bytes is not None
        own = terms["replayed_frac"] if replay else terms["fragmentation_frac"]
        base = row.replayed_bytes if replay else row.allocated_bytes
        found.append(abs((base + own * row.transient_bytes) / row.reserved_bytes - 1.0))
    return found


def test_a_replay_tells_a_source_that_no_term_was_fitted_to_better_than_a_share(
    counted: dict[str, list[PublishedRun]],
) -> None:
    """Reserved bytes of 22 runs on a T4 by terms of runs on an A100 and of records of two cards, although the share is
    given the tensors that were measured."""
    terms = memory_overheads(counted["FM"], CONTEXT, shipped_records()[0])
    rows = counted_runs(counted["FT"])
    by_replay, by_share = (reserved_errors(terms, rows, replay=replay) for replay in (True, False))
    assert len(rows) == 22
    assert statistics.median(by_replay) < 0.02 < statistics.median(by_share)
    assert statistics.mean(by_replay) < statistics.mean(by_share)


def test_bounds_of_replays_hold_the_runs_of_a_source_left_out(counted: dict[str, list[PublishedRun]]) -> None:
    """Eight in ten, each source weighing the same: two of published runs and the records of three machines."""
    records, inside = shipped_records()[0], {}
    runs = [run for own in counted.values() for run in own]
    own = {name: [pair for row in counted_runs(counted[name]) for pair in row.replay(2900.0)] for name in counted}
    for left_out, pairs in {**own, **{record.name: record.replays for record in records if record.replays}}.items():
        elsewhere = [record for record in records if record.name != left_out]
        terms = memory_overheads([run for run in runs if run.source != left_out], beliefs()["context"], elsewhere)
        low, high = terms["replayed_frac_low"], terms["replayed_frac_high"]
        inside[left_out] = statistics.mean(low <= beyond <= high for beyond, _ in pairs)
    assert len(inside) == 5
    assert 0.8 <= statistics.mean(inside.values()) <= 1.0
    assert min(inside.values()) > 0.55


def test_a_record_is_one_source_of_replays() -> None:
    """A card that follows them to the segment, and published runs, which do not: the middle moves, the bounds stay."""
    runs = read("FM-025", "FM-053", "FM-061", "FM-109", "FM-117")
    exact = RecordRuns(
        name="mine",
        runs=(),
        waiting=frozenset(),
        waiting_log_sd=0.0,
        contexts_bytes=(),
        replays=((0.0, 0.2), (0.0, 0.9), (0.0, 0.5)),
    )
    context = {"values_mib": {"a100-sxm4-80gb": 430}, "few_log_sd": 0.3}
    without, found = memory_overheads(runs, context), memory_overheads(runs, context, [exact])
    assert 0.0 <= found["replayed_frac"] < without["replayed_frac"]
    assert found["replayed_frac_high"] == without["replayed_frac_high"]
    assert found["fragmentation_frac"] == without["fragmentation_frac"]
