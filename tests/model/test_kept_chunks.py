"""torchtune's chunked losses: their published ladder of memory, and how many tokens a chunk has.

What they launch and hold is compared with their code, traced, in `test_variants_against_trace`; here the products of
the head one by one, since a kernel for each sample's takes longer than one for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.hooks import enters_module
from tunecast.model.inventory import step_operations
from tunecast.model.loss_chunks import KEPT_CHUNKS, chunk_lengths
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import HEAD_PRODUCT
from tunecast.model.units import GIB

RunOf = Callable[..., Run]
SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
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


def head_products(operations: Iterable[Operation], vocab: int) -> Counter[tuple[Any, ...]]:
    """Launches of products that have the vocabulary as one side."""
    found: Counter[tuple[Any, ...]] = Counter()
    for op in operations:
        if op.kind is Kind.GEMM and vocab in op.shape[:3]:
            found[op.phase, op.shape, op.layout] += op.total_launches
    return found


HEADS = {
    "one sample": {"method": "lora", "per_device_train_batch_size": 1},
    "samples": {"method": "lora"},
    "samples in fp32": {"method": "lora", "dtype": "fp32", "precision": "fp32"},
    "samples that autocast casts": {"method": "lora", "dtype": "fp32"},
    "a trained head": {"method": "full"},
    "a trained head that autocast casts": {"method": "full", "dtype": "fp32", "precision": "bf16-autocast"},
}


@pytest.mark.parametrize("kind", KEPT_CHUNKS)
@pytest.mark.parametrize("head", HEADS)
def test_the_head_multiplies_as_the_traced_code_does(
    head: str, kind: str, run_of: RunOf, same_as_traced: Callable[..., None]
) -> None:
    """Chunks that are cut out of every sample a frozen head takes sample by sample (PyTorch's ``should_fold``)."""
    from tunecast.calibrate.trace.tracer import trace_step

    llama = architecture_from_config(SMALL, "llama")
    options = {"max_length": 501, "per_device_train_batch_size": 3, "loss_type": kind, **HEADS[head]}
    same_as_traced(llama, **options)
    run = run_of(llama, **options)
    found = head_products(step_operations(llama, run), llama.vocab_size)
    assert found == head_products(trace_step(llama, run).stream, llama.vocab_size)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_traced_head_is_told_apart_whatever_it_multiplies(run_of: RunOf, samples: int) -> None:
    """The host's time of the forward's end, and hooks of modules, go by its name."""
    pytest.importorskip("peft")
    from tunecast.calibrate.exact_source import TracedSteps

    llama = architecture_from_config(SMALL, "llama")
    run = run_of(llama, max_length=501, per_device_train_batch_size=samples, loss_type="chunked_ce")
    sources = step_operations(llama, run), TracedSteps()(llama, run, "cuda").operations
    named = ([op for op in each if op.name == HEAD_PRODUCT and op.phase is Phase.FORWARD] for each in sources)
    entered = [sum(op.count for op in each if enters_module(op)) for each in named]
    assert entered == [8, 8]
