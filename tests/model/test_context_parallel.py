"""Rings of keys and values: what attention is left to wait for, against one that is worked off block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.context_parallel import context_operations, exchange_bytes, ring_notes
from tunecast.model.flops import executed_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.joined import joined
from tunecast.model.links import collective_seconds, links_of
from tunecast.model.on_device import job_factors
from tunecast.model.operation import Phase
from tunecast.model.phase_table import phase_table
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_stacks import of_stack
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD
from tunecast.model.target import resolve_targets
from tunecast.model.time import ATTENTION, exposed_ring, stacked

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
LAYERS = 32


def megatron_s(block_s: float, send_s: float, blocks: int) -> float:
    """Seconds of a forward: each block is sent on as soon as it is there."""
    free_s = came_s = 0.0
    for place in range(blocks):
        free_s = max(free_s, came_s) + block_s
        came_s += send_s * (place < blocks - 1)
    return free_s


def torch_s(block_s: float, gather_s: float, blocks: int) -> float:
    """Seconds of a forward: one's own block while all others come."""
    return max(block_s, gather_s) + (blocks - 1) * block_s


def torch_backward_s(block_s: float, gather_s: float, sums_s: float, blocks: int) -> float:
    """Seconds of a backward: gradients leave after each block and have come before those of the next are added."""
    link_s, sums_came_s, free_s = gather_s, 0.0, 0.0
    for place in range(blocks):
        free_s = max(free_s, gather_s if place else 0.0) + block_s
        free_s = max(free_s, sums_came_s)
        link_s = max(link_s, free_s) + sums_s
        sums_came_s = link_s
    return max(free_s, sums_came_s)


@pytest.mark.parametrize("length", [8192, 32768, 262144])
@pytest.mark.parametrize("stack", ["megatron", "torchtitan"])
@pytest.mark.parametrize("gbps", [100, 3200])
def test_attention_waits_as_if_it_were_worked_off_block_by_block(
    make: Make, run_of: RunOf, stack: str, length: int, gbps: int
) -> None:
    """Forward exactly; torch's backward to a block, since gradients are taken to move beside any of its blocks."""
    llama, blocks = make("llama-3.1-8b"), 16
    llama = joined(llama) if stack == "megatron" else llama
    spread = {"stack": stack, "num_gpus": 16, "cp": blocks, "sharding": "zero1" if stack == "megatron" else "fsdp"}
    run = run_of(llama, method="full", max_length=length, gradient_checkpointing=False, **spread)
    (card,) = resolve_targets(["h100-sxm5-80gb"], {})
    factors = job_factors(card, llama, run, {"internode_gbps": gbps})
    table = phase_table(step_operations(llama, run), factors, run=run)
    waits = exposed_ring(stacked([table]), table.device_s[None, :, ATTENTION])[0]
    links = links_of(factors, run, across=True)
    timed: dict[Phase, list[tuple[float, float]]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    for operation in context_operations(llama, run, 0):
        timed[operation.phase].append((collective_seconds(operation, links, 16), operation.count / LAYERS))
    ahead_s, back_s = (table.device_s[segment, ATTENTION] / LAYERS / blocks for segment in (FORWARD, BACKWARD))
    if stack == "megatron":
        ((send_s, times),) = timed[Phase.FORWARD]
        ((back_send_s, back_times),) = timed[Phase.BACKWARD]
        assert (times, back_times) == (blocks - 1, 2 * (blocks - 1))
        taken, taken_back = megatron_s(ahead_s, send_s, blocks), megatron_s(back_s, 2 * back_send_s, blocks)
        last_s, near = 0.0, 1e-9
    else:
        ((gather_s, _),) = timed[Phase.FORWARD]
        (_, (sums_s, _), (last_s, _)) = timed[Phase.BACKWARD]
        taken, taken_back = torch_s(ahead_s, gather_s, blocks), torch_backward_s(back_s, gather_s, sums_s, blocks)
        near = max(back_s, sums_s) * 1.001
    assert waits[FORWARD] / LAYERS == pytest.approx(taken - blocks * ahead_s, rel=1e-6, abs=1e-9)
    assert waits[BACKWARD] / LAYERS + last_s == pytest.approx(taken_back - blocks * back_s, rel=1e-6, abs=near)


def test_a_short_row_waits_and_a_long_one_does_not(make: Make, run_of: RunOf) -> None:
    """Attention grows with the square of the length, what goes around with the length."""
    llama = joined(make("llama-3.1-8b"))
    (card,) = resolve_targets(["h100-sxm5-80gb"], {})

    def waited(length: int) -> float:
        run = run_of(llama, method="full", max_length=length, num_gpus=16, cp=16, stack="megatron", sharding="zero1")
        table = phase_table(step_operations(llama, run), job_factors(card, llama, run, {}), run=run)
        wait = exposed_ring(stacked([table]), table.device_s[None, :, ATTENTION])[0].sum()
        return float(wait / (wait + table.device_s.sum()))

    assert waited(8192) > 0.1
    assert waited(1048576) == 0.0


def test_a_gather_holds_every_block_and_a_ring_two(make: Make, run_of: RunOf) -> None:
    """By hand: 32,768 tokens over 8 GPUs, keys and values of 8 heads of 128 in bf16."""
    llama = make("llama-3.1-8b")
    options = {"method": "full", "max_length": 32768, "num_gpus": 8, "cp": 8}
    block = 4096 * 2 * 8 * 128 * 2
    gathered = run_of(llama, sharding="fsdp", **options)
    passed = run_of(joined(llama), sharding="zero1", stack="megatron", **options)
    assert exchange_bytes(llama, gathered) == 9 * block
    assert exchange_bytes(llama, passed) == 2 * block
    assert exchange_bytes(llama, replace(gathered, cp=1)) == 0


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_only_layers_that_run_again_exchange_again(make: Make, run_of: RunOf, kind: str) -> None:
    """Of 8 layers all, every second, the first three and none are checkpointed."""
    llama = make("llama-3.1-8b", 8)
    options = {"method": "full", "max_length": 32768, "num_gpus": 4, "cp": 4, "cp_kind": kind, "sharding": "fsdp"}

    def again(**checkpoints: Any) -> float:
        run = run_of(llama, **options, **checkpoints)
        found = context_operations(llama, run, 0)
        ahead = sum(each.count for each in found if each.phase is Phase.FORWARD)
        return sum(each.count for each in found if each.phase is Phase.RECOMPUTE) / ahead

    assert again() == 1.0
    assert again(checkpoint_every=2) == 0.5
    assert again(checkpoint_first=3) == 3 / 8
    assert again(gradient_checkpointing=False) == 0.0


@pytest.mark.parametrize("model", ["mistralai/Mistral-7B-v0.1", "google/gemma-3-4b-pt"])
def test_windows_that_sdpa_would_need_a_mask_for_are_refused(model: str) -> None:
    """Parts of a row are shorter than the window, but the row is not; work does not vanish with more parts."""
    architecture = load_architecture(model)
    options = {"method": "full", "max_length": 32768, "num_gpus": 8, "sharding": "fsdp"}
    with pytest.raises(NotSupportedError, match=r"sliding windows of .* --attn-implementation flash_attention_2"):
        resolve_run(architecture, {**options, "cp": 2})
    flash = {**options, "attn_implementation": "flash_attention_2"}
    whole, *parts = (
        executed_flops_per_step(architecture, resolve_run(architecture, {**flash, "cp": cp}).run) / 8 * cp
        for cp in (1, 2, 8)
    )
    assert parts == pytest.approx([whole] * 2, rel=0.01)
    window = min(w for group in architecture.groups if (w := group.layer.attention.window) is not None)
    assert resolve_run(architecture, {**options, "max_length": window, "cp": 2}).run.cp == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_gpus": 8, "cp": 4, "sharding": "fsdp"}, True),
        ({"num_gpus": 8, "cp": 2, "sharding": "fsdp"}, False),
        ({"num_gpus": 8, "cp": 4, "sharding": "zero3", "cp_kind": "ulysses"}, False),
        ({"num_gpus": 8, "cp": 4, "sharding": "zero1", "stack": "megatron"}, False),
        ({"num_gpus": 8, "sharding": "fsdp"}, False),
    ],
)
def test_long_rings_of_torch_are_told_as_little_known(options: dict[str, Any], told: bool) -> None:
    """The published runs behind the words: torchtitan's with rings of 4 and 8 are slower, with 2 as forecast."""
    architecture = of_stack(load_architecture("meta-llama/Llama-3.1-8B"), options)
    run = resolve_run(architecture, {"method": "full", **options}).run
    assert bool(ring_notes(run)) is told
