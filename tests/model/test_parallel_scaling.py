"""Scaling efficiency, Amdahl's fraction as a result, and the classic estimate beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunecast import estimate
from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.on_device import target_factors
from tunecast.model.parallel_scaling import amdahl_speedup, serial_fraction_of
from tunecast.model.phase_table import phase_table
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets
from tunecast.model.time import run_clocks
from tunecast.parallel_table import scaling_rows


def ask(gpu: str = "h100-sxm5-80gb", **options: Any) -> Forecast:
    question = Question(
        architecture=load_architecture("meta-llama/Llama-3.1-8B"),
        options={"method": "full", "sharding": "fsdp", "max_length": 4096, **options},
    )
    return forecast(question, resolve_targets([gpu], {})[0])


@given(fraction=st.floats(0, 1), gpus=st.integers(2, 100_000))
def test_the_fraction_is_the_inverse_of_amdahls_law(fraction: float, gpus: int) -> None:
    efficiency = amdahl_speedup(fraction, gpus) / gpus
    assert serial_fraction_of(efficiency, gpus) == pytest.approx(fraction, abs=1e-6)


def test_amdahl_by_hand() -> None:
    """5% serial on 8 GPUs: 1 / (0.05 + 0.95 / 8) = 5.93."""
    assert amdahl_speedup(0.05, 8) == pytest.approx(5.926, abs=1e-3)


def test_efficiency_is_the_speed_over_that_of_one_gpu() -> None:
    found, one = ask("a100-sxm4-80gb", num_gpus=64, internode_gbps=25), ask("a100-sxm4-80gb", sharding=None)
    assert found.scaling is not None
    assert found.scaling.speedup == pytest.approx(found.tokens_per_s.value / one.tokens_per_s.value)
    assert found.scaling.speedup == pytest.approx(64 * found.scaling.efficiency)
    assert found.scaling.bound_by == "all_gather between machines"
    assert found.bound_by == "communication"
    lost = found.scaling.exposed_communication_s + found.scaling.bubble_s + found.scaling.slower_work_s
    assert lost == pytest.approx(found.step_time_s.value * (1 - found.scaling.efficiency))


def test_tensor_parallelism_repeats_norms_and_shrinks_products() -> None:
    """Eight GPUs on one sample: norms and residuals are done on every GPU, and products have an eighth of the width."""
    found, one = ask(num_gpus=8, tp=8, sequence_parallel=False, sharding=None), ask(sharding=None)
    assert found.scaling is not None
    assert found.scaling.speedup == pytest.approx(found.tokens_per_s.value / one.tokens_per_s.value)
    assert found.scaling.slower_work_s > 0
    shared = ask(num_gpus=8, tp=8, sequence_parallel=True, sharding=None)
    assert shared.scaling is not None
    assert shared.scaling.slower_work_s < found.scaling.slower_work_s


def test_memory_of_several_gpus_says_that_it_is_told_otherwise_than_that_of_one() -> None:
    """A share of the step stands against a replay of it; Unsloth's allocator is replayed on neither."""
    lora = {"method": "lora", "max_length": 2048, "gpu": "a100-sxm4-80gb", "sharding": "ddp"}
    told = {"one": ask(**{**lora, "sharding": None}), "two": ask(**lora, num_gpus=2)}
    told["unsloth"] = ask(**lora, num_gpus=2, stack="unsloth")
    assert [name for name, found in told.items() if any("it is replayed" in note for note in found.notes)] == ["two"]


def test_slower_networks_scale_worse_and_one_gpu_not_at_all() -> None:
    slow, fast = (ask(num_gpus=64, internode_gbps=gbps) for gbps in (50, 3200))
    assert slow.scaling is not None
    assert fast.scaling is not None
    assert slow.scaling.efficiency < fast.scaling.efficiency
    assert ask(sharding=None).scaling is None


def test_a_pipeline_with_few_micro_batches_is_bound_by_its_bubble() -> None:
    """8 stages, 8 micro-batches: idle 7/8 of the working time of forward and backward of four layers, of which the last
    stage has the head beside: as many parameters as 2.4 of them."""
    found = ask(num_gpus=8, pp=8, sharding=None, gradient_accumulation_steps=8)
    assert found.scaling is not None
    assert found.scaling.bound_by == "pipeline bubble"
    idle = found.time_parts_s["bubble"]
    work = found.step_time_s.value - idle
    assert 7 / 8 * 4.0 / 6.5 < idle / work < 7 / 8 * 4.0 / 5.7


@pytest.mark.parametrize(("stages", "micro_batches"), [(8, 2), (4, 1), (2, 1), (2, 8)])
def test_a_bubble_bounds_a_step_where_it_is_longer_than_all_work(stages: int, micro_batches: int) -> None:
    """Idle (p - 1) / m of the working time (Narayanan et al. 2021): more than all work where that is 1 or more."""
    found = ask(num_gpus=8, method="lora", pp=stages, gradient_accumulation_steps=micro_batches, sharding=None)
    assert (found.bound_by == "pipeline bubble") == ((stages - 1) / micro_batches >= 1)


def test_waiting_that_a_shared_update_makes_up_for_is_told() -> None:
    """70B on 64 GPUs: one alone would update all of it, so the efficiency loses less than what is waiting."""
    options = {"method": "full", "num_gpus": 64, "sharding": "fsdp", "max_length": 4096, "internode_gbps": 1600}
    question = Question(architecture=load_architecture("meta-llama/Llama-3.1-70B"), options=options)
    found = forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])
    assert found.scaling is not None
    waiting = found.scaling.exposed_communication_s / found.step_time_s.value
    assert waiting > 0.05
    assert 1.0 > found.scaling.efficiency > 1.0 - waiting / 2
    (told,) = [note for note in found.notes if "does not show: a step also has" in note]
    assert "less of optimizer" in told
    assert not any("hides" in note for note in ask(num_gpus=8, sharding="ddp", method="lora").notes)


def test_the_classic_estimate_stands_beside() -> None:
    found = ask(num_gpus=8, serial_fraction=0.05).scaling
    assert found is not None
    assert found.amdahl is not None
    assert found.amdahl.speedup == pytest.approx(5.926, abs=1e-3)
    step = ask(num_gpus=8)
    assert step.scaling is not None
    unhindered = step.step_time_s.value * step.scaling.efficiency
    assert found.amdahl.step_time_s == pytest.approx(unhindered * 8 / 5.926, rel=1e-3)


@pytest.mark.parametrize(
    ("fraction", "gpus"), [(2, {"num_gpus": 8}), (3, {"sharding": None}), ("some", {"sharding": None}),
                           (-1, {"num_gpus": 8, "sharding": "ddp"})]
)  # fmt: skip
def test_a_serial_fraction_is_a_share_on_any_number_of_gpus(fraction: object, gpus: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"--serial-fraction is {fraction!r}, which is not from 0 to 1"):
        ask(**gpus, serial_fraction=fraction)


def test_more_than_all_of_the_gpus_is_said_to_be_the_update_that_they_share() -> None:
    """One A100 moves 8 billion parameters' gradients and states each step; of eight under FSDP each moves an 8th."""
    found = ask("a100-sxm4-80gb", num_gpus=8, max_length=1024)
    one = ask("a100-sxm4-80gb", sharding=None, max_length=1024)
    assert found.scaling is not None
    assert found.scaling.efficiency > 1
    assert one.time_parts_s["optimizer"] - found.time_parts_s["optimizer"] > -found.scaling.slower_work_s / 2 > 0
    assert any("8 GPUs are more than 8 times as fast as one" in note for note in found.notes)
    plain = ask("a100-sxm4-80gb", num_gpus=8, sharding="ddp", method="lora")
    assert plain.scaling is not None
    assert plain.scaling.efficiency <= 1.005
    assert not any("times as fast as one" in note for note in plain.notes)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp", "fsdp-grad-op"])
def test_efficiency_is_counted_against_the_forecast_of_one_gpu(sharding: str) -> None:
    """Adapters, too, are those that one GPU would have: PEFT keeps them in fp32, FSDP gathers them in bf16."""
    one = ask("a100-sxm4-80gb", method="lora", sharding=None)
    found = ask("a100-sxm4-80gb", method="lora", num_gpus=4, sharding=sharding)
    assert found.scaling is not None
    assert found.scaling.efficiency == pytest.approx(found.tokens_per_s.value / one.tokens_per_s.value / 4)
    told = any("adapters are gathered in bf16 here, in fp32 on one GPU" in note for note in found.notes)
    assert told is (any(" less of " in note for note in found.notes) and sharding.startswith("fsdp"))


@pytest.mark.parametrize("gpu", ["t4-16gb", "v100-sxm2-16gb", "a100-sxm4-80gb"])
@pytest.mark.parametrize("sharding", ["fsdp", "zero1"])
def test_one_gpu_alone_is_the_run_that_is_forecast_for_one(gpu: str, sharding: str) -> None:
    """On cards without bf16 weights trained whole are fp32, which FSDP keeps in shards alone."""
    asked = {"method": "full", "max_length": 2048, "per_device_train_batch_size": 2}
    one, two = (
        estimate("Qwen/Qwen2.5-1.5B", gpu=gpu, num_gpus=n, **({"sharding": sharding} if n > 1 else {}), **asked)[0]
        for n in (1, 2)
    )
    assert two.scaling is not None
    assert two.scaling.efficiency == pytest.approx(two.tokens_per_s.value / one.tokens_per_s.value / 2)


def test_gpus_slower_than_one_have_no_serial_fraction() -> None:
    """Llama-3.1-8B's 16 GB of weights per pass over 10 Gbit/s take a minute; one GPU needs less than a second."""
    found = ask("a100-sxm4-80gb", num_gpus=16, internode_gbps=10, max_length=1024).scaling
    assert found is not None
    assert found.speedup < 1
    assert found.serial_fraction is None
    (_, fraction, *_) = scaling_rows(ask("a100-sxm4-80gb", num_gpus=16, internode_gbps=10, max_length=1024))
    assert fraction[1:] == ("–", "slower than one GPU")


def test_what_comes_once_a_step_is_not_in_the_bubble() -> None:
    """A longer sum of gradients after the last micro-batch lengthens the step by itself, and the bubble not at all."""
    llama, (target,) = load_architecture("meta-llama/Llama-3.1-8B"), resolve_targets(["h100-sxm5-80gb"], {})
    run = resolve_run(llama, {"method": "full", "max_length": 2048, "num_gpus": 8, "pp": 4}, gpu_has_bf16=True).run
    factors = target_factors(target, run)
    table = phase_table(step_operations(llama, run), factors, run=run)
    values = {name: factor.value for name, factor in factors.factors.items()} | {"exposed_frac": 1.0, "scale.link": 1.0}
    longer = replace(table, once_s=table.once_s + np.array([0.0, 0.5, 0.0, 0.0]))
    before, after = (run_clocks(each, values, synchronous=False) for each in (table, longer))
    assert before.bubble_s > 0.0
    assert after.bubble_s == pytest.approx(before.bubble_s)
    assert after.step_s - before.step_s == pytest.approx(0.5)


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])
@pytest.mark.parametrize(("micro_batches", "waits"), [(1, False), (4, True)])
def test_stages_wait_for_gradients_reduced_after_every_micro_batch_of_several(
    sharding: str, micro_batches: int, waits: bool
) -> None:
    """Those of a step's only micro-batch are reduced at its end, when no stage waits for another any more."""
    llama, (target,) = load_architecture("meta-llama/Llama-3.1-8B"), resolve_targets(["h100-sxm5-80gb"], {})
    layout = {"num_gpus": 8, "pp": 2, "sharding": sharding}
    layout |= {"dp_shard_size": 2} if sharding == "hsdp" else {}
    layout |= {"gradient_accumulation_steps": micro_batches, "sync_each_micro_batch": True}
    asked = {"method": "full", "max_length": 2048, **layout}
    run = resolve_run(llama, asked, gpu_has_bf16=True).run
    factors = target_factors(target, run)
    values = {name: factor.value for name, factor in factors.factors.items()}
    operations = step_operations(llama, run)
    without = [each for each in operations if each.name not in ("reduce_scatter", "all_reduce")]
    assert len(without) < len(operations)
    bubble_s, bare_s = (
        run_clocks(phase_table(each, factors, run=run), values, synchronous=False).bubble_s
        for each in (operations, without)
    )
    assert (bubble_s > 1.01 * bare_s) == waits
    assert bubble_s >= 0.999 * bare_s > 0.0


def test_a_stack_in_fp32_scales_by_what_deepspeed_saves_and_says_so() -> None:
    one = ask("a100-sxm4-80gb", method="lora", stack="trl", sharding=None)
    found = ask("a100-sxm4-80gb", method="lora", stack="trl", num_gpus=4, sharding="zero2")
    assert found.scaling is not None
    assert found.scaling.efficiency == pytest.approx(found.tokens_per_s.value / one.tokens_per_s.value / 4)
    assert any("the job computes in bf16, one GPU in bf16-autocast" in note for note in found.notes)


def test_one_gpu_alone_has_what_a_card_without_bf16_gives_it() -> None:
    """V100s: the job runs in pure fp16, one GPU under fp16 autocast over fp32 weights, typed bf16 or not."""
    typed = {"method": "full", "max_length": 512, "precision": "bf16"}
    one = ask("v100-sxm2-32gb", **typed, sharding=None)
    found = ask("v100-sxm2-32gb", **typed, num_gpus=4, sharding="zero2")
    assert found.scaling is not None
    assert found.scaling.efficiency == pytest.approx(found.tokens_per_s.value / one.tokens_per_s.value / 4)


def test_slower_work_names_the_part_that_grew_most() -> None:
    """DeepSpeed's hooks around every module cost the host time: LoRA on cards as fast as an H100 waits for nothing
    else, and its adapters' gradients are small."""
    found = ask(method="lora", sharding="zero3", num_gpus=2, max_length=512)
    alone = ask(method="lora", sharding=None, max_length=512)
    assert found.scaling is not None
    assert found.bound_by == "host"
    assert found.scaling.slower_work_s > found.scaling.exposed_communication_s
    assert found.scaling.bound_by == "work slower in zero3 (host)"
    grown = found.time_parts_s["host"] - alone.time_parts_s.get("host", 0.0)
    assert grown > 0.5 * found.scaling.slower_work_s


@pytest.mark.parametrize(("micro_batches", "told"), [(1, True), (4, True), (32, False)])
def test_a_pipeline_that_idles_says_so_and_what_shortens_it(micro_batches: int, told: bool) -> None:
    found = ask(num_gpus=8, pp=8, sharding="none", gradient_accumulation_steps=micro_batches)
    notes = [note for note in found.notes if note.startswith("stages wait")]
    assert bool(notes) == told
    if told:
        idle = found.time_parts_s["bubble"] / found.step_time_s.value
        assert f"stages wait {idle:.0%} of the step" in notes[0]
        assert f"7 / {micro_batches}; with --gradient-accumulation-steps 32 it would be 7 / 32" in notes[0]


@pytest.mark.parametrize(
    ("gpu", "layout"),
    [
        ("h100-sxm5-80gb", {"pp": 2}), ("h100-sxm5-80gb", {"tp": 2, "pp": 2}), ("l40s-48gb", {"pp": 2}),
        ("a100-sxm4-80gb", {"tp": 4}),
    ],
)  # fmt: skip
def test_another_copy_of_a_split_model_never_speeds_the_others_up(gpu: str, layout: dict[str, Any]) -> None:
    """Twice the GPUs do twice the work at most: DDP between copies adds an exchange, and takes none away."""
    split = int(layout.get("tp", 1)) * int(layout.get("pp", 1))
    shared: dict[str, Any] = {**layout, "gradient_accumulation_steps": 8}
    one = ask(gpu, num_gpus=split, sharding="none", **shared)
    two = ask(gpu, num_gpus=2 * split, sharding="ddp", **shared)
    assert two.step_time_s.value >= one.step_time_s.value
    assert two.time_parts_s["gemm"] == pytest.approx(one.time_parts_s["gemm"])


@pytest.mark.parametrize("gpu", ["h100-sxm5-80gb", "a100-sxm4-80gb"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_shards_within_groups_are_fsdp_and_an_exchange_more(gpu: str, method: str) -> None:
    """HSDP over two machines is FSDP in each of them, whose gradients are then added up."""
    hybrid = ask(gpu, method=method, num_gpus=16, sharding="hsdp", dp_shard_size=8)
    inside = ask(gpu, method=method, num_gpus=8, sharding="fsdp")
    assert hybrid.time_parts_s["gemm"] == pytest.approx(inside.time_parts_s["gemm"])
    assert hybrid.step_time_s.value >= inside.step_time_s.value


def test_more_stages_than_layers_are_refused_in_those_words() -> None:
    with pytest.raises(InputError, match=r"--pp 64 is more stages than the 32 layers .* use at most --pp 32"):
        ask(num_gpus=64, pp=64, sharding="none")


def test_stages_of_torchtitan_keep_what_they_gathered() -> None:
    """``reshard_after_forward`` is off beside a pipeline, so that no micro-batch gathers weights again."""
    titan: dict[str, Any] = {"stack": "torchtitan", "num_gpus": 32, "gradient_accumulation_steps": 8, "sharding": None}
    staged, flat = ask(**titan, pp=4), ask(**titan)
    assert (staged.run.sharding, flat.run.sharding) == ("fsdp-grad-op", "fsdp")
    assert staged.step_time_s.value < ask(**{**titan, "sharding": "fsdp"}, pp=4).step_time_s.value


def test_micro_batches_that_megatron_cannot_deal_out_are_refused() -> None:
    """6 over 4 stages in turns leave 2 over (``schedules.py``); whole turns go."""
    staged: dict[str, Any] = {"num_gpus": 8, "pp": 4, "pp_interleave": 2, "sharding": None}
    with pytest.raises(InputError, match="leaves 2 of them over"):
        ask(**staged, gradient_accumulation_steps=6)
    assert ask(**staged, gradient_accumulation_steps=8).step_time_s.value > 0
