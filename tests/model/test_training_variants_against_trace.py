"""Adapter variants, modules trained whole, checkpoints elsewhere and Adafactor against the traced real code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.trace.tracer import Trace, trace_step
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.trained import trainable_params

RunOf = Callable[..., Run]
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
PLAIN = {"model_type": "llama", **SMALL}
BIASED = {"model_type": "qwen2", **SMALL}
DEEP = {**PLAIN, "num_hidden_layers": 5}
LENGTH = {"max_length": 512, "per_device_train_batch_size": 2}

OFFLOADED = {"activation_offloading": True, "lora_target_modules": "q_proj,down_proj"}
CHECKPOINTS = [
    (DEEP, OFFLOADED),
    (PLAIN, {**OFFLOADED, "method": "qlora", "gradient_accumulation_steps": 2}),
    (PLAIN, {"activation_offloading": True, "method": "full"}),
    (DEEP, {"checkpoint_every": 2, "lora_target_modules": "q_proj,down_proj"}),
    (DEEP, {"checkpoint_every": 3, "method": "full"}),
    (DEEP, {"checkpoint_first": 2, "lora_target_modules": "q_proj,down_proj"}),
    (DEEP, {"checkpoint_first": 3, "method": "full"}),
    (DEEP, {**OFFLOADED, "reentrant": True}),
    (PLAIN, {"activation_offloading": True, "reentrant": True, "method": "qlora", "adapter_dtype": "bf16"}),
]

SAVED = {"lora_target_modules": "q_proj,v_proj", "modules_to_save": "embed_tokens,lm_head"}
ADAPTERS = [
    (PLAIN, SAVED),
    (PLAIN, {**SAVED, "modules_to_save": "lm_head", "gradient_checkpointing": False}),
    (PLAIN, {**SAVED, "modules_to_save": "embed_tokens", "gradient_checkpointing": False, "method": "qlora"}),
    (PLAIN, {**SAVED, "attn_implementation": "eager"}),
    (PLAIN, {**SAVED, "adapter_dtype": "bf16", "gradient_accumulation_steps": 2}),
    (DEEP, {**SAVED, "method": "qlora", "optim": "adamw_8bit"}),
    (PLAIN, {**SAVED, "loss_type": "chunked_nll", "gradient_checkpointing": False, "gradient_accumulation_steps": 2}),
    (PLAIN, {**SAVED, "loss_type": "chunked_nll", "modules_to_save_dtype": "fp32"}),
    (PLAIN, {"lora_target_modules": "up_proj", "use_dora": True}),
    (DEEP, {"lora_target_modules": "q_proj,down_proj", "use_dora": True, "gradient_checkpointing": False}),
    (PLAIN, {"lora_target_modules": "up_proj", "use_dora": True, "method": "qlora"}),
    (BIASED, {"lora_target_modules": "q_proj,o_proj", "use_dora": True, "adapter_dtype": "bf16"}),
    (BIASED, {"lora_target_modules": "q_proj,o_proj", "use_dora": True, "lora_dropout": 0.05}),
    (PLAIN, {"lora_target_modules": "up_proj", "use_dora": True, "lora_dropout": 0.05, "method": "qlora"}),
    (PLAIN, {"lora_target_modules": "q_proj,down_proj", "lora_bias": True, "use_rslora": True}),
    (BIASED, {"lora_target_modules": "q_proj,down_proj", "lora_bias": True, "method": "qlora", "lora_r": 32}),
]

SCALED = {"precision": "fp16-autocast", "dtype": "fp16"}
SCALER = [
    (PLAIN, {**SCALED, "lora_target_modules": "q_proj", "gradient_accumulation_steps": 2}),
    (PLAIN, {**SCALED, "method": "full", "dtype": "fp32", "optim": "adamw_torch"}),
    (BIASED, {**SCALED, "method": "qlora", "optim": "adamw_8bit", "modules_to_save": "lm_head"}),
]

ADAFACTOR = [
    (PLAIN, {"optim": "adafactor", "method": "full"}),
    (BIASED, {"optim": "adafactor", "method": "full", "dtype": "fp32"}),
    (DEEP, {"optim": "adafactor", "lora_r": 64, "lora_target_modules": "q_proj,down_proj"}),
    (PLAIN, {**SAVED, "optim": "adafactor", "adapter_dtype": "bf16"}),
]

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [*CHECKPOINTS, *ADAPTERS, *SCALER, *ADAFACTOR]


def totals(operations: Iterable[Operation], *, reentrant: bool) -> dict[tuple[str, str], Counter[str]]:
    """Executions, launches, FLOPs and bytes by phase and kind; a reentrant recomputation is part of the backward."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for op in operations:
        phase = Phase.BACKWARD if reentrant and op.phase is Phase.RECOMPUTE else op.phase
        counter = found.setdefault((phase.value, op.kind.value), Counter())
        counter["count"] += op.count
        counter["launches"] += op.total_launches
        counter["flops"] += op.total_flops
        if op.kind is not Kind.ATTENTION:
            counter["bytes"] += op.total_bytes
    return found


def case_name(case: tuple[dict[str, Any], dict[str, Any]]) -> str:
    config, options = case
    return f"{config['model_type']}{config['num_hidden_layers']}-{'-'.join(f'{k}={v}' for k, v in options.items())}"


Both = tuple[Trace, tuple[Operation, ...], MemoryForecast]


@pytest.fixture(scope="module", params=some_for_ci([(case,) for case in CASES], 3), ids=case_name)
def both(request: pytest.FixtureRequest, run_of: RunOf) -> Both:
    """The traced step and the analytic one."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    config, options = request.param
    architecture = architecture_from_config(config, "small")
    run = run_of(architecture, **{**LENGTH, **options})
    return trace_step(architecture, run), step_operations(architecture, run), memory_timeline(architecture, run)


def test_launches_flops_and_bytes_by_phase_and_kind(both: Both, request: pytest.FixtureRequest) -> None:
    trace, operations, _ = both
    reentrant = bool(request.node.callspec.params["both"][1].get("reentrant"))
    expected, found = totals(trace.stream, reentrant=reentrant), totals(operations, reentrant=reentrant)
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
    config, options = request.node.callspec.params["both"]
    architecture = architecture_from_config(config, "small")
    assert trainable_params(architecture, run_of(architecture, **{**LENGTH, **options})) == both[0].trainable_params
