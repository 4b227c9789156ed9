"""The analytic inventory and memory timeline against the traced stream of the real code.

Nothing here is fitted: the trace runs transformers, PEFT and bitsandbytes on fake tensors, the inventory
is written from their sources. Widths are real, depths small; one case goes through the depth extension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.trace.tracer import Trace, trace_step
from tunecast.model.architecture import Architecture
from tunecast.model.inventory import step_operations
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.operation import Kind, Operation
from tunecast.model.run import Run

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
Totals = dict[tuple[str, str], dict[str, float]]
ATTENTION_ONLY = {"lora_target_modules": "q_proj,v_proj"}

CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("llama-3.1-8b", 2, "cuda", {"max_length": 2048}),
    ("llama-3.1-8b", 2, "cuda", {"max_length": 512, "gradient_checkpointing": False, **ATTENTION_ONLY}),
    ("llama-3.1-8b", 2, "cuda", {"max_length": 2048, "method": "qlora"}),
    ("llama-3.1-8b", 2, "cuda", {"max_length": 1024, "method": "full", "optim": "adamw_torch_fused"}),
    ("llama-3.1-70b", 2, "cuda", {"max_length": 8192, "method": "qlora", "gradient_checkpointing": False}),
    ("llama-2-13b", 2, "cuda", {"max_length": 4096, "per_device_train_batch_size": 2, **ATTENTION_ONLY}),
    ("mistral-7b", 2, "cuda", {"max_length": 2048, "per_device_train_batch_size": 4, "lora_r": 64}),
    ("mistral-7b-v0.1", 2, "cuda", {"max_length": 4096, "gradient_checkpointing": False}),
    ("qwen2.5-7b", 2, "cuda", {"max_length": 512, "per_device_train_batch_size": 8, "gradient_checkpointing": False}),
    ("qwen2.5-7b", 2, "cuda", {"max_length": 1024, "method": "qlora", "double_quant": False, "adapter_dtype": "bf16"}),
    ("qwen2.5-0.5b", 2, "cuda", {"max_length": 1024, "method": "full", "gradient_accumulation_steps": 3}),
    ("qwen2.5-0.5b", 2, "cuda", {"max_length": 512, "dtype": "fp32", "gradient_accumulation_steps": 2}),
    ("qwen3-0.6b", 2, "cuda", {"max_length": 1024, "precision": "bf16"}),
    ("qwen3-0.6b", 2, "cpu", {"max_length": 512, "method": "full", "dtype": "fp32", "precision": "fp32"}),
    ("qwen2.5-0.5b", 2, "cpu", {"max_length": 512, "method": "qlora"}),
    ("qwen2.5-0.5b", 2, "cpu", {"max_length": 512, "per_device_train_batch_size": 2}),
    ("qwen2.5-0.5b", 24, "cuda", {"max_length": 512}),
]


def totals(operations: Iterable[Operation]) -> Totals:
    """Executions, launches, FLOPs and bytes by phase and kind."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for op in operations:
        counter = found.setdefault((op.phase.value, op.kind.value), Counter())
        counter["count"] += op.count
        counter["launches"] += op.total_launches
        counter["flops"] += op.total_flops
        counter["bytes"] += op.total_bytes
    return {place: dict(counter) for place, counter in found.items()}


def products(operations: Iterable[Operation]) -> Counter[tuple[Any, ...]]:
    """How often every shape of matrix product and attention runs in each phase."""
    shapes: Counter[tuple[Any, ...]] = Counter()
    for op in operations:
        if op.kind in (Kind.GEMM, Kind.ATTENTION):
            shapes[op.phase, op.kind, op.shape, op.layout, op.dtype] += op.count
    return shapes


Both = tuple[Trace, tuple[Operation, ...], MemoryForecast]


@pytest.fixture(
    scope="module",
    params=some_for_ci([(case,) for case in CASES]),
    ids=lambda case: f"{case[0]}-{case[2]}-{'-'.join(map(str, case[3].values()))}",
)
def both(request: pytest.FixtureRequest, make: Make, run_of: RunOf) -> Both:
    """The traced step and the analytic one."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    name, layers, platform, options = request.param
    arch = make(name, layers)
    run = run_of(arch, **options)
    trace = trace_step(arch, run, platform=platform)
    return trace, step_operations(arch, run, platform=platform), memory_timeline(arch, run, platform=platform)


def test_every_product_has_the_traced_shape_layout_and_count(both: Both) -> None:
    trace, operations, _ = both
    assert products(operations) == products(trace.stream)


def test_kernels_launches_flops_and_bytes_by_phase_and_kind(both: Both) -> None:
    trace, operations, _ = both
    expected, found = totals(trace.stream), totals(operations)
    assert found.keys() == expected.keys()
    for place, quantities in expected.items():
        for quantity, value in quantities.items():
            assert found[place][quantity] == pytest.approx(value, rel=1e-4), (place, quantity)


def test_peak_allocated_within_a_tenth_of_a_percent(both: Both) -> None:
    trace, _, forecast = both
    assert forecast.allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=1e-3)
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.peak_moment == trace.memory.peak_moment


def test_every_moment_within_half_a_percent(both: Both) -> None:
    trace, _, forecast = both
    for moment, peak_bytes in trace.memory.moments.items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=5e-3), moment


def test_parts_of_the_peak(both: Both) -> None:
    """Part by part; a gradient not yet stored is an activation for one and a gradient for the other."""
    trace, _, forecast = both
    slack = 1e-3 * trace.memory.peak_bytes
    expected, found = dict(trace.memory.parts), dict(forecast.parts_bytes)
    for parts in (expected, found):
        parts["activations"] += parts.pop("gradients")
    for part, n_bytes in expected.items():
        assert found[part] == pytest.approx(n_bytes, abs=slack), part
