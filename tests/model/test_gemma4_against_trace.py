"""Gemma 4 31B and 26B-A4B against the traced stream of their real code: kernels, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tunecast
from tunecast.catalogs.errors import InputError, NotSupportedError, UnbuiltFamilyError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.resolve import resolve_run

BASE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "global_head_dim": 512,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "vocab_size": 8000, "max_position_embeddings": 8192,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
METHOD_WITH_ALL = "full, eager, two samples, nothing checkpointed"
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "lora, shorter than the window, two samples": {"max_length": 64, "per_device_train_batch_size": 2},
    "lora on attention": {"lora_target_modules": "q_proj,v_proj", "max_length": 256},
    "qlora": {"method": "qlora", "max_length": 512},
    "full": {"method": "full", "max_length": 512},
    METHOD_WITH_ALL: {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 256,
        "attn_implementation": "eager",
    },
    "lora with padding": {"padding_mask": True, "per_device_train_batch_size": 2, "max_length": 256},
    "lora, eager": {"attn_implementation": "eager", "max_length": 256},
    "lora, fp16": {"dtype": "fp16", "precision": "fp16-autocast", "max_length": 256},
}  # fmt: skip


def small(**changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **changes}, "gemma-4")


@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], method: str) -> None:
    same_as_traced(small(), **METHODS[method])


VARIANTS: dict[str, dict[str, Any]] = {
    "values of their own": {"attention_k_eq_v": False},
    "heads of equal width": {"global_head_dim": 64},
    "scores not capped": {"final_logit_softcapping": None},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_are_the_traced_ones(same_as_traced: Callable[..., None], changes: dict[str, Any]) -> None:
    same_as_traced(small(**changes), max_length=256)


EXPERTS = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 256}


@pytest.mark.parametrize("method", ["lora", "lora on attention", "qlora", METHOD_WITH_ALL])
def test_the_step_with_experts_is_the_traced_step(same_as_traced: Callable[..., None], method: str) -> None:
    same_as_traced(small(**EXPERTS), **METHODS[method])


PATTERN = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.thorough  # CI has deep rows of Gemma 4 E2B's kind and of other families
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_deep_model_is_the_traced_one(same_as_traced: Callable[..., None], checkpointing: bool) -> None:
    """Five layers with a window for each without, which have other heads: written as a few layers of each."""
    deep = small(**EXPERTS, num_hidden_layers=24, layer_types=PATTERN * 4)
    same_as_traced(deep, max_length=256, gradient_checkpointing=checkpointing)


def test_the_last_layer_has_no_window_whatever_the_config_says() -> None:
    """Gemma4TextConfig forces it."""
    forced = small(layer_types=["full_attention", "sliding_attention"])
    assert [group.layer.attention.window for group in forced.groups] == [None]
    silent = small(layer_types=None, num_hidden_layers=12)
    assert [group.count for group in silent.groups] == [5, 1, 5, 1]
    assert [group.layer.attention.head_dim for group in silent.groups] == [64, 512, 64, 512]


def test_heads_of_each_layer_as_newer_configs_write_them() -> None:
    own = {"1": {"head_dim": 512, "num_key_value_heads": 2}}
    changes = {"global_head_dim": None, "num_global_key_value_heads": None, "per_layer_config": own}
    assert small(**changes).groups == small().groups


@pytest.mark.parametrize("model", ["google/gemma-4-31B", "google/gemma-4-26B-A4B"])
def test_parameters_equal_the_catalog(model: str) -> None:
    """Counted from the real classes on the meta device, vision tower included."""
    row = load_models()[model]
    architecture = load_architecture(model)
    assert architecture.total_params == row.total_params - (row.vision_params or 0)
    assert architecture.active_params == row.active_params - (row.vision_params or 0)


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnbuiltFamilyError, match="gemma-4 has use_bidirectional_attention='all'"):
        small(use_bidirectional_attention="all")


def test_heads_too_wide_for_flash_kernels() -> None:
    wide, usual = small(), small(global_head_dim=64)
    with pytest.raises(InputError, match="heads of up to 256 values and gemma-4 has heads of 512; leave it out"):
        resolve_run(wide, {"attn_implementation": "flash_attention_2"})
    assert resolve_run(usual, {"attn_implementation": "flash_attention_2"}).run.attn_implementation != "sdpa"
    for stack in ("hf-peft", "unsloth", "axolotl"):
        resolved = resolve_run(wide, {"stack": stack, "max_length": 64})
        assert resolved.run.attn_implementation == "sdpa"
        assert any("Heads of 512 values are too wide" in note for note in resolved.notes)
    assert not any("too wide" in note for note in resolve_run(usual, {}).notes)
    split = {"num_gpus": 2, "cp": 2, "max_length": 256}
    with pytest.raises(NotSupportedError, match="Context parallelism of heads of 512 values"):
        resolve_run(wide, split)
    with pytest.raises(NotSupportedError, match="Tensor parallelism is built for plain heads"):
        resolve_run(wide, {"num_gpus": 2, "tp": 2})


def test_a_search_takes_it() -> None:
    found = tunecast.recommend(
        "google/gemma-4-26B-A4B", gpu=["h100-sxm5-80gb"], tokens="1M", max_length=1024, max_gpus=2
    )
    assert found.cheapest is not None
    assert found.cheapest.forecast.run.attn_implementation == "sdpa"


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(InputError, match="correct top_k_experts"):
        small(**{**EXPERTS, "top_k_experts": 17})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "own heads as a list": ({"per_layer_config": [1, 2]}, "has per_layer_config="),
    "own heads that are words": ({"per_layer_config": {"1": "x"}}, "has per_layer_config="),
    "own heads of a layer with a window": ({"per_layer_config": {"0": {"head_dim": 32}}}, "has per_layer_config="),
    "own heads by kind": ({"per_layer_config": {"full_attention": {"head_dim": 32}}}, "has per_layer_config="),
    "a field of its own that is not built": ({"per_layer_config": {"1": {"intermediate_size": 1}}}, "has per_layer"),
    "layers of other kinds": ({"layer_types": ["linear_attention"] * 2}, "they are a list of sliding_attention and"),
    "layers as a word": ({"layer_types": "full_attention"}, "they are a list of sliding_attention and"),
    "no window": ({"sliding_window": None}, "sliding_window=null, but it must be a number"),
    "no global heads": ({"global_head_dim": None}, "global_head_dim=null, but it must be a number"),
    "a switch as a word": ({"attention_k_eq_v": "false"}, "attention_k_eq_v='false', but it must be true or false"),
    "experts as a word": ({"enable_moe_block": "yes"}, "enable_moe_block='yes', but it must be true or false"),
    "experts without a number": ({"enable_moe_block": True, "top_k_experts": 2}, "has no 'num_experts'"),
    "key-value heads that do not divide": ({"num_global_key_value_heads": 3}, "correct num_global_key_value_heads"),
}


@pytest.mark.parametrize(("changes", "told"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small(**changes)


def test_layers_without_own_heads_have_the_usual_ones() -> None:
    """An empty ``per_layer_config`` overrides nothing, as Gemma4TextConfig reads it."""
    assert {group.layer.attention.head_dim for group in small(per_layer_config={}).groups} == {64}


def test_the_router_is_adapted_by_its_own_name() -> None:
    routed = small(**EXPERTS)
    for name in ("proj", "router.proj"):
        assert resolve_run(routed, {"lora_target_modules": name}).run.lora_target_modules == ("proj",)
    with pytest.raises(NotSupportedError, match=r"not built; --lora-target-modules takes q_proj, k_proj, .*, proj"):
        resolve_run(routed, {"lora_target_modules": "q_proj,gate_up_proj"})
