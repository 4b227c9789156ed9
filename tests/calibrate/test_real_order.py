"""What of a sharded step hides behind nothing, against the order in which two real FSDP2 processes did it (gloo)."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_processes import Held, held_by_each

from tunecast.model.architectures import architecture_from_config
from tunecast.model.collectives import communication_operations
from tunecast.model.operation import Operation, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.sharding import layer_bytes
from tunecast.model.sharding_root import splits_root

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
COMMON = {"num_gpus": 2, "max_length": 64, "precision": "bf16"}
RUNS: dict[str, dict[str, Any]] = {
    "fsdp-full": {**COMMON, "method": "full", "sharding": "fsdp"},
    "fsdp-wide": {**COMMON, "method": "full", "sharding": "fsdp", "reduce_dtype": "fp32"},
    "fsdp-lora": {**COMMON, "method": "lora", "sharding": "fsdp"},
    "grad-op-full": {**COMMON, "method": "full", "sharding": "fsdp-grad-op"},
    "one-group": {
        **COMMON,
        "method": "full",
        "sharding": "fsdp",
        "stack": "torchtune",
        "optim": "adamw_torch",
        "loss_type": "nll",
    },
    "plain-full": {**COMMON, "method": "full", "sharding": "fsdp", "gradient_checkpointing": False},
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """What each process saw, by run."""
    return held_by_each("order_worker.py", tmp_path_factory.mktemp("order"), 2, CONFIG, RUNS)


def sent_bytes(operations: list[Operation], name: str) -> float:
    return sum(op.total_bytes for op in operations if op.name == name)


def waited_bytes(operations: list[Operation], name: str, phase: Phase) -> float:
    return sum(op.total_bytes for op in operations if op.name == name and op.phase is phase and op.blocking)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_waited_for_is_what_nothing_ran_beside(held: Held, name: str) -> None:
    """The first gather of the backward is a root's that is one group; else the last layer's, while the head's runs."""
    architecture = architecture_from_config(CONFIG, "sharded")
    run = resolve_run(architecture, RUNS[name]).run
    found, apart = communication_operations(architecture, run), splits_root(architecture, run)
    for process in held:
        seen = process[name]
        assert sent_bytes(found, "all_gather") == pytest.approx(seen["gathered_bytes"], rel=0.01)
        assert sent_bytes(found, "reduce_scatter") == pytest.approx(seen["reduced_bytes"], rel=0.01)
        waited = waited_bytes(found, "all_gather", Phase.FORWARD)
        assert waited == pytest.approx(seen["gathered_first_bytes"], rel=0.01)
        again = waited_bytes(found, "all_gather", Phase.BACKWARD)
        if apart and run.sharding == "fsdp":
            assert again == 0
            assert seen["gathered_again_bytes"] == pytest.approx(layer_bytes(architecture, run), rel=0.01)
        else:
            assert again == pytest.approx(seen["gathered_again_bytes"], rel=0.01)
        last = waited_bytes(found, "reduce_scatter", Phase.BACKWARD)
        assert last == pytest.approx(seen["reduced_last_bytes"], rel=0.01)
