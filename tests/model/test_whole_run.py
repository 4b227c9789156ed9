"""The whole run against hand arithmetic: phases, billing, storage, electricity, other machines, interruptions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.tables import read_rows
from tunecast.model.amount import Amount, resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.cost import Price, user_price
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.phase import Work
from tunecast.model.phase_rates import assumed_rates, billing_rule, load_phase_rates, phase_rates, rate_names
from tunecast.model.power import measured_power_w
from tunecast.model.resolve import resolve_run
from tunecast.model.run_work import work_of
from tunecast.model.terms import owned, rented
from tunecast.model.value import Value, exact, product, total
from tunecast.model.whole_run import WholeRun, whole_run
from tunecast.model.whole_run_options import PHASES, READERS, WHOLE_RUN_NAMES, read_whole_run

GB = 1e9
WORK = Work(
    steps=1000,
    tokens=2_048_000.0,
    dataset_tokens=2_048_000.0,
    tokens_per_step=2048,
    max_length=1024,
    num_gpus=1,
    download_bytes=16 * GB,
    total_params=8_000_000_000,
    quantized=True,
    on_cpu=False,
    model_bytes=0.2 * GB,
    checkpoint_bytes=0.6 * GB,
    exports={"q8": 8.5 * GB, "q4": 4.9 * GB},
    forward_frac=0.25,
)
RATES = {
    "network_mb_per_s": 200,
    "upload_mb_per_s": 50,
    "disk_read_mb_per_s": 1000,
    "disk_write_mb_per_s": 500,
    "copy_mb_per_s": 4000,
    "quantize_gpu_mb_per_s": 8000,
    "tokenize_tokens_per_s": 1e6,
    "text_bytes_per_token": 4,
    "tokenized_bytes_per_token": 8,
    "host_ram_gb": 32,
}
STEP_S = 3.6
"""1,000 steps are one hour."""


def run(work: Work = WORK, *, price: Price | None = None, **options: Any) -> WholeRun:
    asked = read_whole_run({"phase_rate": RATES, **options})
    rates = phase_rates(None, None, asked.phase_rate)
    terms = None if price is None else rented(price, asked, rates)
    return whole_run(work, exact(STEP_S), options=asked, rates=rates, terms=terms)


def seconds(whole: WholeRun, phase: str) -> float:
    return whole.phases_h[phase] * 3600


def test_the_default_phases_and_their_arithmetic() -> None:
    whole = run(phase_min=["start=1", "setup=2"])
    assert list(whole.phases_h) == ["start", "setup", "download", "load", "train", "save"]
    assert seconds(whole, "download") == pytest.approx(16000 / 200)
    assert seconds(whole, "load") == pytest.approx(16000 / 1000 + 16000 / 4000 + 16000 / 8000)
    assert seconds(whole, "train") == pytest.approx(3600)
    assert seconds(whole, "save") == pytest.approx(200 / 4000 + 200 / 500)
    assert whole.total_time_h.value == pytest.approx(sum(whole.phases_h.values()))
    assert whole.train_time_h == exact(1.0)
    assert {phase.name: phase.origin for phase in whole.phases}["train"] == "forecast"


def test_shards_are_copied_by_their_gpus_and_written_to_one_volume_or_a_disk_in_each_machine() -> None:
    rates = {name: rate for name, rate in RATES.items() if name != "disk_write_mb_per_s"}
    apart = replace(WORK, writers=32, machines=4)
    known = {"phase_rate": rates, "save_steps": 1000, "phase_min": ["start=0"]}
    one, four = ((run(work, **known).phases, work) for work in (replace(WORK, writers=32), apart))
    alone, together = (next(p for p in phases if p.name == "checkpoints").hours for phases, _ in (one, four))
    copied_h = 600 / 4000 / 32 / 3600
    assert together.high - copied_h == pytest.approx(alone.high - copied_h)
    assert together.low - copied_h == pytest.approx((alone.low - copied_h) / 4, rel=1e-6)
    assert together.value - copied_h == pytest.approx((alone.value - copied_h) / 2)
    given = run(apart, save_steps=1000)
    assert seconds(given, "checkpoints") == pytest.approx(600 / 4000 / 32 + 600 / 500)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_steps": 300}, 4), ({"save_steps": 250}, 4), ({"save_steps": 2000}, 1), ({}, 0),
        ({"save_steps": 300, "save_total_limit": 2}, 2), ({"save_steps": 300, "save_total_limit": 9}, 4),
    ],
)  # fmt: skip
def test_the_disk_holds_every_checkpoint_unless_some_go(options: dict[str, Any], kept: int) -> None:
    """transformers' ``TrainingArguments``: save_total_limit None keeps all; a run's last step is saved."""
    held = {
        "price": user_price(1.0, 1),
        "storage_usd_per_gb_month": 0.1,
        "keep_days": 30,
        "phase_min": ["checkpoints=1"],
    }
    whole = run(**held, **options)
    months = (whole.total_time_h.value + 30 * 24) / 730
    assert whole.cost_parts_usd["storage"] == pytest.approx(0.1 * months * (16.0 + 0.2 + 0.6 * kept))


@pytest.mark.parametrize(
    ("options", "kept", "models"),
    [
        ({"repeats": 3}, 3 * 4, 3), ({"repeats": 3, "save_total_limit": 4}, 3 * 4, 3),
        ({"repeats": 3, "save_total_limit": 1}, 3, 3), ({"trials": 10}, 4 + 9 * 2, 1),
        ({"trials": 10, "save_total_limit": 2}, 2 + 9 * 2, 1), ({"trials": 10, "save_total_limit": 1}, 10, 1),
    ],
)  # fmt: skip
def test_every_repeat_and_trial_keeps_checkpoints_of_its_own(options: dict[str, Any], kept: int, models: int) -> None:
    """A limit deletes the older ones of the same output folder; a trial that is stopped half-way saved half of them."""
    stopped = {"early_stopping_fraction": 0.5} if "trials" in options else {}
    held = {"price": user_price(1.0, 1), "storage_usd_per_gb_month": 0.1, "keep_days": 30, "save_steps": 300}
    whole = run(**held, phase_min=["checkpoints=1"], **options, **stopped)
    months = (whole.total_time_h.value + 30 * 24) / 730
    assert whole.cost_parts_usd["storage"] == pytest.approx(0.1 * months * (16.0 + 0.2 * models + 0.6 * kept))


def test_machines_of_ones_own_have_a_disk_each_as_rented_ones() -> None:
    asked = {"gpu": "h100-sxm5-80gb", "tokens": "10M", "num_gpus": 32, "keep_days": 30, "storage_usd_per_gb_month": 1}
    (mine,) = tunecast.estimate("Qwen/Qwen3-0.6B", **asked, owned=True, electricity_usd_per_kwh=0.3)
    (hired,) = tunecast.estimate("Qwen/Qwen3-0.6B", **asked, usd_per_gpu_hour=2)
    usd = [each.whole_run.cost_parts_usd["storage"] for each in (mine, hired)]
    assert usd[0] == pytest.approx(usd[1], rel=0.01)


@pytest.mark.parametrize(
    ("options", "writers", "machines"),
    [
        ({"sharding": "zero3", "num_gpus": 64}, 64, 8), ({"sharding": "zero1", "num_gpus": 16}, 16, 2),
        ({"sharding": "ddp", "num_gpus": 64}, 1, 1), ({"sharding": "hsdp", "num_gpus": 64}, 8, 1),
        ({"sharding": "none", "num_gpus": 16, "tp": 8, "pp": 2}, 16, 2), ({}, 1, 1),
    ],
)  # fmt: skip
def test_who_writes_a_checkpoint(options: dict[str, Any], writers: int, machines: int) -> None:
    """Ranks with a share of the optimizer's state each write it (DeepSpeed, FSDP's sharded state, Megatron)."""
    architecture = load_architecture("meta-llama/Llama-3.1-8B")
    asked = resolve_run(architecture, {"method": "full", **options}).run
    work = work_of(architecture, asked, Amount(steps=10, how=""), forward_frac=0.0)
    assert (work.writers, work.machines) == (writers, machines)


def test_train_only_is_training_and_nothing_else() -> None:
    whole = run(train_only=True, price=user_price(2.0, 1))
    assert whole.phases_h == {"train": 1.0}
    assert whole.cost_usd == exact(2.0)


def test_from_scratch_nothing_is_downloaded_or_loaded() -> None:
    begun, scratch = run(), run(replace(WORK, adapters=False), from_scratch=True)
    assert [name for name in begun.phases_h if name not in scratch.phases_h] == ["download", "load"]
    assert scratch.phases_h["train"] == begun.phases_h["train"]
    with pytest.raises(InputError, match="--method full"):
        run(from_scratch=True)


def test_every_phase_can_be_given_or_left_out() -> None:
    whole = run(phase_min=["start=0", "setup=0", "download=10", "load=0", "save=0"])
    assert whole.phases_h == {"download": pytest.approx(1 / 6), "train": 1.0}
    assert whole.phases[0].origin == "cli"


def test_optional_phases_by_hand() -> None:
    whole = run(eval_samples=100, eval_steps=250, save_steps=300, merge=True, export="q8", upload=True)
    # Two samples per step: 50 steps of a quarter of 3.6 s, four times.
    assert seconds(whole, "evaluate") == pytest.approx(50 * 0.25 * 3.6 * 4)
    assert seconds(whole, "checkpoints") == pytest.approx(4 * (600 / 4000 + 600 / 500))  # 300, 600, 900 and the end
    assert seconds(whole, "merge") == pytest.approx(16000 / 1000 + 16000 / 500)
    written_mb = 8500
    assert seconds(whole, "export") == pytest.approx(16000 / 1000 + written_mb / 500)
    assert seconds(whole, "upload") == pytest.approx(written_mb / 50)
    assert list(whole.phases_h).index("evaluate") == list(whole.phases_h).index("train") + 1


@pytest.mark.parametrize("unit", ["num_samples", "tokens", "max_steps"])
def test_evaluations_pack_what_training_packs(unit: str) -> None:
    """500 samples of 300 tokens in rows of 8,192: 500 x 300 / 8,192 rows a pass, one to a step of one row each."""
    architecture = load_architecture("Qwen/Qwen2.5-0.5B")
    asked = resolve_run(architecture, {"max_length": 8192}).run
    data = {unit: {"num_samples": 10_000, "tokens": 3_000_000, "max_steps": 366}[unit], "mean_tokens": 300}
    for packing, samples_per_row in ((True, 8192 / 300), (False, 1.0)):
        amount = resolve_amount(asked, {**data, "packing": packing})
        assert amount is not None
        work = work_of(architecture, asked, amount, forward_frac=0.25)
        whole = run(work, eval_samples=500, eval_steps=10**6)
        assert seconds(whole, "evaluate") == pytest.approx(500 / samples_per_row * 0.25 * 3.6)


def test_an_export_merges_an_adapter_first_and_a_whole_model_has_none() -> None:
    assert seconds(run(export="q4"), "merge") == pytest.approx(16000 / 1000 + 16000 / 500)
    full = run(replace(WORK, adapters=False, model_bytes=16 * GB), export="q4", merge=True, upload=True)
    assert "merge" not in full.phases_h
    assert seconds(full, "upload") == pytest.approx(8000 * 4.9 / 8 / 50)
    whole = run(replace(WORK, adapters=False, model_bytes=16 * GB), merge=True, upload=True)
    assert seconds(whole, "upload") == pytest.approx(16000 / 50)


def test_case_a_fifty_gb_of_data_on_a_machine_of_32_gb_goes_in_two_batches_and_is_bound_by_reading() -> None:
    """Reading 50 GB from 100 MB/s takes 500 s, tokenizing 12.5 billion tokens at 100 M/s 125 s."""
    fast = RATES | {"tokenize_tokens_per_s": 1e8}
    whole = run(dataset_gb=50, data_location="s3=100", phase_rate=fast)
    (phase,) = [p for p in whole.phases if p.name == "prepare"]
    tokenized_mb, spilled_mb = 12500 * 8, 50000
    by_hand = 50000 / 100 + (tokenized_mb + spilled_mb) / 500 + spilled_mb / 1000
    assert phase.hours.value * 3600 == pytest.approx(by_hand)
    assert "2 batches, bound by reading" in phase.how
    roomy = run(dataset_gb=50, data_location="s3=100", phase_rate=fast | {"host_ram_gb": 64})
    assert seconds(roomy, "prepare") == pytest.approx(50000 / 100 + tokenized_mb / 500)


def test_without_a_size_data_are_tokens_times_bytes_and_only_counted_when_asked() -> None:
    assert "prepare" not in run().phases_h
    whole = run(prepare=True)
    text_mb = 2.048 * 4
    assert seconds(whole, "prepare") == pytest.approx(2.048 + 2.048 * 8 / 500)  # tokenizing 2 M tokens at 1 M/s
    assert seconds(run(prepare=True, data_location="tape=1"), "prepare") == pytest.approx(text_mb + 2.048 * 8 / 500)


def test_a_search_trains_the_best_in_full_and_the_others_up_to_where_they_stop() -> None:
    whole = run(trials=20, early_stopping_fraction=0.25, repeats=2)
    assert seconds(whole, "train") == pytest.approx(2 * (1 + 19 * 0.25) * 3600)
    assert seconds(whole, "load") == pytest.approx(40 * seconds(run(), "load"))
    assert seconds(whole, "download") == pytest.approx(seconds(run(), "download"))


def test_every_trial_is_scored_at_its_end() -> None:
    """5 trials of which 4 stop after a tenth: 5 evaluations, twice with two seeds; while training, those that are
    reached."""
    once = seconds(run(eval_samples=500), "evaluate")
    stopped = {"trials": 5, "early_stopping_fraction": 0.1, "eval_samples": 500}
    assert seconds(run(**stopped), "evaluate") == pytest.approx(5 * once)
    assert seconds(run(**stopped, repeats=2), "evaluate") == pytest.approx(10 * once)
    assert seconds(run(**stopped, eval_steps=100), "evaluate") == pytest.approx(10 * 1.4 * once)


def test_a_kept_disk_of_unknown_price_costs_what_the_dearest_known_does() -> None:
    """Or an offer would be the cheapest because its price is missing; without keeping it, it is left out."""
    first: dict[str, float] = {}  # a provider's first disk is its price
    for row in read_rows("storage.csv"):
        if row["role"] == "disk":
            first.setdefault(row["provider"], float(row["usd_per_gb_month"]))
    dearest = max(first.values())
    nobody = Price(usd_per_h=2.0, offer={"provider": "nobody-knows"})
    kept = run(price=nobody, keep_days=30)
    assert kept.guessed_storage_usd_per_gb_month == pytest.approx(dearest)
    held_h = kept.total_time_h.value + 30 * 24
    assert kept.cost_parts_usd["storage"] == pytest.approx(16.2 * dearest * held_h / 730)
    assert "storage" in run(price=nobody).uncounted
    assert run(price=nobody, keep_days=30, storage_usd_per_gb_month=0.1).guessed_storage_usd_per_gb_month is None


def test_another_machine_does_the_phases_that_need_no_gpu() -> None:
    """Preparing for 0.20 and deploying for 0.10 an hour; the GPU machine is not paid for these hours."""
    asked = {"prepare": True, "merge": True, "upload": True, "data_location": "s3=1"}
    here = run(price=user_price(2.0, 1), **asked)
    there = run(price=user_price(2.0, 1), phase_machine=["prepare=0.2", "deploy=0.1"], **asked)
    hours = there.phases_h
    gpu_h = sum(h for name, h in hours.items() if name not in ("prepare", "merge", "upload"))
    assert there.cost_parts_usd["rent"] == pytest.approx(2.0 * gpu_h)
    assert there.cost_parts_usd["other_machines"] == pytest.approx(
        0.2 * hours["prepare"] + 0.1 * (hours["merge"] + hours["upload"])
    )
    assert there.total_time_h.value == pytest.approx(sum(hours.values()))
    # The other machine fetches the base, and its result travels to the GPU machine.
    assert seconds(there, "merge") == pytest.approx(seconds(here, "merge") + 16000 / 200)
    assert seconds(there, "prepare") == pytest.approx(seconds(here, "prepare") + 2.048 * 8 / 200)


@pytest.mark.parametrize(
    ("granularity_s", "minimum_s", "minutes", "paid_min"),
    [(60, 0, 61.2, 62), (3600, 0, 61.2, 120), (1, 0, 61.2, 61.2), (1, 7200, 61.2, 120), (3600, 0, 60, 60)],
)
def test_billing_rounds_up_to_the_granularity_and_the_minimum(
    granularity_s: float, minimum_s: float, minutes: float, paid_min: float
) -> None:
    phases = [f"start={minutes - 60}", "setup=0", "download=0", "load=0", "save=0"]
    billing = {"billing_granularity_s": granularity_s, "billing_minimum_s": minimum_s}
    whole = run(price=user_price(3.0, 1), phase_min=phases, **billing)
    assert whole.billed_h == pytest.approx(paid_min / 60)
    assert whole.cost_usd is not None
    assert whole.cost_usd.value == pytest.approx(3.0 * paid_min / 60)


def test_storage_by_the_gb_month_and_egress_by_the_gb() -> None:
    """16.2 GB for the run and 30 days more at 0.10 a month, 0.2 GB out at 0.09."""
    whole = run(
        price=user_price(2.0, 1), upload=True, storage_usd_per_gb_month=0.1, egress_usd_per_gb=0.09, keep_days=30
    )
    held_h = whole.total_time_h.value + 30 * 24
    assert whole.cost_parts_usd["storage"] == pytest.approx(16.2 * 0.1 * held_h / 730)
    assert whole.cost_parts_usd["egress"] == pytest.approx(0.2 * 0.09)
    assert whole.cost_usd is not None
    assert sum(whole.cost_parts_usd.values()) == pytest.approx(whole.cost_usd.value)


def test_data_that_lie_with_another_provider_are_paid_for_when_they_leave_it() -> None:
    """150 GB out of S3: 100 of a month are free, then 0.09; nothing to a machine at AWS, nor from a disk here."""
    asked = {"dataset_gb": 150, "data_location": "s3=500"}
    away = run(price=Price(usd_per_h=1.0, offer={"provider": "runpod", "instances": 1}), **asked)
    assert away.cost_parts_usd["egress"] == pytest.approx(50 * 0.09)
    beside = run(price=Price(usd_per_h=1.0, offer={"provider": "aws", "instances": 1}), **asked)
    assert "egress" not in beside.cost_parts_usd
    own_disk = run(price=user_price(1.0, 1), dataset_gb=50, data_location="nas=100")
    assert "egress" not in own_disk.cost_parts_usd
    assert own_disk.uncounted == ("storage",)


def test_a_price_that_nobody_states_is_named_not_zero() -> None:
    offer = {"provider": "hyperstack", "instances": 1}
    whole = run(price=Price(usd_per_h=2.0, offer=offer))
    assert whole.uncounted == ("storage",)
    large = replace(WORK, total_params=65_000_000_000)
    aws = run(large, price=Price(usd_per_h=2.0, offer={"provider": "aws", "instances": 1}), merge=True, upload=True)
    assert aws.cost_parts_usd["egress"] == pytest.approx(30 * 0.09)  # 130 GB; AWS: 100 of a month are free, then 0.09
    small = run(price=Price(usd_per_h=2.0, offer={"provider": "aws", "instances": 1}), merge=True, upload=True)
    assert "egress" not in small.cost_parts_usd


def test_a_machine_of_ones_own_pays_electricity() -> None:
    """Two RTX 3090 at 300 W with a host of 200 W, one hour of training at 0.30 per kWh, PUE 1.5."""
    asked = read_whole_run(
        {
            "owned": True,
            "electricity_usd_per_kwh": 0.3,
            "gpu_power_w": 300,
            "pue": 1.5,
            "phase_rate": ["host_power_w=200"],
            "phase_min": ["download=0", "load=0", "save=0"],
        }
    )
    gpu = load_gpus()["rtx-3090-24gb"]
    rates = phase_rates(gpu, None, asked.phase_rate)
    terms = owned(gpu, 2, asked, rates, None)
    whole = whole_run(replace(WORK, num_gpus=2), exact(STEP_S), options=asked, rates=rates, terms=terms)
    assert whole.phases_h == {"train": 1.0}
    assert whole.energy_kwh == pytest.approx((2 * 300 + 200) * 1.5 / 1000)
    assert whole.cost_usd is not None
    assert whole.cost_usd.value == pytest.approx(0.3 * 1.2)
    measured = owned(gpu, 1, replace(asked, gpu_power_w=None), rates, 250.0)
    assert measured.power is not None
    assert (measured.power.training_w, measured.power.origin) == (pytest.approx(450 * 1.5), "measured")


def test_rates_come_from_the_record_then_the_datasheet_then_assumptions() -> None:
    gpu = load_gpus()["a100-sxm4-80gb"]
    lanes_bytes_per_s = 16 * 1.969e9  # PCIe 4.0 x 16: more than a copy from memory that is not pinned
    unpinned = assumed_rates()["copy_mb_per_s"]
    assert phase_rates(gpu, None, {})["copy_mb_per_s"] == unpinned
    assert unpinned.value < 0.6 * lanes_bytes_per_s
    narrow = phase_rates(replace(gpu, pcie_lanes=4), None, {})["copy_mb_per_s"]
    assert narrow.origin == "datasheet"
    assert narrow.value == pytest.approx(assumed_rates()["copy_frac"].value * lanes_bytes_per_s / 4)
    assert narrow.low <= narrow.value <= narrow.high
    told = phase_rates(gpu, None, {"copy_frac": 0.5})["copy_mb_per_s"]
    assert told.value == pytest.approx(0.5 * lanes_bytes_per_s)
    read = Factor(value=2e9, low=1e9, high=3e9, unit="B/s", origin="measured:x.json")
    loaded = replace(read, value=5e8, low=4e8, high=6e8)
    factors = FactorSet(
        gpu=gpu.id,
        curves={},
        factors={"disk.read.cold.bytes_per_s": read, "load.quantized.bytes_per_s": loaded},
        step_log_sd=0.1,
    )
    rates = phase_rates(gpu, factors, {})
    assert rates["disk_read_mb_per_s"] is read
    whole = whole_run(WORK, exact(STEP_S), options=read_whole_run({}), rates=rates, terms=None)
    (load,) = [phase for phase in whole.phases if phase.name == "load"]
    assert load.hours.value * 3600 == pytest.approx(16e9 / 5e8)
    assert load.origin == "measured:x.json"
    assert load.hours.low * 3600 == pytest.approx(16e9 / 6e8)
    typed = phase_rates(gpu, factors, {"disk_read_mb_per_s": 100.0})
    assert "load_quantized_mb_per_s" not in typed
    assert typed["disk_read_mb_per_s"].origin == "cli"


def test_a_measured_save_of_an_adapter_and_a_stated_host_memory_come_before_assumptions() -> None:
    saving = Factor(value=1e8, low=5e7, high=2e8, unit="B/s", origin="measured:x.json")
    factors = FactorSet(gpu="x", curves={}, factors={"checkpoint.bytes_per_s": saving}, step_log_sd=0.1)
    rates = phase_rates(None, factors, {})
    adapter = whole_run(WORK, exact(STEP_S), options=read_whole_run({}), rates=rates, terms=None)
    assert seconds(adapter, "save") == pytest.approx(0.2e9 / 1e8)
    full = replace(WORK, adapters=False)
    whole = whole_run(full, exact(STEP_S), options=read_whole_run({}), rates=rates, terms=None)
    assert {name for name, _ in whole.phases[-1].rates} == {"copy_mb_per_s", "disk_write_mb_per_s"}
    unsaid = {name: number for name, number in RATES.items() if name != "host_ram_gb"}
    roomy = Price(usd_per_h=1.0, offer={"provider": "aws", "instances": 1, "ram_gib": 1152})
    (prepared,) = [p for p in run(price=roomy, dataset_gb=50, phase_rate=unsaid).phases if p.name == "prepare"]
    assert "1 batch" in prepared.how
    (small,) = [p for p in run(price=roomy, dataset_gb=50).phases if p.name == "prepare"]
    assert "2 batches" in small.how  # 32 GB given by the user


MONEY = st.floats(0.01, 100.0)


@settings(max_examples=100, deadline=None)
@given(
    usd_per_h=MONEY,
    faster=st.floats(1.0, 10.0),
    share=st.floats(0.0, 0.95),
    steps=st.integers(1, 10**6),
    spot=st.booleans(),
)
def test_what_holds_for_any_run(usd_per_h: float, faster: float, share: float, steps: int, spot: bool) -> None:
    """Phases sum to the total, parts to the cost; a faster network, a lower price or rate never costs more."""
    work = replace(WORK, steps=steps)
    more = {"spot": True, "interruption_rate_per_month": share} if spot else {}

    def asked(price: float, network: float, monthly: float) -> WholeRun:
        options = more | ({"interruption_rate_per_month": monthly} if spot else {})
        rate = RATES | {"network_mb_per_s": network}
        return run(work, price=user_price(price, 1), phase_rate=rate, upload=True, **options)

    whole = asked(usd_per_h, 100.0, share)
    assert whole.cost_usd is not None
    assert sum(whole.phases_h.values()) == pytest.approx(whole.total_time_h.value)
    assert sum(whole.cost_parts_usd.values()) == pytest.approx(whole.cost_usd.value)
    assert whole.total_time_h.low <= whole.total_time_h.value <= whole.total_time_h.high
    assert whole.cost_usd.low <= whole.cost_usd.value <= whole.cost_usd.high
    assert whole.train_time_h.value <= whole.total_time_h.value
    others = (asked(usd_per_h, 100.0 * faster, share), asked(usd_per_h / faster, 100.0, share))
    for better in (*others, asked(usd_per_h, 100.0, share / faster)):
        assert better.cost_usd is not None
        assert better.cost_usd.value <= whole.cost_usd.value * (1 + 1e-3)


def test_amounts_of_a_real_run() -> None:
    """Llama-3.1-8B, r=16 on all linear layers: 41,943,040 fp32 adapters, two moments; 16.06 GB on the hub."""
    architecture = load_architecture("meta-llama/Llama-3.1-8B")
    resolved = resolve_run(architecture, {"method": "qlora", "lora_r": 16}, gpu_has_bf16=True)
    work = work_of(architecture, resolved.run, Amount(steps=10, how="", epochs=2.0), forward_frac=0.3)
    assert work.model_bytes == 41_943_040 * 4
    assert work.checkpoint_bytes == pytest.approx(3 * 41_943_040 * 4, rel=0.001)
    assert work.download_bytes == pytest.approx(8_030_261_248 * 2, rel=1e-4)
    assert work.dataset_tokens == work.tokens / 2


@pytest.mark.parametrize(
    ("sharding", "per_param"), [("ddp", 6), ("fsdp", 6), ("zero1", 16), ("zero2", 16), ("zero3", 14)]
)
def test_a_checkpoint_holds_what_training_goes_on_from(sharding: str, per_param: int) -> None:
    """16-bit weights with 16-bit moments; DeepSpeed's fp32 copies with fp32 moments (12 bytes) beside the weights,
    which ZeRO-1 and -2 write twice."""
    architecture = load_architecture("meta-llama/Llama-3.1-8B")
    options = {"method": "full", "num_gpus": 8, "sharding": sharding, "precision": "bf16"}
    run = resolve_run(architecture, options).run
    work = work_of(architecture, run, Amount(steps=10, how="", epochs=1.0), forward_frac=0.3)
    assert work.checkpoint_bytes == pytest.approx(per_param * architecture.total_params, rel=0.001)


def test_sums_and_products_of_values() -> None:
    """Errors of 3 and 4 make 5; factors of e^0.3 and e^0.4 make e^0.5."""
    assert total([Value(value=10, low=7, high=13), Value(value=20, low=16, high=24)]) == Value(
        value=30, low=25, high=35
    )
    wide = product(
        Value(value=2.0, low=2 * math.exp(-0.3), high=2 * math.exp(0.3)),
        Value(value=3.0, low=3 * math.exp(-0.4), high=3 * math.exp(0.4)),
    )
    assert wide.value == 6
    assert wide.high == pytest.approx(6 * math.exp(0.5))
    assert wide.low == pytest.approx(6 * math.exp(-0.5))


SPOT = {"spot": True, "interruption_rate_per_month": 0.5, "phase_min": ["start=1", "setup=2", "download=3", "load=4"]}


def test_interruptions_add_to_the_time_and_the_sum_holds() -> None:
    long = replace(WORK, steps=100_000)
    whole = run(long, price=user_price(1.0, 1), **SPOT)
    found = whole.interruptions
    assert found is not None
    rate = -math.log(0.5) / 730
    save_h = (600 / 4000 + 600 / 500) / 3600
    assert found.job.startup_h == pytest.approx(10 / 60)
    assert found.job.restart_h == pytest.approx(10 / 60)
    # Young proposes the square root of 2 x save x mean time between interruptions.
    assert found.job.interval_h == pytest.approx(math.sqrt(2 * save_h / rate), rel=0.05)
    assert found.proposed
    length, segments = found.job.interval_h + save_h, found.job.full_segments
    by_hand = math.expm1(rate / 6) / rate + math.exp(rate / 6) / rate * (
        segments * math.expm1(rate * length)
        + math.expm1(rate * (100 - segments * found.job.interval_h + whole.phases_h["save"]))
    )
    assert whole.total_time_h.value == pytest.approx(by_hand)
    assert sum(whole.phases_h.values()) == pytest.approx(by_hand)
    assert whole.cost_usd is not None
    assert whole.cost_usd.value == pytest.approx(by_hand)


def test_a_restart_loads_one_model_however_many_trials_did() -> None:
    spot = {"spot": True, "interruption_rate_per_month": 0.5}
    one, three = (run(price=user_price(1.0, 1), **spot, trials=n).interruptions for n in (1, 3))
    assert one is not None
    assert three is not None
    assert three.job.restart_h == pytest.approx(one.job.restart_h)
    assert three.job.startup_h > one.job.startup_h


def test_without_checkpoints_a_long_run_shows_its_true_cost() -> None:
    long = replace(WORK, steps=2_000_000)
    safe = run(long, price=user_price(1.0, 1), **SPOT)
    naive = run(long, price=user_price(1.0, 1), **SPOT, checkpoint_interval_min="none")
    rate = -math.log(0.5) / 730
    assert safe.total_time_h.value < 1.05 * 2000
    assert naive.total_time_h.value == pytest.approx(math.expm1(rate * 2000) / rate, rel=0.001)


def test_save_steps_set_the_interval_unless_minutes_do() -> None:
    long = replace(WORK, steps=100_000)
    by_steps = run(long, price=user_price(1.0, 1), **SPOT, save_steps=500).interruptions
    by_minutes = run(long, price=user_price(1.0, 1), **SPOT, save_steps=500, checkpoint_interval_min=90).interruptions
    assert by_steps is not None
    assert by_minutes is not None
    assert by_steps.interval_min == pytest.approx(500 * STEP_S / 60)
    assert by_minutes.interval_min == pytest.approx(90)
    assert not by_steps.proposed
    alone = run(long, price=user_price(1.0, 1), **SPOT, checkpoint_interval_min=90).interruptions
    assert alone is not None
    assert by_minutes.on_demand_usd == alone.on_demand_usd, "both prices are of the same checkpoints"


def test_on_demand_instead_has_the_checkpoints_that_were_asked_for() -> None:
    long = replace(WORK, steps=100_000)
    offer = {"price": user_price(1.0, 1), "save_steps": 500}
    spot = run(long, **offer, **SPOT).interruptions
    plain = run(long, **offer, phase_min=SPOT["phase_min"])
    assert spot is not None
    assert plain.cost_usd is not None
    same = replace(spot, on_demand_usd_per_h=1.0)
    assert same.on_demand_usd == pytest.approx(plain.cost_usd.value)
    without = run(long, price=user_price(1.0, 1), **SPOT).interruptions
    assert without is not None
    assert replace(without, on_demand_usd_per_h=1.0).on_demand_usd < same.on_demand_usd  # type: ignore[operator]


def test_machines_hold_the_weights_each_and_a_checkpoint_together() -> None:
    """Shards are written by whoever has them: four machines hold four copies of what they read, one of what is made."""
    asked = read_whole_run({"phase_rate": RATES, "save_steps": 500, "storage_usd_per_gb_month": 0.1, "keep_days": 30})
    rates = phase_rates(None, None, asked.phase_rate)
    alone, four = (rented(user_price(1.0, 32), asked, rates, machines=machines) for machines in (1, 4))
    costs = [whole_run(WORK, exact(STEP_S), options=asked, rates=rates, terms=t).cost_parts_usd for t in (alone, four)]
    made_gb, read_gb = 2 * 0.6 + 0.2, 16.0
    assert costs[1]["storage"] / costs[0]["storage"] == pytest.approx((4 * read_gb + made_gb) / (read_gb + made_gb))


def test_several_machines_are_interrupted_more_often() -> None:
    offer = {"provider": "user", "instances": 4}
    one = run(price=user_price(1.0, 1), **SPOT).interruptions
    four = run(price=Price(usd_per_h=1.0, offer=offer), **SPOT).interruptions
    assert one is not None
    assert four is not None
    assert four.rate_per_h == pytest.approx(4 * one.rate_per_h)


def test_the_rate_is_given_or_documented_or_labelled_assumed() -> None:
    def cuts(offer: dict[str, Any], **options: Any) -> Any:
        found = run(price=Price(usd_per_h=1.0, offer=offer), spot=True, **options).interruptions
        assert found is not None
        return found.cuts

    aws = {"provider": "aws", "instance_or_sku": "g6e.xlarge", "region": "us-east-1", "instances": 1}
    assert (cuts(aws).monthly.low, cuts(aws).monthly.high, cuts(aws).origin) == (0.05, 0.1, "documented")
    assert "2025-06-28" in cuts(aws).source
    open_band = cuts(aws | {"instance_or_sku": "g5.xlarge"})
    assert open_band.monthly.low == 0.2
    assert "more than 20%" in open_band.source
    assert "assumed" in open_band.source
    assert cuts({"provider": "runpod", "instances": 1}).origin == "assumed"
    assert cuts(aws, interruption_rate_per_month=0.3).origin == "cli"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"owned": True}, "--electricity-usd-per-kwh"),
        ({"gpu_power_w": 300}, "--owned"),
        ({"owned": True, "electricity_usd_per_kwh": 0.3, "spot": True}, "exclude each other"),
        ({"eval_steps": 100}, "--eval-samples"),
        ({"train_only": True, "spot": True}, "--restart-min"),
        ({"train_only": True, "merge": True}, "--merge would change nothing"),
        ({"train_only": True, "export": "q4"}, "--export would change nothing"),
        ({"train_only": True, "phase_min": ["setup=5"]}, "--phase-min would change nothing"),
        ({"early_stopping_fraction": 0.5}, "--trials"),
        ({"restart_min": 5}, "--spot"),
        ({"spot": True, "interruption_rate_per_month": 15}, r"0\.15"),
        ({"spot": True, "checkpoint_interval_min": "often"}, "auto or none"),
        ({"phase_min": ["training=5"]}, "Unknown name in --phase-min"),
        ({"phase_min": ["train=5"]}, "Unknown name in --phase-min"),
        ({"phase_min": ["load=soon"]}, "setup=5"),
        ({"phase_rate": ["network=5"]}, "network_mb_per_s"),
        ({"phase_rate": ["network_mb_per_s=0"]}, "network_mb_per_s=500"),
        ({"phase_machine": ["train=1"]}, "Unknown name in --phase-machine"),
        ({"data_location": "s3"}, "s3=200"),
        ({"data_location": "=200"}, "names no place"),
        ({"phase_machine": ["prepare=0.2"]}, "add --prepare"),
        ({"phase_machine": ["deploy=0.2"], "prepare": True}, "--merge, --export or --upload"),
        ({"seed": -1}, "0 or more"),
        ({"export": "onnx"}, "Unknown export format"),
        ({"trials": 0}, "whole number above 0"),
        ({"early_stopping_fraction": 1.5, "trials": 3}, "share above 0"),
        ({"pue": 0.9, "owned": True}, "1 or more"),
        ({"dataset_gb": 0}, "above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_whole_run(asked)


def test_every_option_is_read_and_every_assumption_has_a_source() -> None:
    assert set(READERS) == set(WHOLE_RUN_NAMES)
    table = load_phase_rates()
    for row in (*table["rates"].values(), *table["durations_s"].values()):
        assert row["low"] <= row["value"] <= row["high"]
        assert row["source"]
        assert row["origin"] == "assumed"
    for row in table["billing"].values():
        assert row["source"]
        assert row["origin"] in ("documented", "assumed")
    assert set(assumed_rates()) < set(rate_names())
    assert billing_rule("nobody").origin == "assumed"


def test_the_page_names_every_phase() -> None:
    page = (Path(__file__).parents[2] / "docs" / "whole-run.md").read_text(encoding="utf-8")
    assert all(f"`{phase}`" in page for phase in PHASES)


def test_measured_power_is_the_median_over_whole_steps() -> None:
    def trial(bench: str, power_w: float | None, outcome: str = "ok") -> dict[str, Any]:
        lasting = {"samples_s": [0.7, 0.7, 0.7]}
        return {"bench": bench, "outcome": outcome, "sensors_after": {"power_w": power_w}, **lasting}

    trials = [trial("step", 200.0), trial("step", 300.0), trial("step", 250.0), trial("gemm", 400.0)]
    unusable = [trial("step", None), trial("step", 999.0, "oom"), {**trial("step", 1.0), "sensors_after": None}]
    assert measured_power_w({"trials": [*trials, *unusable]}) == 250.0
    assert measured_power_w({"trials": unusable}) is None
    brief = {**trial("step", 150.0), "samples_s": [0.1] * 5}  # the sensor's mean is over more than that
    assert measured_power_w({"trials": [*trials, brief]}) == 250.0
    assert measured_power_w({"trials": [brief]}) is None
