"""The traced step against the same step run for real on this CPU, watched by torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from ci_share import some_for_ci

torch = pytest.importorskip("torch")

from tunecast.calibrate.trace import hf  # noqa: E402
from tunecast.calibrate.trace.tracer import trace_step  # noqa: E402
from tunecast.model.architecture import Architecture  # noqa: E402
from tunecast.model.run import Run  # noqa: E402

COUNTED = ("add", "add_", "mul", "clone", "neg", "pow", "mean", "rsqrt", "silu", "silu_backward", "lerp_")
"""Operators that the profiler shows once per kernel. It shows a product that checkpointing stops
before it runs, and casts inside other operators, so those are compared by memory instead."""
ATTENTION = "_scaled_dot_product_flash_attention"

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("lora", {}, 4000),
    ("qlora", {}, 300),
    ("full", {}, 300),
    ("lora", {"gradient_checkpointing": False}, 300),
    ("lora", {"reentrant": True, "dtype": "fp32", "precision": "fp32"}, 300),
]


def profiled_step(architecture: Architecture, run: Run) -> Any:
    """Profile of the second real step, as the first makes the optimizer's states; weights are random, tokens too."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    model = hf.build_model(architecture, run, device="cpu")
    optimizer = hf.make_optimizer(hf.trainable_parameters(model), run, platform="cpu")
    shape = (run.per_device_train_batch_size, run.max_length)
    batch = {name: torch.randint(0, architecture.vocab_size, shape) for name in ("input_ids", "labels")}
    hf.train_step(model, batch, optimizer, run, platform="cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        hf.train_step(model, batch, optimizer, run, platform="cpu")
    return profiler


def peak_above_rest(profiler: Any) -> int:
    """Largest running sum of the allocator's events, without what a product takes and gives back itself: on processors
    that have no bf16 instructions oneDNN sums in a buffer of fp32."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    ends = [
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == "aten::mm"
    ]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for begin, end in ends:
        inside = [change for change in changes if begin <= change[0] <= end]
        for freed in inside:
            taken = next((change for change in inside if change[1] == -freed[1] > 0 and change[0] < freed[0]), None)
            if taken is not None:
                changes.remove(taken)
                changes.remove(freed)
                break
    return max(accumulate(size for _, size in changes))


@pytest.mark.parametrize(("method", "changes", "vocab"), some_for_ci(CASES))
def test_trace_equals_a_real_step(
    architecture: Callable[..., Architecture], run: Callable[..., Run], method: str, changes: dict[str, Any], vocab: int
) -> None:
    shape, job = architecture(vocab=vocab), run(method, max_length=512, **changes)
    profiler = profiled_step(shape, job)
    trace = trace_step(shape, job, platform="cpu")
    real = Counter({event.key.removeprefix("aten::"): event.count for event in profiler.key_averages()})
    traced = Counter(op.name.removeprefix("aten.") for op in trace.stream)
    assert {name: traced[name] for name in COUNTED} == {name: real[name] for name in COUNTED}
    assert traced["cat"] + traced["stack"] == real["cat"], "a stack is a concatenation inside"
    assert traced[ATTENTION] == real[f"{ATTENTION}_for_cpu"]
    assert trace.memory.peak_bytes - trace.memory.at_rest_bytes == pytest.approx(peak_above_rest(profiler), rel=0.015)
