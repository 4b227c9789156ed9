"""Sharded collectives of models whose layers differ: each layer sends its own bytes."""

from __future__ import annotations

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.resolve import resolve_run
from tunecast.model.sharding import by_size, one_layer_bytes


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-1b-pt", "meta-llama/Llama-3.2-1B"])
def test_every_weight_is_gathered_twice_and_every_gradient_reduced_once(model: str) -> None:
    """bf16, full: 2 bytes a parameter; accelerate keeps the unit with the head (or with a table that is the head too)
    whole for the backward (`test_real_sharding`)."""
    arch = load_architecture(model)
    run = resolve_run(arch, {"method": "full", "num_gpus": 8, "sharding": "fsdp", "max_length": 64}).run
    sent = {
        name: sum(op.total_bytes for op in step_operations(arch, run) if op.name == name)
        for name in ("all_gather", "reduce_scatter")
    }
    assert sent["all_gather"] == pytest.approx(2 * (2 * arch.total_params - arch.embedding_params), rel=2e-3)
    assert sent["reduce_scatter"] == pytest.approx(2 * arch.total_params, rel=2e-3)


def test_a_dense_layer_before_the_experts_is_smaller() -> None:
    arch = load_architecture("deepseek-ai/DeepSeek-V2-Lite")
    run = resolve_run(arch, {"method": "full", "num_gpus": 8, "sharding": "fsdp"}).run
    sizes = by_size(arch, run, one_layer_bytes)
    assert sorted(count for _, count in sizes) == [1, arch.num_layers - 1]
    assert min(size for size, _ in sizes) < 0.2 * max(size for size, _ in sizes)
