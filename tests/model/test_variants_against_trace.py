"""Optimizers, attention and loss implementations and adapter variants against the traced real code.

The same comparison as `test_against_trace.py`, on narrow models: what differs between variants is which
kernels run and what stays alive, not how wide they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.trace.tracer import Trace, trace_step
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.loss_chunks import KEPT_CHUNKS
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.operation import Kind, Operation
from tunecast.model.run import Run
from tunecast.model.trained import trainable_params

RunOf = Callable[..., Run]
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip
PLAIN = {"model_type": "llama", **SMALL}
ALL_HEADS = {**PLAIN, "num_key_value_heads": 8}
TIED = {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True}
DEEP = {**PLAIN, "num_hidden_layers": 6}
LENGTH = {"max_length": 512, "per_device_train_batch_size": 2}

OPTIMIZERS = [
    (PLAIN, "cuda", {"optim": "adamw_8bit", "lora_r": 64}),
    (PLAIN, "cuda", {"optim": "adamw_bnb_8bit", "method": "full"}),
    (TIED, "cuda", {"optim": "paged_adamw_8bit", "method": "full"}),
    (DEEP, "cuda", {"optim": "paged_adamw_32bit", "method": "full"}),
    (PLAIN, "cuda", {"optim": "paged_adamw_32bit", "method": "qlora", "lora_r": 64}),
    (PLAIN, "cuda", {"optim": "lion_8bit", "method": "full"}),
    (PLAIN, "cuda", {"optim": "lion_32bit", "adapter_dtype": "bf16"}),
    (PLAIN, "cuda", {"optim": "paged_lion_8bit", "method": "full"}),
    (PLAIN, "cuda", {"optim": "sgd", "method": "full"}),
    (PLAIN, "cpu", {"optim": "adamw_8bit"}),
    (PLAIN, "cpu", {"optim": "sgd"}),
]

EAGER = {"attn_implementation": "eager", "lora_target_modules": "q_proj"}
FLASH = {"attn_implementation": "flash_attention_2", "lora_target_modules": "v_proj,o_proj"}
WINDOWED = {"model_type": "mistral", **SMALL, "sliding_window": 128}
ATTENTION = [
    (PLAIN, "cuda", EAGER),
    (PLAIN, "cuda", {**EAGER, "per_device_train_batch_size": 1, "gradient_checkpointing": False}),
    (ALL_HEADS, "cuda", {**EAGER, "max_length": 1024}),
    (PLAIN, "cuda", {**EAGER, "dtype": "fp32"}),
    (PLAIN, "cuda", {**EAGER, "method": "qlora"}),
    (WINDOWED, "cuda", EAGER),
    (ALL_HEADS, "cpu", EAGER),
    (PLAIN, "cuda", FLASH),
    (PLAIN, "cuda", {**FLASH, "per_device_train_batch_size": 1, "gradient_checkpointing": False}),
    ({**WINDOWED, "sliding_window": 512}, "cuda", {**FLASH, "dtype": "fp32"}),
]

UPCAST = {"method": "qlora", "upcast_non_quantized": True}
ADAPTERS = [
    (PLAIN, "cuda", UPCAST),
    (TIED, "cuda", {**UPCAST, "gradient_checkpointing": False, "lora_target_modules": "q_proj,v_proj"}),
    (PLAIN, "cuda", {**UPCAST, **FLASH}),
    (DEEP, "cpu", UPCAST),
    (PLAIN, "cuda", {"dtype": "fp32", "gradient_checkpointing": False}),
    (PLAIN, "cuda", {"lora_dropout": 0.1, "adapter_dtype": "bf16"}),
    (PLAIN, "cuda", {"lora_dropout": 0.1, "method": "qlora", "lora_target_modules": "q_proj,down_proj"}),
    (PLAIN, "cuda", {"adapter_dtype": "fp16", "dtype": "fp16", "precision": "fp16"}),
]

INT8 = {"method": "qlora", "quant_method": "bnb-8bit"}
EIGHT_BIT = [
    (PLAIN, "cuda", INT8),
    (PLAIN, "cuda", {**INT8, "gradient_checkpointing": False, "lora_target_modules": "q_proj,v_proj"}),
    (TIED, "cuda", {**INT8, "upcast_non_quantized": True}),
    (DEEP, "cuda", {**INT8, "dtype": "fp16", "precision": "fp16", "adapter_dtype": "fp16"}),
]

CHUNKED = {"loss_type": "chunked_nll", "lora_target_modules": "q_proj,v_proj"}
ONE = {"per_device_train_batch_size": 1, "gradient_checkpointing": False}
LOSSES = [
    (PLAIN, "cuda", CHUNKED),
    (TIED, "cuda", {**CHUNKED, "per_device_train_batch_size": 1, "method": "qlora", "gradient_checkpointing": False}),
    (PLAIN, "cuda", {**CHUNKED, "dtype": "fp32", "gradient_accumulation_steps": 2}),
    (PLAIN, "cuda", {"loss_type": "chunked_nll", "method": "full"}),
    (TIED, "cuda", {"loss_type": "chunked_nll", "method": "full"}),
    *((PLAIN, "cuda", {"loss_type": name, "lora_target_modules": "q_proj,v_proj"}) for name in KEPT_CHUNKS),
    *((TIED, "cuda", {"loss_type": name, "method": "full", "max_length": 501, **ONE}) for name in KEPT_CHUNKS),
    (PLAIN, "cuda", {"loss_type": "chunked_ce", "method": "full", "gradient_accumulation_steps": 2}),
    (PLAIN, "cuda", {"loss_type": "linear_ce", "method": "qlora", "max_length": 20, "dtype": "fp32"}),
    (PLAIN, "cuda", {"stack": "trl", "method": "full", "gradient_checkpointing": False}),
    (TIED, "cuda", {"stack": "trl", "method": "full", "gradient_accumulation_steps": 2}),
]

CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [*OPTIMIZERS, *ATTENTION, *ADAPTERS, *EIGHT_BIT, *LOSSES]


def totals(operations: Iterable[Operation]) -> dict[tuple[str, str], Counter[str]]:
    """Executions, launches, FLOPs and bytes by phase and kind."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for op in operations:
        counter = found.setdefault((op.phase.value, op.kind.value), Counter())
        counter["count"] += op.count
        counter["launches"] += op.total_launches
        counter["flops"] += op.total_flops
        if op.kind is not Kind.ATTENTION:
            counter["bytes"] += op.total_bytes
    return found


def case_name(case: tuple[dict[str, Any], str, dict[str, Any]]) -> str:
    config, platform, options = case
    return f"{config['model_type']}{config['num_hidden_layers']}-{platform}-{'-'.join(map(str, options.values()))}"


Both = tuple[Trace, tuple[Operation, ...], MemoryForecast]


@pytest.fixture(scope="module", params=some_for_ci([(case,) for case in CASES], 3), ids=case_name)
def both(request: pytest.FixtureRequest, run_of: RunOf) -> Both:
    """The traced step and the analytic one."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    config, platform, options = request.param
    arch: Architecture = architecture_from_config(config, "small")
    run = run_of(arch, **{**LENGTH, **options})
    trace = trace_step(arch, run, platform=platform)
    return trace, step_operations(arch, run, platform=platform), memory_timeline(arch, run, platform=platform)


def test_launches_flops_and_bytes_by_phase_and_kind(both: Both) -> None:
    trace, operations, _ = both
    expected, found = totals(trace.stream), totals(operations)
    assert found.keys() == expected.keys()
    for place, quantities in expected.items():
        for quantity, value in quantities.items():
            assert found[place][quantity] == pytest.approx(value, rel=1e-3), (place, quantity)


def test_peak_allocated_at_its_moment(both: Both) -> None:
    trace, _, forecast = both
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=2e-3)
    for moment, peak_bytes in trace.memory.moments.items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=1e-2), moment


def test_trained_parameters(both: Both, request: pytest.FixtureRequest, run_of: RunOf) -> None:
    config, _, options = request.node.callspec.params["both"]
    arch = architecture_from_config(config, "small")
    assert trainable_params(arch, run_of(arch, **{**LENGTH, **options})) == both[0].trainable_params


def test_flash_kernels_skip_what_a_sliding_window_hides(run_of: RunOf) -> None:
    """512 tokens through a window of 128: 512 x 128 - 128^2 / 2 pairs, and no mask in memory."""
    windowed, plain = (architecture_from_config(c, "small") for c in (WINDOWED, {**WINDOWED, "sliding_window": None}))
    run = run_of(windowed, **LENGTH, **FLASH)
    flops = [
        sum(op.total_flops for op in step_operations(a, run) if op.kind is Kind.ATTENTION) for a in (windowed, plain)
    ]
    assert flops[0] / flops[1] == pytest.approx((512 * 128 - 128**2 / 2) / (512**2 / 2))
    assert memory_timeline(windowed, run).allocated_bytes == memory_timeline(plain, run).allocated_bytes
