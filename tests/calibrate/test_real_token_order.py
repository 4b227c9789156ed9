"""Tokens exchanged by PyTorch's tensor parallelism and copied into order, against its own DTensor on a fake group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.resolve import resolve_run

PARTS, LENGTH, HIDDEN = 4, 64, 256
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Four ranks of which this process is one; nothing is sent."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=PARTS, store=FakeStore())
    yield init_device_mesh("cpu", (PARTS,))
    dist.destroy_process_group()


def copied_in_fact(mesh: Any, samples: int) -> tuple[int, int]:
    """Elements that one all-gather and one reduce-scatter of (samples, LENGTH, HIDDEN) copy, by ``cat``."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.elements += out.numel() if func is torch.ops.aten.cat.default else 0
            return out

    found = []
    for length, start, end in ((LENGTH // PARTS, Shard(1), Replicate()), (LENGTH, Partial(), Shard(1))):
        tokens = DTensor.from_local(torch.ones(samples, length, HIDDEN), mesh, [start], run_check=False)
        with Copies() as seen:
            tokens.redistribute(mesh, [end])
        found.append(seen.elements)
    return found[0], found[1]


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_copies_are_those_of_dtensor(mesh: Any, samples: int) -> None:
    architecture = architecture_from_config(CONFIG, "order")
    fields = {
        "method": "full", "num_gpus": 2 * PARTS, "tp": PARTS, "sharding": "fsdp", "max_length": LENGTH,
        "per_device_train_batch_size": samples, "gradient_checkpointing": False, "sequence_parallel": True,
    }  # fmt: skip
    operations = step_operations(architecture, resolve_run(architecture, fields).run)
    count = {
        name: sum(op.count for op in operations if op.name == name and op.bytes >= samples * LENGTH * HIDDEN * 2)
        for name in ("tp.all_gather", "tp.reduce_scatter")
    }
    per_gather, per_scatter = copied_in_fact(mesh, samples)
    expected = count["tp.all_gather"] * per_gather + count["tp.reduce_scatter"] * per_scatter
    read_and_written = 2 * 2 * expected
    assert count["tp.reduce_scatter"] > 0
    assert sum(op.bytes * op.count for op in operations if op.name == "reorder_tokens") == read_and_written > 0


@pytest.mark.parametrize(
    "others", [{"num_gpus": PARTS, "sharding": "none"}, {"async_tp": True, "torch_compile": True}, {"tp": 1}]
)
def test_megatron_and_asynchronous_exchanges_copy_nothing(others: dict[str, Any]) -> None:
    architecture = architecture_from_config(CONFIG, "order")
    fields = {
        "method": "full", "num_gpus": 2 * PARTS, "tp": PARTS, "sharding": "fsdp", "max_length": LENGTH,
        "per_device_train_batch_size": 2, "gradient_checkpointing": False, **others,
    }  # fmt: skip
    operations = step_operations(architecture, resolve_run(architecture, fields).run)
    assert all(op.name != "reorder_tokens" for op in operations)
