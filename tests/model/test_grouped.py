"""Products of stacked experts: which cards have one kernel for them, and what it costs to have none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunecast
from tunecast.calibrate.mock.card import card_of
from tunecast.calibrate.mock.draw import draw_physics
from tunecast.calibrate.mock.kernels import work_of
from tunecast.catalogs.errors import NotSupportedError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.curves import FORMS, columns
from tunecast.model.grouped import has_grouped_kernel, loops_over_experts, stacks_experts
from tunecast.model.inventory import step_operations
from tunecast.model.operation import SYNCHRONISATION, Kind, Operation, Phase, expert_shape
from tunecast.model.resolve import resolve_run

MOE, DENSE, OLDER = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B", "mistralai/Mixtral-8x7B-v0.1"
ATTENTION_ALONE = {"method": "lora", "lora_target_modules": "q_proj,v_proj", "max_length": 1024}
CARDS = {
    "a100-sxm4-80gb": False, "rtx-4090-24gb": False, "l40s-48gb": False, "h100-sxm5-80gb": True, "h20-96gb": True,
    "b200-sxm-180gb": True, "b300-sxm-288gb": True, "rtx-5090-32gb": False, "gb10-128gb": False,
    "mi210-64gb": False, "mi300x-192gb": True, "mi355x-288gb": True,
}  # fmt: skip
"""``_scaled_mm_allowed_device(sm90_only, sm100_only)``: major 9 or 10; Composable Kernel: gfx942, gfx950."""


def products(architecture: Any, **changes: Any) -> list[Operation]:
    run = replace(resolve_run(architecture, ATTENTION_ALONE).run, **changes)
    return step_operations(architecture, run)


@pytest.mark.parametrize("gpu", CARDS)
def test_which_cards_have_the_kernel(gpu: str) -> None:
    (found,) = tunecast.estimate(MOE, gpu=gpu, **ATTENTION_ALONE)
    assert found.run.loops_experts is not CARDS[gpu]
    assert any("one after the other" in note for note in found.notes) is not CARDS[gpu]


def test_other_dtypes_and_other_models() -> None:
    moe, dense = load_architecture(MOE), load_architecture(DENSE)
    run = resolve_run(moe, ATTENTION_ALONE).run
    assert not loops_over_experts(moe, run, "9.0")
    assert loops_over_experts(moe, replace(run, dtype="fp32"), "9.0")
    assert loops_over_experts(moe, run, None)
    assert not loops_over_experts(dense, run, "8.0")
    assert not has_grouped_kernel(None)
    (older,) = tunecast.estimate(OLDER, gpu="a100-sxm4-80gb", hf_code="4.46", **ATTENTION_ALONE)
    assert not older.run.loops_experts
    config = replace(dense, settings='{"num_experts": 128}')
    assert stacks_experts(config)
    assert not stacks_experts(replace(dense, settings='{"num_experts": null, "num_local_experts": 0}'))


def test_cards_on_which_transformers_loops_by_itself_are_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"v100-sxm2-32gb \(compute capability 7\.0\) .* is not built; take a"):
        tunecast.estimate(MOE, gpu="v100-sxm2-32gb", **ATTENTION_ALONE)
    (dense,) = tunecast.estimate(DENSE, gpu="v100-sxm2-32gb", method="lora")
    assert dense.step_time_s is not None


def test_a_measurement_says_and_refuses_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    config = {
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "max_position_embeddings": 512,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    asked: dict[str, Any] = {"method": "lora", "lora_target_modules": "q_proj", "max_length": 64}
    with pytest.raises(NotSupportedError, match=r"mock:t4-16gb.* below 8\.0 is not built"):
        tunecast.measure(str(path), device="mock:t4-16gb", **asked)
    for card, loops in (("a100-sxm4-80gb", True), ("h100-sxm5-80gb", False)):
        found = tunecast.measure(str(path), device=f"mock:{card}", **asked)
        assert found.run.loops_experts is loops
        assert any("one after the other" in note for note in found.notes) is loops


def test_a_search_tells_such_cards_from_others_and_times_the_rest_as_they_are() -> None:
    cards = ["v100-sxm2-32gb", "a100-sxm4-80gb", "h100-sxm5-80gb"]
    asked: dict[str, Any] = {**ATTENTION_ALONE, "tokens": "1M", "global_batch": 8, "max_gpus": 1}
    found = tunecast.recommend(MOE, gpu=cards, **asked)
    reasons = {rejected.gpu: rejected.reason for rejected in found.rejected}
    assert reasons.get("v100-sxm2-32gb") == "not built"
    picks = [picked.forecast for picked in (found.cheapest, found.fastest) if picked is not None]
    assert {forecast.gpu for forecast in picks} <= {"a100-sxm4-80gb", "h100-sxm5-80gb"}
    assert all(forecast.run.loops_experts is (forecast.gpu == "a100-sxm4-80gb") for forecast in picks)
    for picked in picks:
        (alone,) = tunecast.estimate(MOE, gpu=picked.gpu, **ATTENTION_ALONE)
        assert picked.run.loops_experts is alone.run.loops_experts
    refused = tunecast.recommend(MOE, gpu=cards[:1], **asked)
    assert re.search(r"how transformers runs its experts below 8\.0 is not built; take a card", refused.refusal())


def test_a_loop_has_a_product_and_a_launch_per_expert_and_waits_once_per_call() -> None:
    architecture = load_architecture(MOE)
    grouped, looped = products(architecture), products(architecture, loops_experts=True)

    def of_experts(operations: list[Operation]) -> list[Operation]:
        return [op for op in operations if op.kind is Kind.GEMM and op.name.startswith("experts.")]

    one, many = of_experts(grouped), of_experts(looped)
    assert sum(op.total_flops for op in one) == sum(op.total_flops for op in many)
    assert sum(op.total_bytes for op in one) == sum(op.total_bytes for op in many)
    assert sum(op.total_launches for op in many) == 128 * sum(op.total_launches for op in one)
    assert {op.shape for op in one} == {(*op.shape, 128) for op in many}
    waits = [sum(op.count for op in ops if op.name == SYNCHRONISATION) for ops in (grouped, looped)]
    assert waits[1] - waits[0] == sum(op.count for op in many)


@pytest.mark.parametrize("form", ["gemm", "gemm_waves"])
@pytest.mark.parametrize("rows", [8, 4096])
def test_the_kernel_reads_every_experts_weight(form: str, rows: int) -> None:
    """Few rows: as long as the bytes take. Many: as long as the arithmetic takes, and as one product of all rows."""
    params = {"flops_per_s": 1e15, "bytes_per_s": 3e12, "processors": 132.0, "t0_s": 3e-6}
    experts, n, k = 128, 1536, 2048
    flops = 2.0 * experts * rows * n * k
    grouped = Operation(
        name="x", kind=Kind.GEMM, phase=Phase.FORWARD, flops=flops, shape=(rows, n, k, experts), layout="nt"
    )
    looped = replace(grouped, shape=(rows, n, k), launches=float(experts))
    single = replace(grouped, shape=(rows * experts, n, k))
    one, many, whole = FORMS[form](params, columns([grouped, looped, single]))
    read_s = experts * n * k * 2 / params["bytes_per_s"]
    assert one >= max(read_s, flops / params["flops_per_s"])
    assert one < many
    alone = replace(looped, launches=1.0, flops=flops / experts)
    assert many == pytest.approx(experts * FORMS[form](params, columns([alone]))[0])
    if rows == 8:
        assert whole < read_s / 4 < one < 2 * read_s
    else:
        assert one == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("rows", [8, 4096])
def test_a_simulated_card_does_too(rows: int) -> None:
    card = card_of(load_gpus()["h100-sxm5-80gb"])
    physics = draw_physics(card, 3)
    experts, n, k = 128, 1536, 2048
    shape = Operation(
        name="x", kind=Kind.GEMM, phase=Phase.FORWARD, shape=(rows, n, k, experts), layout="nt", dtype="bf16"
    )
    grouped = work_of(card, physics, shape)
    looped = work_of(card, physics, replace(shape, shape=(rows, n, k), launches=float(experts)))
    assert grouped.dram_s >= experts * n * k * 2 / card.bandwidth_bytes_per_s
    assert (grouped.kernels, looped.kernels) == (1, experts)
    assert looped.fixed_s > grouped.fixed_s


def test_experts_share_rows_and_those_without_have_no_product() -> None:
    assert expert_shape(1000, 7, 5, 10, inner=False) == (100, 7, 5, 10)
    assert expert_shape(3, 7, 5, 10, inner=False) == (1, 7, 5, 3)
    assert expert_shape(7, 5, 1000, 10, inner=True) == (7, 5, 100, 10)


def test_this_processor_multiplies_expert_by_expert() -> None:
    """PyTorch's own profiler counts the products inside one call."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped products")
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16()
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        made = torch.nn.functional.grouped_mm(x, weight, offs=ends)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["aten::mm"] == 4
    alone = torch.cat([x[16 * e : 16 * (e + 1)] @ weight[e] for e in range(4)])
    assert np.allclose(made.float(), alone.float(), rtol=0.02, atol=0.1)


def test_a_product_onto_experts_weights_copies_them_first() -> None:
    """PyTorch's own profiler: ``baddbmm`` copies what it adds to, then reads and writes the copy."""
    torch = pytest.importorskip("torch")
    weight, up, down = (torch.randn(4, *size).bfloat16() for size in ((64, 32), (64, 16), (16, 32)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        torch.baddbmm(weight, up, down)
    copied = [event.input_shapes[0] for event in seen.events() if event.name == "aten::copy_"]
    assert copied == [[4, 64, 32]]


def test_adapters_on_experts_move_every_weight() -> None:
    """By hand: a weight is read and its copy written, the copy read and written again, at registration and at use,
    forward and recomputed; the backward reads the weight's gradient once for each factor."""
    architecture = load_architecture(MOE)
    run = resolve_run(architecture, {"method": "lora", "max_length": 1024}).run
    folds = [op for op in step_operations(architecture, run) if op.name in ("experts.up.fold", "experts.down.fold")]
    weights_bytes = 48 * 128 * 3 * 768 * 2048 * 2
    copies = [op for op in folds if op.kind is Kind.MEMORY]
    assert sum(op.total_bytes for op in copies) == 2 * 2 * 2 * weights_bytes
    products = [op for op in folds if op.kind is Kind.GEMM]
    for phase, times in ((Phase.FORWARD, 4), (Phase.RECOMPUTE, 4), (Phase.BACKWARD, 2)):
        moved = sum(op.total_bytes for op in products if op.phase is phase)
        assert times * weights_bytes < moved < 1.06 * times * weights_bytes
    params = {"flops_per_s": 1e15, "bytes_per_s": 3e12, "processors": 132.0}
    for form in ("gemm", "gemm_waves"):
        seconds = FORMS[form](params, columns(products))
        assert (seconds >= [op.bytes / params["bytes_per_s"] for op in products]).all()
    card = card_of(load_gpus()["h100-sxm5-80gb"])
    physics = draw_physics(card, 3)
    assert all(work_of(card, physics, op).dram_s >= op.bytes / card.bandwidth_bytes_per_s for op in products)


def test_a_step_that_waits_for_its_weights_is_bound_by_bandwidth() -> None:
    """Experts of few rows each, and adapters on their weights: products, but not arithmetic."""
    (few,) = tunecast.estimate(MOE, gpu="h100-sxm5-80gb", method="lora", max_length=1024)
    assert few.bound_by == "bandwidth"
    assert few.time_parts_s["gemm"] > few.time_parts_s["memory"]
    (dense,) = tunecast.estimate(DENSE, gpu="h100-sxm5-80gb", **{**ATTENTION_ALONE, "max_length": 8192})
    assert dense.bound_by == "compute"
