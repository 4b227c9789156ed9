"""Records of calibrations in the priors: which are read, what of them, and what they move."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import tunecast
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan_tables import NARROW
from tunecast.calibrate.priors_fit import fit_priors, priors_of
from tunecast.calibrate.priors_memory import memory_overheads
from tunecast.calibrate.priors_problem import Row, Training, beliefs, rows_of_records, timed_rows
from tunecast.calibrate.priors_records import asks_cudnn_first, read_records, record_runs, shipped_records, why_not
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.record import read_record
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.runner import calibrate
from tunecast.calibrate.validate_folds import gpu_of, leave_out, source_of
from tunecast.catalogs.gpus import load_gpus
from tunecast.model import priors as priors_module
from tunecast.model.factors import FactorSet
from tunecast.model.priors import STEP_PARAMS, load_priors, prior_factors
from tunecast.model.run import Run
from tunecast.model.units import MIB

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "published" / "published-runs.csv"
CARD, OTHER = "a10-24gb", "mi300x-192gb"
"""A card of which no row is published, and one that shares neither generation nor maker with it."""
Record = dict[str, Any]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Of a mock, as if it had been measured on the card."""
    path = calibrate(open_mock(f"mock:{CARD}#11"), mode="quick", out_dir=tmp_path_factory.mktemp("records"))
    found = read_record(path)
    found["hardware"] |= {"device": "cuda:0", "gpu": CARD}
    found["flags"] = ["power_capped"]
    return found


def fitted_rows(*sources: str) -> list[dict[str, str]]:
    """Of the table those that the priors are fitted to, of these sources or of all."""
    used = set(load_priors()["rows_used"])
    fitted = [row for row in read_table(TABLE) if row["id"] in used]
    return [row for row in fitted if not sources or row["id"].split("-")[0] in sources]


@pytest.fixture(scope="module")
def training() -> Training:
    """Of all rows that the priors are fitted to."""
    runs, _ = read_runs(fitted_rows())
    return Training(table=TABLE.name, runs=runs, rows=timed_rows(runs), reasons={})


@pytest.fixture(scope="module")
def rows(training: Training) -> list[Row]:
    return training.rows


@pytest.fixture(scope="module")
def before(rows: list[Row]) -> Record:
    """Of the rows alone: the shipped priors have records among them."""
    return priors_of(rows)


@pytest.fixture(scope="module")
def after(rows: list[Row], record: Record) -> Record:
    return priors_of([*rows, *rows_of_records([record_runs(record, "mine", load_gpus()[CARD])])])


def factors(priors: Record, gpu: str, stack: str = "hf-peft") -> FactorSet:
    run = Run(method="lora", max_length=2048, stack=stack)
    return prior_factors(load_gpus()[gpu], run, {"memory_overhead_bytes": {}, **priors})


@pytest.mark.parametrize("place", [0, 1])
def test_steps_that_take_as_long_with_a_quarter_of_the_tokens_wait_for_their_host(place: int) -> None:
    """Of a real card in two machines that issue slowly: what tokens do not slow, its host bounds."""
    path = sorted((ROOT / "results" / "records").glob("h200-*.json"))[place]
    record = read_record(path)
    found = record_runs(record, "mine", load_gpus()["h200-sxm5-141gb"])
    waiting = {run_id.split("#")[1] for run_id in found.waiting}
    pairs: dict[str, dict[int, tuple[str, float]]] = {}
    for trial in record["trials"]:
        if trial["bench"] == "step":
            run = dict(trial["params"]["run"])
            length = run.pop("max_length")
            key = json.dumps([run, trial["params"]["architecture"]], sort_keys=True)
            pairs.setdefault(key, {})[length] = (str(trial["id"]), median(trial["samples_s"]))
    short = {pair[768][0] for pair in pairs.values() if {768, 3072} <= set(pair) and pair[3072][1] < 1.5 * pair[768][1]}
    assert len(short) > 8
    assert short <= waiting
    assert len(found.runs) - len(waiting) > 10


@pytest.mark.parametrize("card", ["h100-sxm5-80gb", CARD])
def test_narrow_steps_wait_for_their_host(record: Record, card: str) -> None:
    """On a real card and on a mock: they tell what issuing costs and nothing else."""
    measured = record
    if card != CARD:
        (path,) = (ROOT / "results" / "records").glob(f"{card}_*.json")
        measured = read_record(path)
    waiting = record_runs(measured, "mine", load_gpus()[card]).waiting
    steps = [trial for trial in measured["trials"] if trial["bench"] == "step"]
    narrow = {f"mine#{t['id']}" for t in steps if t["params"]["architecture"]["hidden_size"] == NARROW.hidden}
    assert len(narrow) >= 6
    assert narrow <= waiting


@pytest.mark.thorough
def test_a_slow_host_is_one_machines_and_moves_no_card(record: Record) -> None:
    """The same steps where all that wait for the host take twice as long."""
    few = timed_rows(read_runs(fitted_rows("TT", "VL", "NA"))[0])
    mine = record_runs(record, "mine", load_gpus()[CARD])
    slow = replace(
        mine,
        runs=tuple(
            replace(run, tokens_per_s=run.tokens_per_s / 2) if run.id in mine.waiting and run.tokens_per_s else run
            for run in mine.runs
        ),
    )
    was, now = (priors_of([*few, *rows_of_records([found])]) for found in (mine, slow))
    for name in ("gemm", "attention", "memory"):
        assert now["efficiency"][name]["value"] == pytest.approx(was["efficiency"][name]["value"], rel=0.03)
    assert now["device_effects"][CARD]["value"] == pytest.approx(was["device_effects"][CARD]["value"], abs=0.03)
    assert now["host_s_per_launch"]["value"] > 1.1 * was["host_s_per_launch"]["value"]


def test_records_of_one_kind_of_machine_are_one_host_and_one_source(record: Record) -> None:
    other = copy.deepcopy(record)
    other["hardware"]["host"] |= {"cores": 96}
    found = [
        record_runs(content, name, load_gpus()[CARD]) for content, name in ((record, "a"), (record, "b"), (other, "c"))
    ]
    hosts = [
        {effect for row in rows_of_records([one]) for effect in row.effects if effect[0] == "host"} for one in found
    ]
    assert [len(own) for own in hosts] == [1, 1, 1]
    assert hosts[0] == hosts[1] != hosts[2]
    assert len({run.source for one in found for run in one.runs}) == 1


def test_what_launches_cost_is_learnt_from_a_record(before: Record, after: Record) -> None:
    """Towards what the mock's host truly takes to enter a layer, in launches of its plain operators. (What recomputing
    costs it has the checkpoint's frame in it, which the model counts among layers.)"""
    host = open_mock(f"mock:{CARD}#11").physics.host
    truth = host.layer_s / (host.operator_s + host.launch_s)
    was, now = (abs(math.log(priors["host_layers"]["value"] / truth)) for priors in (before, after))
    assert now < 0.8 * was


def test_a_record_whose_fit_left_no_step_out_is_not_trusted_more(record: Record) -> None:
    """Steps that wait for the host never pass for the card's, whatever is known of their noise."""
    blank = copy.deepcopy(record)
    blank["fitted"]["residuals"]["steps"] = {}
    with_own, without = (record_runs(content, "mine", load_gpus()[CARD]) for content in (record, blank))
    assert with_own.waiting == without.waiting != frozenset()
    rows = {row.run.id: row for row in rows_of_records([without])}
    assert {row_id for row_id, row in rows.items() if row.waits} == without.waiting
    assert all(0.0 < row.trust < 0.05 for row in rows.values() if row.waits)
    assert all(row.trust == 1.0 for row in rows.values() if not row.waits)


def test_a_step_weighs_as_its_noise_says(rows: list[Row]) -> None:
    """A row with twice a published row's variance has half of its precision."""
    row_sd = beliefs()["spreads"]["row"]
    row = rows[0]
    assert row.trust == 1.0
    assert replace(row, own_log_sd=row_sd).trust == pytest.approx(0.5)


def test_a_record_that_is_not_fitted_is_not_read(record: Record) -> None:
    assert why_not(record) == ""
    assert "tunecast fit" in why_not({**record, "fitted": None})


def test_a_whole_step_that_the_card_bounds_is_a_run_on_it(record: Record) -> None:
    found = record_runs(record, "mine", load_gpus()[CARD])
    steps = {trial["id"]: trial for trial in record["trials"] if trial["bench"] == "step" and trial["outcome"] == "ok"}
    assert len(steps) >= len(found.runs) > 15
    assert {(run.gpu, run.source, run.stack) for run in found.runs} == {(CARD, "tunecast", "hf-peft")}
    first, trial = found.runs[0], steps[int(found.runs[0].id.split("#")[1])]
    assert first.id == f"mine#{trial['id']}"
    assert first.tokens_per_s is not None
    own = trial["params"]["run"]
    tokens = own["per_device_train_batch_size"] * own["gradient_accumulation_steps"] * own["max_length"]
    assert min(trial["samples_s"]) <= tokens / first.tokens_per_s <= max(trial["samples_s"])
    assert found.contexts_bytes[0] == trial["memory"]["process_bytes"] - trial["memory"]["reserved_bytes"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hardware": {"device": "cpu"}}, "a CPU"),
        ({"hardware": {"device": "mock:l4-24gb#1"}}, "a mock"),
        ({"hardware": {"gpu": None, "name": "NVIDIA X"}}, "NVIDIA X is in no catalog"),
        ({"flags": ["power_capped", "throttled", "mig"]}, "flagged mig, throttled"),
        ({"trials": []}, "no whole step"),
    ],
)
def test_what_says_nothing_of_cards_is_not_read(record: Record, changed: Record, reason: str) -> None:
    assert why_not(record) == ""
    other = copy.deepcopy(record)
    for key, value in changed.items():
        other[key] = {**other[key], **value} if isinstance(value, dict) else value
    assert why_not(other).startswith(reason)


def test_the_shipped_priors_say_which_records_they_read(tmp_path: Path, record: Record) -> None:
    """The ones in the repository, by name; and a folder with another record more has it read."""
    used, skipped = shipped_records()
    stated = load_priors()
    assert stated["records_used"] == {item.name: len(item.runs) for item in used}
    assert stated["records_skipped"] == skipped
    committed = {path.name for path in (ROOT / "results" / "records").glob("*.json")}
    assert {*skipped, *(f"{item.name}.json" for item in used)} == committed
    (tmp_path / "mine.json").write_text(json.dumps(record), encoding="utf-8")
    found, reasons = read_records([tmp_path / "mine.json", *(ROOT / "results" / "records").glob("cpu_*.json")])
    assert [item.name for item in found] == ["mine"]
    assert list(reasons.values()) == ["a CPU, which shares no operation's rate with a GPU"]


def test_the_command_counts_records_apart_from_rows(training: Training, record: Record) -> None:
    mine = record_runs(record, "mine", load_gpus()[CARD])
    few = replace(training, rows=[row for row in training.rows if row.run.source in ("TT", "VL")])
    found = fit_priors(few, ([mine], {"cpu.json": "a CPU"}))
    assert found["rows_used"] == sorted(row.run.id for row in few.rows)
    assert (found["records_used"], found["records_skipped"]) == ({"mine": len(mine.runs)}, {"cpu.json": "a CPU"})
    assert CARD in found["device_effects"]


def test_a_record_moves_its_own_card_and_makes_it_surer(before: Record, after: Record) -> None:
    """The mock's products are faster than an A10's figures promise; the record says so."""
    was, now = factors(before, CARD), factors(after, CARD)
    assert now.factors["scale.gemm"].value < 0.95 * was.factors["scale.gemm"].value
    assert now.step_covariance[0][0] < was.step_covariance[0][0] / 2
    assert CARD not in before["device_effects"]
    assert not any("no published run" in note for note in now.notes)


def test_a_card_that_shares_nothing_but_the_software_stays_in_its_interval(before: Record, after: Record) -> None:
    was, now = factors(before, OTHER), factors(after, OTHER)
    for name in ("scale.gemm", "scale.attention", "scale.memory"):
        old = was.factors[name]
        assert old.low < now.factors[name].value < old.high


def test_another_software_on_such_a_card_hardly_moves(before: Record, after: Record) -> None:
    """What all cards and stacks share is left: it moves a factor by less than a quarter of its standard deviation."""
    was, now = factors(before, OTHER, stack="torchtune"), factors(after, OTHER, stack="torchtune")
    for name in ("scale.gemm", "scale.attention", "scale.memory"):
        place = STEP_PARAMS.index(name)
        moved = math.log(now.factors[name].value / was.factors[name].value)
        assert abs(moved) < math.sqrt(was.step_covariance[place][place]) / 4


def test_a_record_is_left_out_with_its_card_and_not_with_the_sources_of_others(rows: list[Row], record: Record) -> None:
    few = [row.run for row in rows if row.run.source in ("TT", "VL")]
    mine = record_runs(record, "mine", load_gpus()[few[0].gpu])
    with_own = leave_out(few, source_of, records=[mine])(few[0])
    without = leave_out(few, gpu_of, records=[mine])(few[0])
    ids = {run.id for run in mine.runs}
    assert ids <= set(with_own["rows_used"])
    assert not ids & set(without["rows_used"])
    assert without["memory_overhead_bytes"] == leave_out(few, gpu_of)(few[0])["memory_overhead_bytes"]


def test_its_contexts_are_one_source_of_the_contexts(record: Record) -> None:
    """One context cited and one record, both of the same weight: the lower tenth is one's, the upper the other's."""
    mine = record_runs(record, "mine", load_gpus()[CARD])
    runs, _ = read_runs(row for row in read_table(TABLE) if row["id"] == "FM-025")
    found = memory_overheads(runs, {"values_mib": {CARD: 300}, "few_log_sd": 0.0}, [mine])
    (own,), threads = set(mine.contexts_bytes), load_gpus()[CARD].resident_threads
    assert threads is not None
    ends = [found[f"context_per_thread{end}"] * threads for end in ("_low", "", "_high")]
    assert ends[::2] == pytest.approx([300 * MIB, own])
    assert 300 * MIB < ends[1] < own


@pytest.mark.parametrize(
    ("software", "asks"),
    [
        ({"torch": "2.11.0+cu130", "cuda": "13.0"}, True),
        ({"torch": "2.11.0+cu126", "cuda": "12.6"}, False),
        ({"torch": "2.10.0+cu130", "cuda": "13.0"}, False),
        ({"torch": "2.13.0+cpu", "cuda": None}, False),
        ({}, False),
    ],
)
def test_which_attention_a_record_timed_follows_from_its_packages(software: Record, asks: bool) -> None:
    assert asks_cudnn_first(software) is asks


@pytest.mark.parametrize(
    "options",
    [{"method": "qlora"}, {"method": "lora", "precision": "fp32"}, {"method": "full", "num_gpus": 8}],
    ids=str,
)
def test_what_a_new_source_loses_is_no_matter_of_a_card_that_was_measured(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The card's own steps say how fast it is; a dtype that they lack keeps the priors' ratio. By priors it matters."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), encoding="utf-8")

    def step_s(slower: float, **more: Any) -> float:
        changed = {**load_priors(), "source_effect": {"value": slower}}
        with monkeypatch.context() as patch:
            patch.setattr(priors_module, "load_priors", lambda: changed)
            (told,) = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu=CARD, **options, **more)
        return float(told.step_time_s.value)

    assert step_s(0.5, records=str(path)) == step_s(0.0, records=str(path))
    assert step_s(0.5) > 1.1 * step_s(0.0)
