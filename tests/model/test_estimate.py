"""Forecasts: what must hold for any run on any GPU, and the shape of the answer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import estimate, forecast
from tunecast.model.factors_io import factors_to_dict
from tunecast.model.fits import fit_probability, fit_verdict
from tunecast.model.forecast import Forecast, MemoryView
from tunecast.model.forecast_json import forecast_to_dict
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.question import Question
from tunecast.model.target import resolve_targets
from tunecast.model.timing import utilization
from tunecast.model.value import Value, exact
from tunecast.model.whole_run_options import WholeRunOptions

LLAMA_8B = "meta-llama/Llama-3.1-8B"
LLAMA_70B = "meta-llama/Llama-3.1-70B"


def ask(model: str = LLAMA_8B, *, gpu: str = "a100-sxm4-80gb", price: float | None = None, **options: Any) -> Forecast:
    question = Question(architecture=load_architecture(model), options=options, usd_per_gpu_hour=price)
    (target,) = resolve_targets([gpu], {})
    return forecast(question, target)


def test_every_catalog_gpu_gets_an_answer_to_a_70b_qlora() -> None:
    question = Question(architecture=load_architecture(LLAMA_70B), options={"method": "qlora", "tokens": "10M"})
    answers = estimate(question, resolve_targets(["all"], {}))
    assert [a.gpu for a in answers] == list(load_gpus())
    for answer in answers:
        assert 0 < answer.step_time_s.low < answer.step_time_s.value < answer.step_time_s.high
        assert answer.fits is (None if answer.verdict is None else answer.verdict != "no")
        assert json.loads(json.dumps(forecast_to_dict(answer), allow_nan=False))
    (unseen,) = estimate(question, [replace(resolve_targets(["gb10-128gb"], {})[0], usable_bytes=None)])
    assert (unseen.verdict, unseen.fits) == (None, None)  # memory that nobody has reported
    by_gpu = {a.gpu: a for a in answers}
    assert by_gpu["a100-sxm4-80gb"].verdict == "fits"  # QLoRA paper: 65B on one 48 GB card; 70B leaves room on 80 GB
    assert by_gpu["rtx-4090-24gb"].verdict == "no"  # 70e9 weights at 4 bits alone are 33 GiB
    assert by_gpu["gb10-128gb"].verdict == "fits"  # 113 GiB


def test_memory_parts_add_up_and_views_are_ordered() -> None:
    memory = ask(method="qlora", max_length=2048).memory
    assert sum(memory.parts_bytes.values()) == pytest.approx(memory.allocated_bytes.value)
    assert memory.reserved_bytes is not None
    assert memory.process_bytes is not None
    assert memory.allocated_bytes.value <= memory.reserved_bytes.value <= memory.process_bytes.value


def test_time_parts_add_up_to_the_step() -> None:
    answer = ask(method="lora", max_length=2048)
    assert sum(answer.time_parts_s.values()) == pytest.approx(answer.step_time_s.value, rel=1e-6)


def test_money_is_hours_times_price_and_tokens_are_conserved() -> None:
    options = {"method": "lora", "max_length": 1000, "per_device_train_batch_size": 2, "tokens": "3M"}
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    alone = WholeRunOptions(train_only=True)
    question = Question(
        architecture=load_architecture(LLAMA_8B), options=options, usd_per_gpu_hour=2.5, whole_run=alone
    )
    answer = forecast(question, target)
    assert answer.total_time_h is not None
    assert answer.cost_usd is not None
    assert answer.cost_per_million_tokens_usd is not None
    assert answer.total_time_h.value == pytest.approx(1500 * answer.step_time_s.value / 3600)
    assert answer.cost_usd.value == pytest.approx(2.5 * answer.total_time_h.value)
    assert answer.cost_per_million_tokens_usd.value * 3 == pytest.approx(answer.cost_usd.value)
    assert answer.tokens_per_s.value * answer.step_time_s.value == pytest.approx(2000)


def test_without_an_amount_totals_are_null_and_the_price_of_a_million_tokens_is_not() -> None:
    answer = ask(method="lora")
    assert answer.total_time_h is None
    assert answer.cost_usd is None
    assert answer.cost_per_million_tokens_usd is not None


def test_a_run_that_does_not_fit_still_has_time_and_cost() -> None:
    answer = ask(LLAMA_70B, gpu="rtx-4090-24gb", method="full", tokens="1M")
    assert answer.fits is False
    assert answer.total_time_h is not None
    assert any("as if memory sufficed" in note for note in answer.notes)


def test_several_gpus_get_the_least_sharding_that_fits() -> None:
    assert ask(LLAMA_8B, method="qlora", num_gpus=2).run.sharding == "ddp"
    big = ask(LLAMA_8B, method="full", num_gpus=8, optim="adamw_torch")
    assert big.run.sharding in ("zero1", "zero2", "fsdp")  # 64 GB of states beside the weights: one card cannot
    assert big.run_origins["sharding"] == "assumed"
    assert big.fits


def test_classic_arithmetic_of_achieved_tflops() -> None:
    """Time = FLOPs / (GPUs x achieved), whatever the device model says."""
    question = Question(
        architecture=load_architecture(LLAMA_8B), options={"method": "full", "max_length": 4096}, achieved_tflops=200
    )
    answer = forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])
    assert answer.step_time_s == exact(answer.model_flops_per_step / 200e12)
    assert answer.origins == {"achieved_tflops": "assumed", "usable_memory": "datasheet"}


def test_a_utilisation_above_one_names_the_figures() -> None:
    (target,) = resolve_targets(["t4-16gb"], {})
    with pytest.raises(TunecastError, match=r"MFU of t4-16gb.*above 1.*peak"):
        utilization("MFU", 1e15, 1.0, 65e12, target)


def test_an_achieved_speed_is_that_of_the_copy_with_the_longest_rows() -> None:
    """Four copies wait for it: MFU counts their own shorter rows, and a note says so. One copy waits for none."""
    padded = {
        "method": "lora", "max_length": 1024, "mean_tokens": 300, "num_samples": 20_000, "packing": False,
        "per_device_train_batch_size": 4,
    }  # fmt: skip
    said = {}
    for gpus in (1, 4):
        question = Question(
            architecture=load_architecture(LLAMA_8B), options={**padded, "num_gpus": gpus}, achieved_tflops=150
        )
        (answer,) = estimate(question, resolve_targets(["l40s-48gb"], {}))
        assert answer.mfu is not None
        said[gpus] = (answer.mfu, [note for note in answer.notes if "copy with the longest rows" in note])
    assert said[1][0] == pytest.approx(150 / 362.05, rel=0.01)
    assert not said[1][1]
    assert said[4][0] < 0.8 * said[1][0]
    assert len(said[4][1]) == 1


@pytest.mark.parametrize("bad", [0.0, -5.0, float("nan")])
def test_achieved_tflops_must_be_positive(bad: float) -> None:
    question = Question(architecture=load_architecture(LLAMA_8B), options={"method": "lora"}, achieved_tflops=bad)
    with pytest.raises(InputError, match="--achieved-tflops"):
        forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])


def view(process: Value, usable: float | None, *, allocated: float | None = None) -> MemoryView:
    """A process of which `allocated` bytes are tensors, the rest cached blocks; without it all of it is tensors."""
    return MemoryView(
        allocated_bytes=process if allocated is None else exact(allocated),
        reserved_bytes=process,
        process_bytes=process,
        usable_bytes=usable,
        peak_moment="loss",
        parts_bytes={},
    )


@pytest.mark.parametrize(
    ("usable", "verdict"), [(90.0, "no"), (99.0, "no"), (101.0, "tight"), (200.0, "fits"), (None, None)]
)
def test_verdicts(usable: float | None, verdict: str | None) -> None:
    room = view(Value(value=100.0, low=90.0, high=110.0), usable)
    assert fit_verdict(room, fit_probability(room)) == verdict


@pytest.mark.parametrize(("usable", "verdict"), [(79.0, "no"), (81.0, "tight"), (99.0, "tight"), (125.0, "fits")])
def test_cached_blocks_alone_never_make_a_run_fail(usable: float, verdict: str) -> None:
    """80 of tensors in a process of 100: the allocator gives the other 20 back before it fails."""
    room = view(Value(value=100.0, low=90.0, high=110.0), usable, allocated=80.0)
    assert fit_verdict(room, fit_probability(room)) == verdict


def test_the_probability_at_the_interval_ends_is_a_tenth_and_nine_tenths() -> None:
    process = Value(value=100.0, low=80.0, high=125.0)
    assert fit_probability(view(process, 125.0)) == pytest.approx(0.9)
    assert fit_probability(view(process, 100.0)) == pytest.approx(0.5)
    assert fit_probability(view(process, 80.0)) == pytest.approx(0.1)


def test_cached_blocks_are_needed_by_half() -> None:
    """64 of tensors in a process of 100, no other error: the need is 80 in the median, 64 to 100 in 80% of cases."""
    assert fit_probability(view(exact(100.0), 80.0, allocated=64.0)) == pytest.approx(0.5)
    assert fit_probability(view(exact(100.0), 100.0, allocated=64.0)) == pytest.approx(0.9)
    assert fit_probability(view(exact(100.0), 64.0, allocated=64.0)) == pytest.approx(0.1)


@given(
    tensors=st.floats(1.0, 100.0),
    cached=st.floats(0.0, 80.0),
    width=st.floats(1.0, 1.5),
    usable=st.floats(1.0, 200.0),
)
def test_no_is_less_likely_than_not_and_more_room_is_never_less_likely(
    tensors: float, cached: float, width: float, usable: float
) -> None:
    value = tensors + cached
    process = Value(value=value, low=value / width, high=value * width)
    narrow, wide = (view(process, room, allocated=tensors) for room in (usable, 1.1 * usable))
    less, more = fit_probability(narrow), fit_probability(wide)
    assert less is not None
    assert more is not None
    assert less <= more
    verdicts = [fit_verdict(narrow, less), fit_verdict(wide, more)]
    order = ["no", "tight", "fits"]
    assert order.index(str(verdicts[0])) <= order.index(str(verdicts[1]))
    if verdicts[0] == "no":
        assert less <= 0.5


@settings(max_examples=25, deadline=None)
@given(
    length=st.sampled_from([256, 512, 1024, 2048, 4096]),
    batch=st.integers(1, 4),
    method=st.sampled_from(["lora", "qlora", "full"]),
    checkpointing=st.booleans(),
)
def test_more_work_is_never_faster_nor_smaller(length: int, batch: int, method: str, checkpointing: bool) -> None:
    shared = {"method": method, "gradient_checkpointing": checkpointing}
    small = ask(max_length=length, per_device_train_batch_size=batch, **shared)
    longer = ask(max_length=2 * length, per_device_train_batch_size=batch, **shared)
    wider = ask(max_length=length, per_device_train_batch_size=batch + 1, **shared)
    for more in (longer, wider):
        assert more.step_time_s.value >= small.step_time_s.value * (1.0 - 1e-12)
        assert more.memory.allocated_bytes.value >= small.memory.allocated_bytes.value


def test_a_record_of_one_card_borrows_only_the_link_from_the_prior() -> None:
    """Curves and host stay the record's own; the link between cards, which it has not measured, is the prior's."""
    gpu = load_gpus()["a100-sxm4-80gb"]
    own = replace(prior_factors(gpu), factors={"host_s_per_launch": prior_factors(gpu).factors["host_s_per_launch"]})
    record = {"hardware": {"gpu": gpu.id, "memory_bytes": None}, "trials": [], "fitted": factors_to_dict(own)}
    (target,) = resolve_targets([gpu.id], {gpu.id: record})
    question = Question(architecture=load_architecture(LLAMA_8B), options={"method": "lora", "num_gpus": 4})
    answer = forecast(question, target)
    assert answer.origins["link_bytes_per_s"] == prior_factors(gpu).factors["link_bytes_per_s"].origin
    assert "scale.gemm" not in answer.origins


@pytest.mark.parametrize(
    ("sharding", "times"),
    [
        ("fsdp", 1.0),
        # fp32 moments, parameters and gradients: 4 x (19 moves of AdamW + 2 of clipping), and casts of gradients to
        # fp32 (6, and 4 to flatten) and fp64 (10 + 8 for the norm) and of values back (6), over 2 x (19 + 3) in 16 bits
        *((zero, (84 + 28 + 6) / 44) for zero in ("zero1", "zero2", "zero3")),
    ],
)
def test_a_sharded_optimizer_updates_its_share_only(sharding: str, times: float) -> None:
    """The update moves bytes in proportion to the parameters that a GPU holds; DeepSpeed's are fp32 copies."""
    shared = {"method": "full", "num_gpus": 8}
    whole = ask(sharding="ddp", **shared).time_parts_s["optimizer"]
    part = ask(sharding=sharding, **shared).time_parts_s["optimizer"]
    effect = load_priors()["sharding_effects"].get(sharding, {"value": 0.0})["value"]
    assert part == pytest.approx(times * whole / 8 * math.exp(effect), rel=0.15)


def test_an_assumed_link_widens_the_interval_and_is_named() -> None:
    one, four = ask(method="full"), ask(method="full", num_gpus=4, sharding="ddp")
    assert four.step_time_s.high / four.step_time_s.value > one.step_time_s.high / one.step_time_s.value
    assert four.origins["link_bytes_per_s"] == load_priors()["efficiency"]["link"]["origin"]


def test_several_machines_are_joined_by_a_known_or_given_network() -> None:
    slow = ask(method="full", num_gpus=16, sharding="fsdp", internode_gbps=100)
    fast = ask(method="full", num_gpus=16, sharding="fsdp", internode_gbps=3200)
    known = ask(method="full", num_gpus=16, sharding="fsdp")
    assert slow.step_time_s.value > fast.step_time_s.value
    assert any("joined at 100 Gbit/s each (--internode-gbps)" in note for note in slow.notes)
    assert any("at 1,600 Gbit/s each (azure" in note for note in known.notes), "the fastest instance with this GPU"
    assert known.origins["node_bytes_per_s"] == "assumed"
    two = ask(method="full", num_gpus=16, sharding="fsdp", gpus_per_node=2, internode_gbps=100)
    # one ring, each machine's network; of eight machines more hops are between machines, 10.6 us longer each
    assert two.step_time_s.value == pytest.approx(slow.step_time_s.value, rel=2e-3)
    assert two.step_time_s.value > slow.step_time_s.value


def sharded_on(gpu: str, **options: Any) -> Forecast:
    asked = {"method": "lora", "num_gpus": 4, "sharding": "fsdp", "max_length": 512, **options}
    question = Question(architecture=load_architecture(LLAMA_8B), options=asked)
    return forecast(question, resolve_targets([gpu], {})[0])


@pytest.mark.parametrize("gpu", ["rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb"])
def test_cards_without_peer_access_talk_through_the_host(gpu: str) -> None:
    """GeForce cards, or any card told so; NVLink does not care."""
    without, given = sharded_on(gpu), sharded_on(gpu, p2p=True)
    assert without.step_time_s.value > given.step_time_s.value
    assert any("through host memory" in note for note in without.notes)
    assert sharded_on("l40s-48gb").step_time_s.value < sharded_on("l40s-48gb", p2p=False).step_time_s.value
    assert sharded_on("h100-sxm5-80gb", p2p=False).step_time_s == sharded_on("h100-sxm5-80gb").step_time_s


def test_boards_widen_the_interval_upwards_where_cards_talk_over_pcie() -> None:
    """A slot of few lanes may cost much; where communication hides already, a good one wins little."""

    def reach(gpu: str, **options: Any) -> tuple[float, float]:
        seconds = sharded_on(gpu, **options).step_time_s
        return math.log(seconds.high / seconds.value), math.log(seconds.value / seconds.low)

    up, down = reach("l40s-48gb", max_length=4096)
    alone_up, alone_down = reach("l40s-48gb", max_length=4096, num_gpus=1, sharding="none")
    assert up > down * 1.1
    assert alone_up == pytest.approx(alone_down, rel=0.01)
    over_nvlink, _ = reach("h100-sxm5-80gb", max_length=4096)
    assert up > over_nvlink


def test_a_gpu_without_a_known_network_asks_for_it() -> None:
    with pytest.raises(InputError, match="--internode-gbps 400"):
        forecast(
            Question(architecture=load_architecture(LLAMA_8B), options={"method": "lora", "num_gpus": 16}),
            resolve_targets(["rtx-4090-24gb"], {})[0],
        )


def test_an_achieved_rate_above_the_peak_is_refused() -> None:
    question = Question(architecture=load_architecture(LLAMA_8B), options={"method": "lora"}, achieved_tflops=2000)
    with pytest.raises(InputError, match=r"--achieved-tflops 2000.*peak"):
        forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])


def test_the_flags_of_a_record_reach_every_forecast_that_uses_it() -> None:
    gpu = load_gpus()["a100-sxm4-80gb"]
    fitted = factors_to_dict(prior_factors(gpu))
    record = {"hardware": {"gpu": gpu.id, "memory_bytes": None}, "trials": [], "fitted": fitted, "flags": ["cut_short"]}
    question = Question(architecture=load_architecture(LLAMA_8B), options={"method": "lora"})
    for flags, told in (
        (["cut_short"], "flagged cut_short: its time ended before its trials; calibrate --full has more"),
        (["cut_short", "power_capped"], "flagged cut_short: its time ended"),
        (["shared_cpu", "unstable"], "flagged shared_cpu, unstable: calibrate again on a quiet device"),
        (["power_capped"], ""),
    ):
        (target,) = resolve_targets([gpu.id], {gpu.id: {**record, "flags": flags}})
        notes = [note for note in forecast(question, target).notes if "flagged" in note]
        assert bool(notes) is bool(told), "at its power limit a card under load is normal"
        assert all(told in note for note in notes)
    (target,) = resolve_targets([gpu.id], {gpu.id: {**record, "flags": ["cut_short", "shared_cpu"]}})
    notes = [note for note in forecast(question, target).notes if "flagged" in note]
    assert ["--full" in note for note in notes] == [True, False], "a quiet device makes no time for more trials"


def test_whole_instances_are_told() -> None:
    answer = ask(gpu="gb200-186gb", method="lora")
    assert answer.offer is not None
    assert answer.offer["gpus_paid"] == 4  # GB200 is rented four at a time
    assert any("4 GPUs are paid for, 1 used" in note for note in answer.notes)
