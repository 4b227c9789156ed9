"""A single micro-batch is the first of several: one tape serves both, and says the same as one of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.model import step
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.short_stack import short_stack
from tunecast.model.step import tape_run
from tunecast.model.tape_peaks import deep_peaks, largest_by_place

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("meta-llama/Llama-3.2-1B", {"method": "lora"}),
    "no checkpoints": ("meta-llama/Llama-3.2-1B", {"method": "lora", "gradient_checkpointing": False}),
    "tied, full": ("Qwen/Qwen2.5-0.5B", {"method": "full", "precision": "bf16-autocast"}),
    "qlora, table adapted": (
        "meta-llama/Llama-3.2-1B",
        {"method": "qlora", "lora_target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
    "fp16 with a scaler": ("meta-llama/Llama-3.2-1B", {"method": "lora", "precision": "fp16-autocast"}),
    "chunked loss": ("meta-llama/Llama-3.2-1B", {"method": "full", "stack": "torchtune"}),
    "compiled": ("meta-llama/Llama-3.2-1B", {"method": "full", "torch_compile": True}),
    "unsloth": ("meta-llama/Llama-3.2-1B", {"method": "qlora", "stack": "unsloth"}),
    "experts": ("mistralai/Mixtral-8x7B-v0.1", {"method": "lora"}),
    "windows": ("google/gemma-2-2b", {"method": "lora"}),
    "positions": ("openai-community/gpt2", {"method": "full"}),
    "dora": ("meta-llama/Llama-3.2-1B", {"method": "lora", "use_dora": True}),
    "saved modules": ("meta-llama/Llama-3.2-1B", {"method": "lora", "modules_to_save": ["lm_head"]}),
}


def asked(name: str) -> tuple[Architecture, Run]:
    model, options = RUNS[name]
    architecture = load_architecture(model)
    return architecture, tape_run(resolve_run(architecture, {"max_length": 512, **options}, gpu_has_bf16=True).run)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_of_several_micro_batches_is_a_single_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, run = asked(name)
    assert run.gradient_accumulation_steps == 1
    assert step.of_several(architecture, run) is not None
    stack = short_stack(architecture, run)
    shared = step.write_step(stack.architecture, run, "cuda")
    monkeypatch.setattr(step, "of_several", lambda *_: None)
    step._written.cache_clear()
    alone = step.write_step(stack.architecture, run, "cuda")
    step._written.cache_clear()
    facts = ("name", "kind", "phase", "moment", "layer", "dtype", "bytes", "flops", "shape", "layout", "launches")
    kernels = [[[getattr(e, fact) for fact in facts] for e in tape.events if e.kind] for tape in (shared, alone)]
    assert kernels[0] == kernels[1]
    assert largest_by_place(deep_peaks(shared, stack)) == largest_by_place(deep_peaks(alone, stack))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("meta-llama/Llama-3.2-1B", {"method": "full", "stack": "torchtune", "optimizer_in_backward": True}),
        ("meta-llama/Llama-3.2-1B", {"method": "lora", "loss_type": "liger"}),
    ],
)
def test_what_crosses_micro_batches_is_written_alone(model: str, options: dict[str, Any]) -> None:
    architecture = load_architecture(model)
    run = tape_run(resolve_run(architecture, {"max_length": 512, **options}, gpu_has_bf16=True).run)
    assert step.of_several(architecture, run) is None
