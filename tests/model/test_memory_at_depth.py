"""Memory extended from shallow tapes to a model's depth: equal to the tape of every layer, and never negative."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.loss_chunks import KEPT_CHUNKS
from tunecast.model.memory import memory_timeline, step_peaks
from tunecast.model.parallel_memory import kept_bytes, kept_on
from tunecast.model.run import Run
from tunecast.model.step import shallow_depth, tape_run, write_step
from tunecast.model.tape_peaks import deep_peaks, largest_by_place, tape_peaks
from tunecast.model.unsloth_rules import UNSLOTH_LOSSES

RunOf = Callable[..., Run]
DEPTH = 7
SMALL = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": DEPTH,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 8192,
}  # fmt: skip
NUMBERS = (("bf16-autocast", "bf16"), ("bf16-autocast", "fp32"), ("bf16", "bf16"), ("fp16-autocast", "fp32"))
LOSSES = ("nll", "chunked_nll", *KEPT_CHUNKS, "liger", "cut_cross_entropy", *UNSLOTH_LOSSES)
OPTIONS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(("full", "lora", "qlora")),
        "loss_type": st.sampled_from(
            ("nll", "chunked_nll", *KEPT_CHUNKS, "liger", "cut_cross_entropy", *UNSLOTH_LOSSES)
        ),
        "numbers": st.sampled_from(NUMBERS),
        "gradient_accumulation_steps": st.integers(1, 3),
        "gradient_checkpointing": st.booleans(),
        "reentrant": st.booleans(),
        "optim": st.sampled_from(("adamw_torch", "adamw_bnb_8bit", "lion_32bit", "sgd")),
        "max_length": st.sampled_from((64, 256, 700)),
    }
)
WIDE = {"method": "full", "dtype": "fp32", "precision": "bf16-autocast", "loss_type": "chunked_nll", "max_length": 1024}


@settings(max_examples=25, deadline=None)
@given(options=OPTIONS, tied=st.booleans())
def test_extended_peaks_are_those_of_every_layer(run_of: RunOf, options: dict[str, Any], tied: bool) -> None:
    architecture = architecture_from_config({**SMALL, "tie_word_embeddings": tied}, "small")
    precision, dtype = options["numbers"]
    options = {name: value for name, value in options.items() if name != "numbers"}
    run = run_of(architecture, **options, precision=precision, dtype=dtype)
    whole = largest_by_place(tape_peaks(write_step(architecture, tape_run(run), "cuda", None), DEPTH))
    for place, parts in step_peaks(architecture, run).items():
        assert sum(parts.values()) == sum(whole[place].values()), place
    assert min(memory_timeline(architecture, run).parts_bytes.values()) >= 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1}])
def test_fp32_weights_in_chunks_equal_the_trace(run_of: RunOf, options: dict[str, Any], tied: bool) -> None:
    tracer = pytest.importorskip("tunecast.calibrate.trace.tracer")
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    architecture = architecture_from_config({**SMALL, "tie_word_embeddings": tied}, "small")
    run = run_of(architecture, **WIDE, **options)
    traced = tracer.trace_step(architecture, run).memory
    found = memory_timeline(architecture, run)
    assert found.allocated_bytes == pytest.approx(traced.peak_bytes, rel=1e-3)
    assert found.peak_moment == traced.peak_moment
    for moment, peak_bytes in traced.moments.items():
        assert found.moments[moment] == pytest.approx(peak_bytes, rel=1e-2), moment
    assert min(found.parts_bytes.values()) >= 0


FAMILIES = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-7B",
    "google/gemma-7b",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai-community/gpt2",
    "tiiuae/falcon-7b",
    "microsoft/phi-2",
    "Qwen/Qwen3-30B-A3B",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"method": "qlora", "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    {"method": "full", "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    {"method": "lora", "gradient_checkpointing": True, "reentrant": True},
)
ONE = (
    {"method": "lora", "use_dora": True, "lora_dropout": 0.1, "gradient_accumulation_steps": 2},
    {"method": "full", "attn_implementation": "eager", "torch_compile": True},
    {"method": "full", "optimizer_in_backward": True, "gradient_checkpointing": True},
    {"method": "lora", "stack": "unsloth", "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
)
CASES = [*product(FAMILIES, WAYS), *product(FAMILIES[:1], ONE)]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in CASES])
def test_every_spot_of_a_deep_model_follows_from_three_layers(
    run_of: RunOf, name: str, options: dict[str, Any]
) -> None:
    """Part by part, at every spot: what one middle layer leaves to others is what each further one adds, and so is what
    it keeps to the backward."""
    architecture = load_architecture(name)
    run = tape_run(run_of(architecture, max_length=128, **options))
    depth = shallow_depth(architecture, run)
    assert depth is not None
    whole = write_step(architecture, run, "cuda", None)
    found = deep_peaks(write_step(architecture, run, "cuda", depth), depth, architecture.num_layers)
    assert found == tape_peaks(whole, architecture.num_layers)
    assert kept_bytes(architecture, run, "cuda") == kept_on(whole)
