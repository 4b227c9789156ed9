"""Hybrid sharding and tensor parallelism, against four processes that really train on a 2 x 2 mesh (gloo, CPU)."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_processes import Held, held_by_each

from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import moment_parts
from tunecast.model.parallel import local_architecture
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

PROCESSES = 4
BLOCK_BYTES = 512
"""The allocator's block: our figures round every tensor up to it, the processes count plain bytes."""
TENSORS = 64
"""More than the model has parameters."""
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 1024,
}  # fmt: skip
COMMON = {
    "method": "full", "num_gpus": PROCESSES, "max_length": 64, "precision": "bf16", "gradient_checkpointing": False,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "hsdp": {**COMMON, "sharding": "hsdp", "gpus_per_node": 2},
    "hsdp-inside": {**COMMON, "dp_shard_size": 2},
    "fsdp-tp": {**COMMON, "sharding": "fsdp", "tp": 2, "sequence_parallel": False},
}
EVERY = pytest.mark.parametrize("name", RUNS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """What each process held, by run."""
    return held_by_each("mesh_worker.py", tmp_path_factory.mktemp("spread"), PROCESSES, CONFIG, RUNS)


def case(name: str) -> tuple[Architecture, Run, dict[str, int]]:
    """The model, the run, and what the forecast holds while the optimizer runs."""
    architecture = architecture_from_config(CONFIG, "mesh")
    run = resolve_run(architecture, RUNS[name]).run
    return architecture, run, next(parts for moment, parts in moment_parts(architecture, run) if moment == "optimizer")


@EVERY
def test_parameters_and_gradients_of_each_process(held: Held, name: str) -> None:
    architecture, run, parts = case(name)
    shared_out = 2 * local_architecture(architecture, run, 0).total_params // 2
    for rank in held:
        assert rank[name]["parameter_bytes"] == rank[name]["gradient_bytes"] == shared_out
        assert 0 <= parts["weights"] - rank[name]["parameter_bytes"] < TENSORS * BLOCK_BYTES
        assert 0 <= parts["gradients"] - rank[name]["gradient_bytes"] < TENSORS * BLOCK_BYTES


@EVERY
def test_optimizer_state_of_each_process(held: Held, name: str) -> None:
    _, _, parts = case(name)
    for rank in held:
        assert 0 <= parts["optimizer_state"] - rank[name]["state_bytes"] < 2 * TENSORS * BLOCK_BYTES


def test_activations_are_added_up_as_often_as_in_the_real_code(held: Held) -> None:
    """Two sums per layer each way, one after the embedding, one before the head; the loss is not split here."""
    architecture, run, _ = case("fsdp-tp")
    hidden = 64 * CONFIG["hidden_size"] * 2
    operations = step_operations(architecture, run)
    sums = sum(op.count for op in operations if op.name == "tp.all_reduce" and op.bytes == hidden)
    assert sums == 2 * 2 * CONFIG["num_hidden_layers"] + 2
    assert {rank["fsdp-tp"]["summed"] for rank in held} == {sums}
