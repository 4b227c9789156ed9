"""Adapters that are units of FSDP 1, against PEFT's own policy and what torch says of the host's lead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tunecast
from tunecast.catalogs.gpus import find_gpu
from tunecast.explain import explain
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.columns import scales
from tunecast.model.experts_modules import in_modules
from tunecast.model.exposed import asks_late, waits_in_layers
from tunecast.model.hooks import adapter_visits_of, wraps_adapters
from tunecast.model.host import UNITS, WALKED, host_seconds
from tunecast.model.inventory import step_operations
from tunecast.model.phase_table import phase_table
from tunecast.model.priors import prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD
from tunecast.model.time import run_clocks

SHARDED = {"num_gpus": 2, "sharding": "fsdp", "fsdp_version": 1}


def run_of(model: str, **options: Any) -> Run:
    return resolve_run(load_architecture(model), {"method": "lora", "max_length": 64, **SHARDED, **options}).run


def visits(model: str, run: Run, *, platform: str = "cuda") -> np.ndarray[Any, np.dtype[np.float64]]:
    operations = step_operations(load_architecture(model), run, platform=platform)
    counts = np.array([[operation.count] for operation in operations])
    return adapter_visits_of(operations, counts, run)[0]


def waits(architecture: Architecture, run: Run) -> bool:
    operations = step_operations(architecture, run, platform="cuda")
    return waits_in_layers(operations, np.array([[operation.count] for operation in operations]))


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B"])
def test_units_are_those_that_pefts_policy_wraps(model: str, targets: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    from peft.utils.other import fsdp_auto_wrap_policy

    from tunecast.calibrate.trace.hf import build_model

    run = run_of(model, lora_target_modules=targets)
    real = build_model(load_architecture(model), replace(run, num_gpus=1, sharding="none"), device="meta")
    policy = fsdp_auto_wrap_policy(real)
    wrapped = [
        module
        for module in real.modules()
        if policy(module=module, recurse=False, nonwrapped_numel=0) and not list(module.children())
    ]
    assert len(wrapped) > 0
    assert visits(model, run)[FORWARD] == len(wrapped)


def test_a_unit_is_entered_forward_to_recompute_and_backward() -> None:
    model = "Qwen/Qwen2.5-0.5B"
    kept, again = (run_of(model, gradient_checkpointing=checkpointing) for checkpointing in (False, True))
    assert visits(model, kept)[BACKWARD] == visits(model, kept)[FORWARD]
    last = 24  # of each layer, whose result nothing of the backward needs: recomputing ends before it
    assert visits(model, again)[BACKWARD] == 2 * visits(model, again)[FORWARD] - last
    twice = replace(again, gradient_accumulation_steps=2)
    assert (visits(model, twice) == 2 * visits(model, again)).all()


@pytest.mark.parametrize(
    ("options", "wraps"),
    [
        ({}, True),
        ({"sharding": "hsdp", "num_gpus": 16}, True),
        ({"method": "qlora"}, True),
        ({"stack": "llama-factory"}, True),
        ({"fsdp_version": 2}, False),
        ({"method": "full"}, False),
        ({"sharding": "zero3"}, False),
        ({"sharding": "fsdp-grad-op"}, True),
        ({"trainer_loop": False}, False),
        ({"method": "qlora", "fused_kernels": "lora"}, False),
        ({"stack": "axolotl"}, False),  # its kernels fuse adapters
    ],
)
def test_only_the_trainer_wraps_adapters_and_only_by_fsdp_1(options: dict[str, Any], wraps: bool) -> None:
    if options.get("sharding") == "zero3":
        options = {**options, "fsdp_version": None}
    asked = {"method": "lora", "max_length": 64, **SHARDED, **options}
    asked = {name: value for name, value in asked.items() if value is not None}
    assert wraps_adapters(resolve_run(load_architecture("Qwen/Qwen2.5-0.5B"), asked).run) is wraps


def test_gathers_are_late_where_the_host_cannot_be_ahead() -> None:
    dense, grouped = load_architecture("meta-llama/Llama-2-7b-hf"), load_architecture("mistralai/Mixtral-8x7B-v0.1")
    adapted, whole = run_of(dense.name), run_of(dense.name, method="full")
    assert not waits(dense, adapted)
    padded = replace(adapted, attn_implementation="flash_attention_2", padding_mask=True)
    assert not waits(dense, padded), "the lengths of padded rows are read once a layer, before its attention"
    experts = run_of(grouped.name, lora_target_modules="q_proj,v_proj")
    assert not waits(grouped, experts), "transformers 5 groups experts on the device"
    assert waits(in_modules(grouped), experts), "transformers 4 looks up the rows of each expert"
    assert waits(dense, run_of(dense.name, method="qlora", quant_method="bnb-8bit")), "8 bits look for outliers"
    assert list(asks_late(adapted, False)) == [0.0, 1.0, 0.0, 0.0]
    assert list(asks_late(whole, False)) == [0.0] * 4
    assert list(asks_late(whole, True)) == [1.0, 0.0, 0.0, 0.0]
    assert list(asks_late(replace(whole, sharding="zero3"), False)) == [1.0] * 4
    assert list(asks_late(replace(adapted, num_gpus=1, sharding="none"), True)) == [0.0] * 4


KERNELS = 8
"""Of a map's own work, each as long as the others."""


def two_clocks(maps: list[tuple[float, float]], visit_s: float, layers: int) -> float:
    """Seconds in which the device stands still, kernel by kernel: it works off what was issued, in order; the host asks
    torch's own queue of free events before each unit, and waits for the one that it is given."""
    torch = pytest.importorskip("torch.distributed.fsdp._limiter_utils")
    free, host, device = torch._FreeEventQueue(), 0.0, 0.0

    def kernel(work: float) -> float:
        return max(device, host) + work

    for _ in range(layers):
        for work, launches_s in maps:
            for _ in range(KERNELS):
                host += launches_s / KERNELS
                device = kernel(work / KERNELS)
            for _ in ("lora_A", "lora_B"):
                event = free.dequeue_if_needed()
                host = max(host, event or 0.0) + visit_s
                device = kernel(0.0)
                free.enqueue(device)
    return device - layers * sum(work for work, _ in maps)


@pytest.mark.parametrize("length", [64, 512, 2048, 8192])
@pytest.mark.parametrize("targets", ["q_proj,k_proj,v_proj,o_proj", "all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_device_stands_still_as_long_as_on_two_clocks(
    length: int, targets: str, gradient_checkpointing: bool
) -> None:
    """Layers whose maps are as long as on a card, long ones among short ones, map by map."""
    model, layers = "mistralai/Mistral-7B-v0.1", 32
    asked: dict[str, Any] = {"lora_target_modules": targets, "gradient_checkpointing": gradient_checkpointing}
    run = run_of(model, max_length=length, **asked)
    factors = prior_factors(find_gpu("a100-sxm4-80gb"))
    table = phase_table(step_operations(load_architecture(model), run), factors, run=run)
    values = {name: factor.value for name, factor in factors.factors.items()}
    visit_s = values["host_s_per_launch"] * values["scale.host_units"]
    issue = host_seconds(values)
    work, whole = table.device_s @ scales(values), table.device_s.sum(axis=1)
    still = 0.0
    for segment in (FORWARD, BACKWARD):
        launches_s = table.launches[segment] @ issue - table.launches[segment, [UNITS, WALKED]] @ issue[[UNITS, WALKED]]
        each = list(zip(table.gap_work_s[segment], table.gap_launches[segment], table.gap_visits[segment], strict=True))
        each = [gap for gap in each if gap[2] > 0.0]
        every = sum(launched for _, launched, _ in each)
        maps = [
            (float(seconds / layers * work[segment] / whole[segment]), float(launches_s * launched / every / layers))
            for seconds, launched, _ in each
        ]
        still += two_clocks(maps, visit_s, layers)
    paused = run_clocks(table, values, synchronous=False).units_s
    assert paused == pytest.approx(still, rel=0.05, abs=0.04 * float(work.sum())), "within 4% of the device's work"


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "h200-sxm5-141gb"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_more_work_never_takes_less_time_nor_less_than_the_host(gpu: str, method: str) -> None:
    options: dict[str, Any] = {"gpu": gpu, "method": method, **SHARDED}
    found = [
        tunecast.estimate("mistralai/Mistral-7B-v0.1", max_length=length, **options)[0].step_time_s.value
        for length in (64, 256, 512, 1024, 2048, 4096, 8192)
    ]
    assert found == sorted(found)


@pytest.mark.parametrize(("model", "collides"), [("Qwen/Qwen2.5-0.5B", 128), ("mistralai/Mixtral-8x7B-v0.1", 8)])
def test_a_rank_that_is_a_width_of_the_model_has_as_many_visits(model: str, collides: int) -> None:
    ranks = (collides - 1, collides, collides + 1)
    found = [visits(model, run_of(model, lora_r=rank, lora_target_modules="q_proj,v_proj")) for rank in ranks]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_much_time_for_units_is_told_and_what_spares_it() -> None:
    asked: dict[str, Any] = {"method": "lora", "gpu": "a100-sxm4-80gb", "max_length": 512, **SHARDED}
    (found,) = tunecast.estimate("meta-llama/Llama-2-7b-hf", **asked)
    share = found.time_parts_s["units"] / found.step_time_s.value
    assert any(f"{share:.0%} of the step" in note and "--fsdp-version 2" in note for note in found.notes)
    (spared,) = tunecast.estimate("meta-llama/Llama-2-7b-hf", **{**asked, "fsdp_version": 2})
    assert "units" not in spared.time_parts_s
    assert spared.step_time_s.value < found.step_time_s.value


def test_its_cost_and_origin_are_told() -> None:
    options = {"method": "lora", "max_length": 512, "gpu": "a100-sxm4-80gb", **SHARDED}
    terms = {term.name: term for term in explain("meta-llama/Llama-2-7b-hf", **options)}
    assert terms["units"].origin == "published"
    assert "visits of adapters" in terms["optimizer step"].inputs
