"""Memory extended from shallow tapes to a model's depth: equal to the tape of every layer, and never negative."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, product
from typing import Any

import pytest
from ci_share import some_for_ci
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import small_qwen2

from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.inventory import merged
from tunecast.model.loss_chunks import KEPT_CHUNKS
from tunecast.model.memory import memory_timeline, step_peaks
from tunecast.model.parallel_memory import kept_bytes, kept_on
from tunecast.model.run import Run
from tunecast.model.short_stack import layers_of, most_repeated, short_stack, whole_stack
from tunecast.model.step import repetitions, tape_run, write_step
from tunecast.model.tape_peaks import alive_on, deep_peaks, largest_by_place
from tunecast.model.unsloth_rules import UNSLOTH_LOSSES

RunOf = Callable[..., Run]
DEPTH = 7
SMALL = small_qwen2(DEPTH)
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
    whole = largest_by_place(deep_peaks(write_step(architecture, tape_run(run), "cuda"), whole_stack(architecture)))
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


DENSE_FIRST = {
    "model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 12, "first_k_dense_replace": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-7B",
    "google/gemma-7b",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai-community/gpt2",
    "tiiuae/falcon-7b",
    "microsoft/phi-2",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2-9b",
    "google/gemma-3-1b-pt",
    "HuggingFaceTB/SmolLM3-3B",
    "dense first",
    "openai/gpt-oss-20b",
    "google/gemma-4-E2B",
    "google/gemma-4-E4B",
)
"""Rows of equal layers, and patterns: every second layer, every sixth and two left over, four dense ones before, every
fifth or sixth among those that make keys and values, and among those that reuse them."""
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
    {"method": "lora", "gradient_checkpointing": True, "checkpoint_every": 3},
    {"method": "full", "gradient_checkpointing": True, "checkpoint_first": 12},
)
OLDER = {"tiiuae/falcon-7b": {"hf_code": "4.49"}}
"""What transformers 5 would not quantize."""
CASES = [
    *((name, {**way, **OLDER.get(name, {})}) for name, way in product(FAMILIES, WAYS)),
    *product(FAMILIES[:1], ONE),
    *product(["google/gemma-3-1b-pt"], ONE[-2:]),
]


@pytest.mark.parametrize(
    ("name", "options"), some_for_ci(CASES), ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in CASES]
)
def test_every_spot_of_a_deep_model_follows_from_a_few_layers(
    run_of: RunOf, name: str, options: dict[str, Any]
) -> None:
    """Part by part, at every spot: what layers in the middle leave to others is what each further one adds, and so is
    what they keep to the backward. No layer in between needs more than those found, and every kernel is counted."""
    architecture = architecture_from_config(DENSE_FIRST, name) if name == "dense first" else load_architecture(name)
    run = tape_run(run_of(architecture, max_length=128, **options))
    assert short_stack(architecture, run).times > 1
    check_short_equals_whole(architecture, run)


def check_short_equals_whole(architecture: Architecture, run: Run) -> None:
    stack, every = short_stack(architecture, run), whole_stack(architecture)
    tape, whole = write_step(stack.architecture, run, "cuda"), write_step(architecture, run, "cuda")
    found, expected = deep_peaks(tape, stack), deep_peaks(whole, every)
    both = found.keys() & expected.keys()
    assert len(both) > len(found) / 2
    assert {spot: found[spot] for spot in both} == {spot: expected[spot] for spot in both}
    assert {spot[1] for spot in found.keys() ^ expected.keys()} <= COUNTED
    largest = max(peak.total for peak in alive_on(whole, range(0)).peaks.values())
    assert max(sum(parts.values()) for parts in found.values()) == largest
    assert kept_bytes(architecture, run, "cuda") == kept_on(whole, every)
    counted = merged((event, repetitions(event, stack, run)) for event in tape.events if event.kind is not None)
    written = merged((event, repetitions(event, every, run)) for event in whole.events if event.kind is not None)
    assert set(counted) == set(written)


COUNTED = {f"{count} {word}" for count in range(200) for word in ("before", "after")}
"""Places of layers that only patterns have."""
EXPERTS_AT_TIMES = {
    "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("targets", ["down_proj", "gate_proj,up_proj", "all-linear", "q_proj"])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_layers_before_the_first_adapter_have_no_backward(
    run_of: RunOf, every: int, targets: str, checkpointing: bool
) -> None:
    """Adapters on feed-forwards of dense layers alone, of which experts stand in between."""
    architecture = architecture_from_config({**EXPERTS_AT_TIMES, "decoder_sparse_step": every}, "at times")
    options = {"method": "lora", "max_length": 64, "lora_target_modules": targets}
    check_short_equals_whole(
        architecture, tape_run(run_of(architecture, gradient_checkpointing=checkpointing, **options))
    )


WINDOWS = (["sliding_attention"] * 12 + ["full_attention"] * 12, (["sliding_attention"] * 5 + ["full_attention"]) * 4)


@pytest.mark.parametrize("types", WINDOWS)
@pytest.mark.parametrize("options", [{}, {"max_length": 256, "num_gpus": 8}, {"gradient_checkpointing": False}])
def test_weights_that_stay_whole_are_counted_at_the_place_of_a_layer(
    run_of: RunOf, types: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP that keeps weights after the forward: at a layer in the middle those before it are whole, not all. The
    reference takes every layer written, each by its own index, from the first rule for named places."""
    import tunecast.model.memory as memory

    config = {**SMALL, "num_hidden_layers": 24, "vocab_size": 512, "sliding_window": 64, "use_sliding_window": True}
    architecture = architecture_from_config({**config, "layer_types": types}, "windows")
    asked = {"method": "full", "sharding": "fsdp-grad-op", "num_gpus": 2, "optim": "sgd", "max_length": 64, **options}
    run = run_of(architecture, **asked)
    found = memory_timeline(architecture, run)
    memory.spot_peaks.cache_clear()
    monkeypatch.setattr(memory, "short_stack", lambda model, _: whole_stack(model))
    whole = memory_timeline(architecture, run)
    memory.spot_peaks.cache_clear()
    assert found.moments == whole.moments


def test_a_peak_at_the_first_layer_of_a_later_kind_is_the_traced_one(run_of: RunOf) -> None:
    """Behind four dense layers the lowest one with experts has its temporaries beside the gradients of all others."""
    tracer = pytest.importorskip("tunecast.calibrate.trace.tracer")
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    architecture = architecture_from_config(DENSE_FIRST, "dense first")
    run = run_of(architecture, method="full", precision="bf16", optim="sgd", max_length=128)
    traced = tracer.trace_step(architecture, run).memory
    found = memory_timeline(architecture, run)
    assert found.peak_moment == traced.peak_moment == "backward"
    assert found.allocated_bytes == pytest.approx(traced.peak_bytes, rel=1e-4)


KINDS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(
    before=KINDS, turn=KINDS, times=st.integers(1, 9), after=KINDS, every=st.integers(1, 4), first=st.integers(0, 30)
)
def test_a_shortened_row_grows_back_to_the_whole(
    before: list[int], turn: list[int], times: int, after: list[int], every: int, first: int
) -> None:
    """Kinds and checkpoints, which go by the index: the repeated turn is among its likes, and what is left is treated
    as it was."""
    kinds = before + turn * times + after
    checkpointed = [index % every == 0 and index < (first or 99) for index in range(len(kinds))]
    found = most_repeated(kinds, checkpointed)
    both = list(zip(kinds, checkpointed, strict=True))
    if found is None:
        longest = max((len(list(same)) for _, same in groupby(both[1:])), default=0)
        assert longest < 5 or any(checkpointed)
        return
    start, length, repeated = found
    stop = start + length
    left = kinds[:stop] + kinds[start + length * repeated :]
    short = list(zip(left, checkpointed, strict=False))
    assert len(left) < len(kinds)
    assert short[:start] + short[start:stop] * repeated + short[stop:] == both
    assert short[start - 1] == short[stop - 1]
    assert short[stop] == short[start]


def test_the_layers_of_models_are_shortened_to_these(run_of: RunOf) -> None:
    lengths = {
        "meta-llama/Llama-3.1-8B": 3, "google/gemma-2-9b": 4, "google/gemma-3-27b-pt": 8, "deepseek-ai/DeepSeek-V3": 6,
    }  # fmt: skip
    for name, length in lengths.items():
        architecture = load_architecture(name)
        assert len(layers_of(short_stack(architecture, run_of(architecture)).architecture)) == length
