"""torchtune's chunked losses: their published ladder of memory, and how many tokens a chunk has.

What they launch and hold is compared with their code, traced, in `test_variants_against_trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.loss_chunks import chunk_lengths
from tunecast.model.memory import memory_timeline
from tunecast.model.run import Run
from tunecast.model.units import GIB

RunOf = Callable[..., Run]
LADDER = {
    "packed": (60.0, {"torch_compile": False, "loss_type": "nll", "gradient_checkpointing": False}),
    "compile": (51.0, {"loss_type": "nll", "gradient_checkpointing": False}),
    "chunked cross entropy": (42.9, {"gradient_checkpointing": False}),
    "activation checkpointing": (24.9, {}),
    "optimizer fused in backward": (23.1, {"optimizer_in_backward": True}),
    "activation offloading": (21.8, {"optimizer_in_backward": True, "activation_offloading": True}),
    "LoRA": (8.5, {"method": "lora", "lora_r": 64, "activation_offloading": True}),
    "QLoRA": (4.6, {"method": "qlora", "lora_r": 64, "activation_offloading": True}),
}
"""Peak of active memory in GiB by what was switched on, one after the other: Llama 3.2 3B, 2 x 4096 tokens on an A100.

Source: torchtune's README, "Optimization flags" (commit 1814feb17). Its 8-bit AdamW (17.6) is left out: torchao's.
"""


@pytest.mark.parametrize("step", LADDER)
def test_the_published_ladder_of_memory(run_of: RunOf, step: str) -> None:
    """The compiled loss over whole logits holds one more copy of them than inductor's cut lets expect (45.2 of 51)."""
    measured, options = LADDER[step]
    llama = load_architecture("meta-llama/Llama-3.2-3B")
    found: dict[str, Any] = {
        "stack": "torchtune", "method": "full", "max_length": 4096, "per_device_train_batch_size": 2,
        "torch_compile": True, **options,
    }  # fmt: skip
    peak = memory_timeline(llama, run_of(llama, **found)).allocated_bytes / GIB
    assert peak == pytest.approx(measured, rel=0.12 if step == "compile" else 0.08)


@pytest.mark.parametrize("length", [1, 7, 8, 20, 501, 4096])
def test_chunks_are_torchs(run_of: RunOf, length: int) -> None:
    torch = pytest.importorskip("torch")
    llama, row = load_architecture("meta-llama/Llama-3.2-3B"), torch.zeros(1, length)
    for name, cut in (("chunked_ce", row.chunk(8, dim=1)), ("linear_ce", row.tensor_split(8, dim=1))):
        run = run_of(llama, max_length=length, loss_type=name)
        assert chunk_lengths(run) == [part.shape[1] for part in cut if part.shape[1]]


@pytest.mark.parametrize("kind", ["chunked_ce", "linear_ce"])
def test_compiled_chunks_are_a_graph_each(run_of: RunOf, kind: str) -> None:
    """``compile_loss`` compiles ``compute_cross_entropy``: gradients of one chunk's logits are alive at a time."""
    llama = load_architecture("meta-llama/Llama-3.2-3B")
    common = {"stack": "torchtune", "method": "lora", "max_length": 8192, "torch_compile": True}
    peaks = {
        name: memory_timeline(llama, run_of(llama, **common, loss_type=name)).moments["loss"] for name in (kind, "nll")
    }
    logits = 8192 * llama.vocab_size
    assert peaks["nll"] - peaks[kind] == pytest.approx((4 + 4 - 2 - 2 / 8) * logits, rel=0.03)
