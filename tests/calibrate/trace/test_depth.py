"""A shallow trace extended to a depth equals the trace at that depth: stream op by op, memory to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_for_ci

pytest.importorskip("torch")

from tunecast.calibrate.trace.depth import trace_extended
from tunecast.calibrate.trace.direct import trace_depth
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run

DEPTH = 8
"""More layers than both shallow traces have together, else the model is traced whole."""

CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("lora", {}, {}, "cuda"),
    ("lora", {"gradient_checkpointing": False, "lora_dropout": 0.05}, {"vocab": 300}, "cuda"),
    ("lora", {"reentrant": True, "gradient_accumulation_steps": 3}, {}, "cuda"),
    ("qlora", {"optim": "paged_adamw_32bit"}, {"model_type": "qwen2", "tied": True, "qkv_bias": True}, "cuda"),
    ("qlora", {"dtype": "fp16", "precision": "fp16-autocast"}, {}, "cuda"),
    ("qlora", {}, {}, "cpu"),
    ("full", {}, {"model_type": "qwen3", "qk_norm": True}, "cuda"),
    ("full", {"optim": "adamw_bnb_8bit"}, {}, "cuda"),
    ("full", {"optim": "adamw_torch_fused"}, {"model_type": "mistral", "window": 32}, "cpu"),
]


@pytest.mark.parametrize(("method", "changes", "shape", "platform"), some_for_ci(CASES, 3, first=2))
def test_extension_equals_a_direct_trace(
    architecture: Callable[..., Architecture],
    run: Callable[..., Run],
    method: str,
    changes: dict[str, Any],
    shape: dict[str, Any],
    platform: str,
) -> None:
    deep, job = architecture(layers=DEPTH, **shape), run(method, **changes)
    extended = trace_extended(deep, job, platform=platform)
    direct = trace_depth(deep, job, DEPTH, platform=platform)
    assert extended.stream == direct.stream
    assert extended.memory == direct.memory
    assert (extended.trainable_params, extended.total_params) == (direct.trainable_params, direct.total_params)
    assert extended.trained == direct.trained


def test_seventy_billion_parameters_take_no_memory(
    architecture: Callable[..., Architecture], run: Callable[..., Run]
) -> None:
    """Llama-3.1-70B: 70,553,706,496 parameters in the published checkpoint, 80 layers."""
    llama70b = architecture(
        hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128256
    )
    trace = trace_extended(llama70b, run("lora", max_length=512))
    adapters = 80 * 16 * (4 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    assert trace.trainable_params == adapters
    assert trace.total_params == 70_553_706_496 + adapters
    assert {op.layer for op in trace.stream} == {None, *range(80)}
