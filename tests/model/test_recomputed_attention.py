"""Attention that the backward makes again by itself, against the real code with a checkpoint around its attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import architecture_from_config
from tunecast.model.context_parallel import context_operations
from tunecast.model.flops import executed_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

RunOf = Callable[..., Run]
SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
SIZE = {"max_length": 512, "per_device_train_batch_size": 2}
RANDOM_STATE_BYTES = 2 * 2560
"""What ``torch.utils.checkpoint`` keeps of the random state in each of the two layers; the tape leaves it out."""


def totals(operations: Iterable[Operation]) -> dict[str, Counter[str]]:
    """By kind; the trace counts a checkpoint inside a layer as its backward, so that phases are not told apart."""
    found: dict[str, Counter[str]] = {}
    for op in operations:
        counter = found.setdefault(str(op.kind), Counter())
        counter["count"] += op.count
        counter["launches"] += op.total_launches
        counter["flops"] += op.total_flops
        counter["bytes"] += 0 if op.kind is Kind.ATTENTION else op.total_bytes
    return found


@pytest.mark.parametrize(
    "options", [{"method": "full"}, {"method": "qlora"}, {"lora_target_modules": "q_proj,o_proj"}], ids=str
)
def test_as_the_real_code_with_its_attention_checkpointed(
    options: dict[str, Any], run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from tunecast.calibrate.trace.tracer import trace_step

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def again(module: Any, *heads: Any, **others: Any) -> tuple[Any, None]:
        def core(q: Any, k: Any, v: Any) -> Any:
            return plain(module, q, k, v, *heads[3:], **others)[0]

        return checkpoint(core, *heads[:3], use_reentrant=False), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", again)
    architecture = architecture_from_config(SMALL, "small, its attention checkpointed")
    untouched = run_of(architecture, **SIZE, **options, gradient_checkpointing=False)
    remade = run_of(architecture, **SIZE, **options, recompute_attention=True)
    assert remade == replace(untouched, recompute_attention=True)
    trace, forecast = trace_step(architecture, untouched), memory_timeline(architecture, remade)
    expected, found = totals(trace.stream), totals(step_operations(architecture, remade))
    assert found.keys() == expected.keys()
    for kind, quantities in expected.items():
        for quantity, value in quantities.items():
            assert found[kind][quantity] == pytest.approx(value, rel=1e-4), (kind, quantity)
    assert forecast.allocated_bytes == trace.memory.peak_bytes - RANDOM_STATE_BYTES
    kept = memory_timeline(architecture, untouched).allocated_bytes
    assert forecast.allocated_bytes < kept


def test_attention_is_multiplied_once_more_and_nothing_else(run_of: RunOf) -> None:
    architecture = architecture_from_config(SMALL, "small")
    flops = {
        name: executed_flops_per_step(architecture, run_of(architecture, method="full", **SIZE, **options))
        for name, options in (
            ("none", {"gradient_checkpointing": False}), ("attention", {"recompute_attention": True}), ("whole", {}),
        )
    }  # fmt: skip
    head_dim, heads, layers = 512 // 8, 8, 2
    forward = layers * SIZE["per_device_train_batch_size"] * heads * 2 * 2 * SIZE["max_length"] ** 2 * head_dim
    assert flops["attention"] - flops["none"] in (forward, forward / 2)  # all pairs, or the causal half
    assert flops["attention"] < flops["whole"]


def test_the_ring_goes_round_again_with_attention(run_of: RunOf) -> None:
    architecture = architecture_from_config(SMALL, "small")
    split = {"method": "full", "max_length": 1024, "num_gpus": 4, "cp": 4}
    runs = [
        run_of(architecture, **split, **options)
        for options in ({"gradient_checkpointing": False}, {"recompute_attention": True}, {})
    ]
    moved = [sum(o.total_bytes for o in context_operations(architecture, run, 0)) for run in runs]
    assert moved[0] < moved[1] == moved[2]


@pytest.mark.parametrize(
    ("config", "options", "kind", "words"),
    [
        ({}, {"gradient_checkpointing": True}, InputError, "leave one"),
        ({}, {"attn_implementation": "eager"}, NotSupportedError, "eager attention"),
        ({}, {"checkpoint_every": 2}, InputError, "but --recompute-attention makes attention alone"),
        ({}, {"activation_offloading": True}, InputError, "but --recompute-attention makes attention alone"),
        (
            {},
            {"activation_offloading": True, "recompute_attention": False, "gradient_checkpointing": False},
            InputError,
            "but --no-gradient-checkpointing was asked for",
        ),
    ],
)
def test_refused(config: dict[str, Any], options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        resolve_run(architecture_from_config(SMALL | config, "small"), {"recompute_attention": True, **options})
