"""Architectures for tests: real widths, any depth, no catalog and no torch needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.trained import trainable_params

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "llama-2-13b": {
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
    "llama-3.1-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32768, "max_position_embeddings": 32768, "sliding_window": None,
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Fields of the published config.json files."""


@pytest.fixture(scope="session")
def make() -> Callable[..., Architecture]:
    """``make(name, layers=None)``: one of `CONFIGS`, optionally at another depth."""

    def architecture(name: str, layers: int | None = None) -> Architecture:
        config = dict(CONFIGS[name])
        if layers is not None:
            config["num_hidden_layers"] = layers
        return architecture_from_config(config, name)

    return architecture


@pytest.fixture(scope="session")
def run_of() -> Callable[..., Run]:
    """``run_of(architecture, **options)``: a resolved run."""
    return lambda architecture, **options: resolve_run(architecture, {"allow_long_context": True, **options}).run


@pytest.fixture(scope="session")
def same_as_traced() -> Callable[..., None]:
    """``same_as_traced(architecture, **options)``: kernels, FLOPs, parameters and memory equal the traced real code."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    return compare_with_trace


def compare_with_trace(architecture: Architecture, **options: Any) -> None:
    """FLOPs exact, counts and bytes within 1e-4, the peak within 0.1% every moment within 1% (two narrow layers)."""
    from tunecast.calibrate.trace.tracer import trace_step

    run = resolve_run(architecture, options).run
    trace = trace_step(architecture, run)
    base_params = trace.total_params - (trace.trainable_params if run.has_adapters else 0)
    assert architecture.total_params == base_params
    assert trainable_params(architecture, run) == trace.trainable_params
    found, expected = totals(step_operations(architecture, run)), totals(trace.stream)
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        assert found[place] == pytest.approx(value, rel=1e-9 if place[2] == "flops" else 1e-4), place
    forecast = memory_timeline(architecture, run)
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=1e-3)
    assert forecast.peak_moment == trace.memory.peak_moment
    for moment, peak_bytes in trace.memory.moments.items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=0.01), moment


def totals(operations: Iterable[Operation]) -> dict[tuple[str, str, str], float]:
    """Executions, launches, FLOPs and bytes by phase and kind."""
    found: Counter[tuple[str, str, str]] = Counter()
    for op in operations:
        place = (op.phase.value, op.kind.value)
        found[*place, "count"] += op.count
        found[*place, "launches"] += op.total_launches
        found[*place, "flops"] += op.total_flops
        found[*place, "bytes"] += op.total_bytes
    return dict(found)
