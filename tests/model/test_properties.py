"""Properties of memory that hold for every family and every variant of a run. No torch."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.catalogs.errors import TunecastError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.forecast_json import run_with_origins
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.tape_peaks import PARTS
from tunecast.model.trained import trainable_params
from tunecast.model.zero_memory import zero_master_bytes

MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-0.6B", "google/gemma-2-2b", "google/gemma-3-1b-pt", "microsoft/phi-2",
    "EleutherAI/pythia-160m", "EleutherAI/gpt-j-6b", "openai-community/gpt2", "facebook/opt-125m",
    "bigscience/bloom-560m", "tiiuae/falcon-7b", "bigcode/starcoder2-3b", "stabilityai/stablelm-2-1_6b",
    "allenai/OLMo-2-1124-7B", "CohereLabs/c4ai-command-r7b-12-2024",
    "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V2-Lite",
)  # fmt: skip
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_checkpointing": False},
    {"reentrant": True},
    {"activation_offloading": True},
    {"checkpoint_every": 2},
    {"use_dora": True},
    {"lora_bias": True},
    {"loss_type": "chunked_nll"},
    {"loss_type": "liger"},
    {"loss_type": "cut_cross_entropy"},
    {"loss_type": "unsloth"},
    {"loss_type": "unsloth-2026.9"},
    {"fused_kernels": "rms_norm,rope,swiglu"},
    {"quant_method": "bnb-8bit"},
    {"quant_method": "gptq-4bit"},
    {"dtype": "fp32"},
    {"precision": "bf16"},
    {"attn_implementation": "eager"},
    {"hf_code": "4.46"},
    {"torch_compile": True},
    {"beside": "head"},
    {"beside": "table"},
    {"whole": "head"},
    {"whole": "table"},
)
"""``beside``: adapters on a module outside the layers too; ``whole``: that module trained whole."""
SHAPES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "method": st.sampled_from(("lora", "qlora", "full")),
        "variant": st.sampled_from(VARIANTS),
        "optim": st.sampled_from(("adamw_torch", "adamw_8bit", "adafactor", "sgd")),
        "max_length": st.sampled_from((64, 256, 512)),
        "per_device_train_batch_size": st.integers(1, 4),
        "gradient_accumulation_steps": st.sampled_from((1, 2)),
        "layers": st.integers(1, 3),
    }
)


@cache
def cut(model: str, layers: int) -> Architecture:
    """The first layers of a catalog model."""
    architecture, groups, left = load_architecture(model), [], layers
    for group in architecture.groups:
        if left > 0:
            groups.append(replace(group, count=min(group.count, left)))
        left -= group.count
    return replace(architecture, groups=tuple(groups))


def named(architecture: Architecture, variant: dict[str, Any]) -> dict[str, Any]:
    """A variant as options, the modules outside the layers by this family's names."""
    roots = {"table": architecture.embedding_module, "head": architecture.head_module}
    if "beside" in variant:
        return {"lora_target_modules": f"all-linear,{roots[variant['beside']]}"}
    if "whole" in variant:
        return {"modules_to_save": roots[variant["whole"]]}
    return variant


def drawn(shape: dict[str, Any], **more: Any) -> tuple[Architecture, Run] | None:
    """The model and run of a shape; None where this family or method excludes the variant."""
    options = {name: value for name, value in (shape | more).items() if name not in ("model", "variant", "layers")}
    architecture = cut(shape["model"], more.get("layers", shape["layers"]))
    try:
        run = resolve_run(architecture, {**options, **named(architecture, shape["variant"])}).run
        memory_timeline(architecture, run)
    except TunecastError:
        return None
    return architecture, run


def test_every_family_and_every_variant_is_among_the_draws() -> None:
    """Some are refused together; none is refused always."""
    base = {"optim": "adamw_torch", "max_length": 64, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1, "layers": 1}  # fmt: skip
    for model in MODELS:
        assert drawn({**base, "model": model, "method": "lora", "variant": {}}) is not None, model
    for variant in VARIANTS:
        method = "qlora" if "quant_method" in variant else "lora"
        assert drawn({**base, "model": MODELS[0], "method": method, "variant": variant}) is not None, variant


@settings(max_examples=10, deadline=None)
@given(shape=SHAPES)
def test_parts_sum_to_the_peak_which_is_the_largest_moment(shape: dict[str, Any]) -> None:
    found = drawn(shape)
    if found is None:
        return
    memory = memory_timeline(*found)
    assert sum(memory.parts_bytes.values()) == memory.allocated_bytes
    assert set(memory.parts_bytes) == set(PARTS)
    assert min(memory.parts_bytes.values()) >= 0
    assert memory.at_rest_bytes <= memory.allocated_bytes == max(memory.moments.values())


@settings(max_examples=20, deadline=None)
@given(
    shape=SHAPES,
    grown=st.sampled_from(("max_length", "per_device_train_batch_size", "lora_r", "layers")),
    by=st.integers(1, 6),
)
def test_memory_never_falls_when_length_batch_rank_or_layers_grow(shape: dict[str, Any], grown: str, by: int) -> None:
    if grown == "lora_r":
        if shape["method"] == "full":
            return
        shape = {**shape, "lora_r": 4}
    smaller, larger = drawn(shape), drawn(shape, **{grown: shape[grown] + by})
    if smaller is None or larger is None:
        return
    before, after = (memory_timeline(*found).allocated_bytes for found in (smaller, larger))
    assert after >= before


@settings(max_examples=10, deadline=None)
@given(
    shape=SHAPES,
    sharding=st.sampled_from(("zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op")),
    num_gpus=st.sampled_from((4, 8, 16)),
)
def test_sharding_never_needs_more_than_one_gpu(shape: dict[str, Any], sharding: str, num_gpus: int) -> None:
    """But for DeepSpeed's fp32 copies, and buffers for gathers and buckets, which are a part of their own."""
    same = {} if shape["method"] == "full" else {"adapter_dtype": "bf16"}
    alone, many = drawn(shape, **same), drawn(shape, **same, num_gpus=num_gpus, sharding=sharding)
    if alone is None or many is None or alone[1].dtype != many[1].dtype:
        return
    masters = zero_master_bytes(*many)
    sharded = memory_timeline(*many)
    assert sharded.allocated_bytes - sharded.parts_bytes["communication"] <= (
        memory_timeline(*alone).allocated_bytes + masters // num_gpus
    )


@settings(max_examples=10, deadline=None)
@given(shape=SHAPES)
def test_an_adapter_of_rank_zero_is_a_frozen_map(shape: dict[str, Any]) -> None:
    """Targets with an inner rank of 0 train, hold, compute and communicate what a base without targets does."""
    found = drawn(shape)
    if found is None or found[1].method == "full":
        return
    architecture, run = found
    empty, none = replace(run, lora_r=0, lora_bias=False), replace(run, lora_target_modules=(), lora_bias=False)
    if run.use_dora:  # DoRA's magnitudes are trained whatever the rank
        empty, none = replace(empty, use_dora=False), replace(none, use_dora=False)
    assert trainable_params(architecture, empty) == trainable_params(architecture, none)
    assert memory_timeline(architecture, empty) == memory_timeline(architecture, none)
    assert step_operations(architecture, empty) == step_operations(architecture, none)
    if not run.modules_to_save:
        shared = replace(empty, num_gpus=2, sharding="ddp")
        assert not any(op.kind is Kind.COMMUNICATION for op in step_operations(architecture, shared))
        assert not any(op.phase is Phase.OPTIMIZER for op in step_operations(architecture, shared))


@settings(max_examples=10, deadline=None)
@given(shape=SHAPES)
def test_a_run_printed_as_json_and_read_back_is_the_same_run(shape: dict[str, Any]) -> None:
    found = drawn(shape)
    if found is None:
        return
    architecture, run = found
    printed = json.loads(json.dumps(run_with_origins(run, {})))
    assert set(printed) == {field.name for field in fields(Run)}
    options = {name: entry["value"] for name, entry in printed.items()}
    plain = {name: entry["value"] for name, entry in run_with_origins(Run(method=run.method), {}).items()}
    wanted = {name: value for name, value in options.items() if value not in (None, plain[name])} | {
        "method": run.method
    }
    switched_off = ("gradient_checkpointing", "double_quant", "compile_loss")
    again = resolve_run(architecture, wanted | {name: options[name] for name in switched_off}).run
    assert again == run
