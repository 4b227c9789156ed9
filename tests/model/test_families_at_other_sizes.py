"""Families of every kind of block at another width, length and micro-batch than their first proof, methods in turn.

Against the traced stream of the real code: FLOPs, launches and bytes of every phase, and the peak.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.trained import trainable_params

BASE: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 12,
    "vocab_size": 16000, "max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"intermediate_size": None},
    "cohere": {"num_key_value_heads": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4, "intermediate_size": None, "ffn_hidden_size": 2048},
    "gemma": {"num_key_value_heads": 4, "head_dim": 64},
    "gpt2": {"intermediate_size": None},
    "gpt_neox": {},
    "granite": {"num_key_value_heads": 4},
    "mpt": {"intermediate_size": None, "max_seq_len": 4096, "max_position_embeddings": None},
    "olmo2": {"num_key_value_heads": 4},
    "opt": {"intermediate_size": None, "ffn_dim": 3072},
    "phi": {},
    "phi3": {"sliding_window": None},
    "stablelm": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 4},
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"per_device_train_batch_size": 2, "lora_r": 8},
    "full": {"method": "full", "gradient_checkpointing": False},
    "lora in fp32 without checkpointing": {"gradient_checkpointing": False, "dtype": "fp32"},
    "lora with accumulation": {"gradient_accumulation_steps": 2},
}
CASES = list(zip(FAMILIES, itertools.cycle(METHODS), strict=False))


def by_phase(operations: Iterable[Operation]) -> dict[tuple[Phase, str], float]:
    found: Counter[tuple[Phase, str]] = Counter()
    for op in operations:
        found[op.phase, "flops"] += op.total_flops
        found[op.phase, "launches"] += op.total_launches
        found[op.phase, "bytes"] += op.total_bytes
    return dict(found)


@pytest.mark.parametrize(("model_type", "method"), CASES)
def test_phases_and_peak_are_those_of_the_real_code(model_type: str, method: str) -> None:
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.exact import real_architecture
    from tunecast.calibrate.trace.tracer import trace_step

    fields = {**BASE, **FAMILIES[model_type], "model_type": model_type}
    config = {key: value for key, value in fields.items() if value is not None}
    architecture = architecture_from_config(config, model_type)
    run = resolve_run(architecture, {"max_length": 1152, **METHODS[method]}).run
    trace = trace_step(real_architecture(config, model_type), run)
    assert trainable_params(architecture, run) == trace.trainable_params
    found, expected = by_phase(step_operations(architecture, run)), by_phase(trace.stream)
    assert found.keys() == expected.keys()
    for (phase, what), value in expected.items():
        assert found[phase, what] == pytest.approx(value, rel=0.005 if what == "flops" else 0.05), (phase, what)
    assert memory_timeline(architecture, run).allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen-7B", "llm-foundry/mpt-7b", "THUDM/chatglm3-6b", "nvidia/megatron-gpt-7.5b"]
)
def test_code_outside_transformers_multiplies_every_matrix_once(name: str) -> None:
    """Forward: 2 FLOPs per token and weight of layers and head, and causal attention; nothing else multiplies."""
    architecture = load_architecture(name)
    run = resolve_run(architecture, {"max_length": 1024, "method": "full"}).run
    layers = [group.layer for group in architecture.groups for _ in range(group.count)]
    weights = sum(linear.weight_params for layer in layers for linear in layer.linears)
    weights += architecture.vocab_size * architecture.hidden_size
    forward = [op for op in step_operations(architecture, run) if op.phase is Phase.FORWARD]
    assert sum(op.total_flops for op in forward if op.kind is Kind.GEMM) == 2 * 1024 * weights
    width = sum(layer.attention.num_heads * layer.attention.head_dim for layer in layers)
    assert sum(op.total_flops for op in forward if op.kind is Kind.ATTENTION) == 2 * 1024 * 1024 * width


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_qwen_1_rotates_by_the_kernel_of_flash_attention_where_it_attends_by_it(attention: str) -> None:
    """``apply_rotary_pos_emb`` of modeling_qwen.py, by hand: a copy in fp32, a kernel into another one by half of the
    tables, and back to bf16; without the package the products, the turned half and the sum are kernels of their own."""
    qwen, tokens = load_architecture("Qwen/Qwen-7B"), 1024
    run = resolve_run(qwen, {"max_length": tokens, "method": "full", "attn_implementation": attention}).run
    kernels = [
        op
        for op in step_operations(qwen, run)
        if op.phase is Phase.FORWARD and op.name == "rotary" and op.kind is Kind.MEMORY
    ]
    values, layers, tables = tokens * 4096, 32, 2 * tokens * 64 * 4
    moved = 2 * layers * (values * (2 + 4) + values * (4 + 4) + tables + values * (4 + 2))
    found = sum(op.total_bytes for op in kernels)
    if attention == "sdpa":
        assert found > 1.5 * moved
    else:
        assert found == moved
        assert sum(op.count for op in kernels) == 2 * layers * 3
