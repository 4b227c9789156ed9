"""What torch's own ring attention sends, recorded, beside what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config
from tunecast.model.context_parallel import context_operations
from tunecast.model.operation import Phase
from tunecast.model.resolve import resolve_run

pytest.importorskip("torch")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
HEADS, HEAD_DIM, LENGTH = 8, 16, 1024


@pytest.fixture(params=[2, 4])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int]]:
    """Ranks of which this process is one; nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=request.param, store=FakeStore())
    yield dist.group.WORLD, request.param
    dist.destroy_process_group()


def sent_in_fact(group: Any, size: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """(collective, bytes of what it gives) of one attention's forward and of its backward."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.utils._python_dispatch import TorchDispatchMode

    class Collectives(TorchDispatchMode):
        seen: Counter[tuple[str, int]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            space, _, name = func.name().partition("::")
            if space == "_c10d_functional" and name in ("all_gather_into_tensor", "all_to_all_single"):
                self.seen[name, out.numel() * out.element_size()] += 1
            return out

    def forward(query: Any, key: Any, value: Any, *, is_causal: bool = False, **_: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, is_causal=is_causal)

    def backward(query: Any, key: Any, value: Any, **_: Any) -> Any:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    q, k, v = (torch.randn(1, HEADS, LENGTH // size, HEAD_DIM, dtype=torch.bfloat16) for _ in range(3))
    with Collectives() as ahead:
        ahead.seen = Counter()
        out, lse = _attention._templated_ring_attention(
            group, 2, forward, query=q, key=k, value=v, is_causal=True
        )  # fmt: skip
    with Collectives() as back:
        back.seen = Counter()
        _attention._templated_ring_attention_backward(
            group, 2, backward, grad_out=out, grad_out_name="grad_out", query=q, key=k, value=v, out=out,
            logsumexp=lse, is_causal=True,
        )  # fmt: skip
    return ahead.seen, back.seen


def test_what_goes_around_is_what_torch_sends(group: tuple[Any, int]) -> None:
    _, size = group
    architecture = architecture_from_config(CONFIG, "ring")
    fields = {
        "method": "full", "num_gpus": size, "cp": size, "sharding": "fsdp", "max_length": LENGTH, "precision": "bf16",
        "dtype": "bfloat16", "gradient_checkpointing": False,
    }  # fmt: skip
    run = resolve_run(architecture, fields).run
    named = {"cp.all_gather": "all_gather_into_tensor", "cp.send": "all_to_all_single"}
    counted: dict[Phase, Counter[tuple[str, int]]] = {Phase.FORWARD: Counter(), Phase.BACKWARD: Counter()}
    for operation in context_operations(architecture, run, 0):
        counted[operation.phase][named[operation.name], round(operation.bytes)] += round(operation.count)
    ahead, back = sent_in_fact(*group)
    assert ahead
    assert counted == {Phase.FORWARD: ahead, Phase.BACKWARD: back}
