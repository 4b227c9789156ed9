"""Later relatives of Llama against the traced stream of their real code: kernels, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.catalogs.errors import InputError, NotSupportedError, UnbuiltFamilyError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.families_later import LATER_FAMILIES
from tunecast.model.litgpt import as_litgpt
from tunecast.model.resolve import resolve_run

BASE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": 128, "layer_types": BOTH},
    "ministral3": {"head_dim": 96},
    "ministral": {"head_dim": 64, "sliding_window": 128, "layer_types": BOTH},
    "glm4": {"head_dim": 96},
    "glm": {"head_dim": 96},
    "glm4_moe": {
        "head_dim": 96, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "use_qk_norm": True, "attention_bias": True,
    },
    "seed_oss": {"head_dim": 96},
    "arcee": {},
    "exaone4": {"sliding_window": 128, "layer_types": BOTH},
    "minimax_m2": {
        "head_dim": 96, "rotary_dim": 48, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256,
    },
    "glm4_moe_lite": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "q_lora_rank": 192,
        "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "num_key_value_heads": 8,
    },
    "hunyuan_v1_dense": {"head_dim": 96},
    "qwen2_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 384,
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
"""By ``model_type``: every kind of layer of the family occurs."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "lora, shorter than any window, two samples": {"max_length": 64, "per_device_train_batch_size": 2},
    "lora on attention, two samples": {
        "lora_target_modules": "q_proj,k_proj,v_proj,o_proj", "max_length": 256, "per_device_train_batch_size": 2,
    },
    "lora on two maps, nothing checkpointed": {
        "lora_target_modules": "q_proj,v_proj", "gradient_checkpointing": False, "max_length": 256,
    },
    "qlora": {"method": "qlora", "max_length": 512},
    "qlora, nothing checkpointed, two samples": {
        "method": "qlora", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 64,
    },
    "full": {"method": "full", "max_length": 512},
    "full, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 256,
    },
    "full, eager, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 256,
        "attn_implementation": "eager",
    },
    "lora, eager": {"attn_implementation": "eager", "max_length": 256},
    "lora, eager, shorter than any window": {"attn_implementation": "eager", "max_length": 64},
    "lora, fp16": {"dtype": "fp16", "precision": "fp16-autocast", "max_length": 256},
    "lora in fp32, nothing checkpointed": {"dtype": "fp32", "gradient_checkpointing": False, "max_length": 256},
    "lora, bf16 without autocast": {"precision": "bf16", "max_length": 256},
}  # fmt: skip


def small(model_type: str, **changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[model_type], "model_type": model_type, **changes}, model_type)


def test_every_later_family_is_here() -> None:
    assert set(CONFIGS) == {family.model_type for family in LATER_FAMILIES}


LATENT = "glm4_moe_lite"
"""Has no formulas of eager attention."""
RENAMED = {
    LATENT: {
        "q_proj,k_proj,v_proj,o_proj": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj",
        "q_proj,v_proj": "q_b_proj",
    },
    "lfm2": {"q_proj,k_proj,v_proj,o_proj": "q_proj,k_proj,v_proj,in_proj,out_proj"},
}
"""Targets by what a family with maps of its own calls them."""
EACH = {"lora": 2, "full": 3}
"""Of so many families one in CI; of other methods one in seven."""
CASES = [
    pytest.param(name, method, marks=pytest.mark.thorough if (place + turn) % EACH.get(method, 7) else [])
    for place, name in enumerate(CONFIGS)
    for turn, method in enumerate(METHODS)
    if not (name == LATENT and "eager" in method)
]
"""CI has LoRA of every other family, full training of every third, and of the others one in seven."""


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, method: str) -> None:
    names = RENAMED.get(name, {})
    options = {option: names.get(value, value) for option, value in METHODS[method].items()}
    same_as_traced(small(name), **options)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4 without biases": ("glm4", {"attention_bias": False}),
    "GLM-4 with whole heads rotated": ("glm4", {"partial_rotary_factor": 1.0, "head_dim": 64}),
    "GLM rotated by its own share": (
        "glm",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    ),
    "GLM-4.5 without norms and biases": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
    "GLM-4.5 with groups of experts": ("glm4_moe", {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
    "GLM-4.5 without dense layers": ("glm4_moe", {"first_k_dense_replace": 0, "n_routed_experts": 160}),
    "Seed-OSS without dropout": ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0, "mlp_bias": True}),
    "Seed-OSS with a bias of the output": ("seed_oss", {"attention_out_bias": True, "residual_dropout": 0}),
    "EXAONE 4 without windows": ("exaone4", {"sliding_window": None, "layer_types": BOTH[1:] * 2}),
    "EXAONE 4 with windows only": ("exaone4", {"layer_types": BOTH[:1] * 2, "tie_word_embeddings": True}),
    "GLM-4.5 with whole heads rotated": ("glm4_moe", {"partial_rotary_factor": 1.0}),
    "MiniMax-M2 with whole heads rotated": ("minimax_m2", {"rotary_dim": None}),
    "Arcee with biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
    "Ministral 3 with a window": ("ministral3", {"sliding_window": 128}),
    "Ministral 3 tied": ("ministral3", {"tie_word_embeddings": True}),
    "Ministral without windows": ("ministral", {"layer_types": BOTH[1:] * 2, "head_dim": 96}),
    "OLMo 3 with windows only": ("olmo3", {"layer_types": BOTH[:1] * 2}),
    "OLMo 3 without windows": ("olmo3", {"layer_types": BOTH[1:] * 2}),
    "OLMo 3 with biases": ("olmo3", {"attention_bias": True}),
    "HunYuan with biases, tied": ("hunyuan_v1_dense", {"attention_bias": True, "tie_word_embeddings": True}),
    "HunYuan with as many keys as queries": ("hunyuan_v1_dense", {"head_dim": 64, "num_key_value_heads": None}),
    "Qwen2-MoE without biases": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "Qwen2-MoE with dense layers": ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "LFM2 as wide as named, not tied": (
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "tie_embedding": False, "tie_word_embeddings": False},
    ),
    "LFM2 not tied, as transformers writes it": ("lfm2", {"tie_word_embeddings": False}),
    "LFM2 by indices, wider": (
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [0], "block_ffn_dim_multiplier": 1.3, "block_ff_dim": 1000},
    ),
    "LFM2 of attention alone, over five tokens": (
        "lfm2",
        {"layer_types": None, "conv_L_cache": 5, "block_multiple_of": 128},
    ),
    "OLMo 3 with as many keys as queries, tied": ("olmo3", {"num_key_value_heads": None, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize(("name", "changes"), some_for_ci(VARIANTS.values(), 5), ids=VARIANTS)
def test_variants_are_the_traced_ones(same_as_traced: Callable[..., None], name: str, changes: dict[str, Any]) -> None:
    same_as_traced(small(name, **changes), max_length=256)
    same_as_traced(small(name, **changes), method="full", attn_implementation="eager", max_length=256)


LATENTS: dict[str, dict[str, Any]] = {
    "one map of queries": {"q_lora_rank": None},
    "values narrower than keys": {"v_head_dim": 32},
    "heads that do not divide the width": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "experts in the first layer": {"mlp_layer_types": ["sparse", "dense"]},
    "as published": {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
}


@pytest.mark.parametrize("changes", some_for_ci(LATENTS.values(), 2), ids=LATENTS)
def test_variants_of_latent_attention_are_the_traced_ones(
    same_as_traced: Callable[..., None], changes: dict[str, Any]
) -> None:
    same_as_traced(small(LATENT, **changes), max_length=256)
    same_as_traced(small(LATENT, **changes), max_length=256, padding_mask=True, per_device_train_batch_size=2)
    same_as_traced(small(LATENT, **changes), method="full", max_length=256, gradient_checkpointing=False)


@pytest.mark.parametrize("changes", some_for_ci([{"padding_mask": True}, {"flash": True}]), ids=str)
def test_convolutions_of_padded_samples_are_the_traced_ones(
    same_as_traced: Callable[..., None], changes: dict[str, Any]
) -> None:
    how = {"attn_implementation": "flash_attention_2"} if changes.get("flash") else changes
    same_as_traced(small("lfm2"), max_length=128, per_device_train_batch_size=2, **how)
    same_as_traced(small("lfm2"), method="full", max_length=128, gradient_checkpointing=False, **how)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "compilation": ({"torch_compile": True}, "--torch-compile with the short convolutions of lfm2 is not built"),
    "pipelines": ({"num_gpus": 2, "pp": 2}, "--pp 2 with the short convolutions of lfm2"),
    "unsloth": ({"stack": "unsloth"}, "--stack unsloth with the short convolutions of lfm2"),
    "tensor parallelism": ({"num_gpus": 2, "tp": 2}, "Tensor parallelism is built for plain heads"),
}


@pytest.mark.parametrize(("options", "told"), OPTIONS.values(), ids=OPTIONS)
def test_what_no_trace_proves_of_convolutions_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(NotSupportedError, match=told):
        resolve_run(small("lfm2"), options)


@pytest.mark.parametrize("stack", ["trl", "axolotl", "llama-factory", "ms-swift"])
def test_kernels_that_only_a_stack_brings_are_left_out_of_convolutions(stack: str) -> None:
    assert resolve_run(small("lfm2"), {"stack": stack}).run.fused_kernels == ()


def test_a_note_says_whose_convolutions_are_forecast() -> None:
    assert any("causal-conv1d is not installed" in note for note in resolve_run(small("lfm2"), {}).notes)


DEEP: dict[str, dict[str, Any]] = {
    "olmo3": {"layer_types": None},
    "ministral3": {},
    "glm4_moe": {"first_k_dense_replace": 3},
    "exaone4": {"layer_types": None},
    "lfm2": {"layer_types": (["conv"] * 2 + BOTH[1:]) * 8},
}


@pytest.mark.parametrize("checkpointing", some_for_ci([True, False]))
@pytest.mark.parametrize("name", some_for_ci(DEEP, 3, first=2))
def test_a_deep_model_is_the_traced_one(same_as_traced: Callable[..., None], name: str, checkpointing: bool) -> None:
    """Written as a few layers of each kind, traced as a few units of the pattern."""
    deep = small(name, num_hidden_layers=24, **DEEP[name])
    same_as_traced(deep, max_length=256, gradient_checkpointing=checkpointing)


def test_three_layers_with_a_window_then_one_without() -> None:
    silent = small("olmo3", layer_types=None, num_hidden_layers=8)
    assert [(group.layer.attention.window, group.count) for group in silent.groups] == [(128, 3), (None, 1)] * 2


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "GLM-4.7-Flash with layers of other kinds": (
        LATENT,
        {"mlp_layer_types": ["moe", "dense"]},
        "mlp_layer_types .* a list of dense and sparse",
    ),
    "GLM-4.7-Flash with too few layers": (
        LATENT,
        {"mlp_layer_types": ["sparse"]},
        "has 1 mlp_layer_types for 2 layers",
    ),
    "Qwen2-MoE with biases as a word": ("qwen2_moe", {"qkv_bias": "yes"}, "qkv_bias='yes'"),
    "GLM-4.5 with groups that do not divide": ("glm4_moe", {"n_group": 3}, "correct topk_group or n_group"),
    "GLM-4.5 with more groups than it has": ("glm4_moe", {"topk_group": 2}, "correct topk_group or n_group"),
    "GLM-4.5 with dense layers as a word": (
        "glm4_moe",
        {"first_k_dense_replace": "one"},
        "first_k_dense_replace='one', but it must be a whole number",
    ),
    "GLM-4.5 without shared experts": ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0, but it must be"),
    "GLM-4.5 with norms as a word": ("glm4_moe", {"use_qk_norm": "yes"}, "use_qk_norm='yes'"),
    "GLM-4 with biases as a word": ("glm4", {"attention_bias": "yes"}, "attention_bias='yes'"),
    "Seed-OSS that drops all": ("seed_oss", {"residual_dropout": 1}, "residual_dropout=1, but it must be a number"),
    "MiniMax-M2 rotated beyond its heads": ("minimax_m2", {"rotary_dim": 128}, "rotary_dim=128, but heads have 96"),
    "HunYuan without a width of heads": ("hunyuan_v1_dense", {"head_dim": None}, "has no 'head_dim'"),
    "Ministral without a width of heads": ("ministral", {"head_dim": None}, "has no 'head_dim'"),
    "Ministral without a window": ("ministral", {"sliding_window": None}, "sliding_window=null"),
    "Ministral 3 without its scale": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default"}},
        "'llama_4_scaling_beta'",
    ),
    "Ministral 3 with positions as a word": (
        "ministral3",
        {"rope_parameters": "yarn"},
        "no number 'llama_4_scaling_beta'",
    ),
    "OLMo 3 without a window": ("olmo3", {"sliding_window": None}, "sliding_window=null, but it must be a number"),
    "OLMo 3 with layers of other kinds": ("olmo3", {"layer_types": ["linear_attention"] * 2}, "they are a list of"),
    "OLMo 3 with layers as a word": (
        "olmo3",
        {"layer_types": "full_attention"},
        "they are a list of sliding_attention",
    ),
    "OLMo 3 with layers as numbers": ("olmo3", {"layer_types": [1, [2]]}, "they are a list of sliding_attention"),
    "OLMo 3 with too few layers": ("olmo3", {"layer_types": BOTH[:1]}, "has 1 layer_types for 2 layers"),
    "LFM2 with indices in a list": (
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [[2]]},
        "lists layers from 0 to 2",
    ),
    "LFM2 wider than any": ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "above 0, 1000 at most"),
    "LFM2 with an index beyond its layers": (
        "lfm2",
        {"layer_types": None, "full_attn_idxs": [3]},
        "lists layers from 0 to 2",
    ),
    "LFM2 with layers of other kinds": ("lfm2", {"layer_types": BOTH}, "they are a list of conv"),
    "LFM2 with a width as a word": ("lfm2", {"block_multiple_of": "x"}, "block_multiple_of='x'"),
    "LFM2 with a multiplier as a word": ("lfm2", {"block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier='x'"),
    "LFM2 with an adjustment as a word": ("lfm2", {"block_auto_adjust_ff_dim": "x"}, "block_auto_adjust_ff_dim='x'"),
    "OLMo 3 with a bias as a word": ("olmo3", {"attention_bias": "no"}, "attention_bias='no'"),
}


@pytest.mark.parametrize(("name", "changes", "told"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_one_sentence(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small(name, **changes)


UNBUILT: dict[str, tuple[str, dict[str, Any]]] = {
    "another activation": ("olmo3", {"hidden_act": "gelu"}),
    "weights of experts that are not divided by their sum": ("glm4_moe", {"norm_topk_prob": False}),
    "dropped attention": ("olmo3", {"attention_dropout": 0.1}),
    "windows of every other layer": ("qwen2_moe", {"use_sliding_window": True}),
    "convolutions with biases": ("lfm2", {"conv_bias": True}),
}


@pytest.mark.parametrize(("name", "changes"), UNBUILT.values(), ids=UNBUILT)
def test_what_is_not_built_is_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    ((field, value),) = changes.items()
    with pytest.raises(UnbuiltFamilyError, match=f"{name} has {field}(={value!r})?"):
        small(name, **changes)


def test_norms_over_all_queries_are_not_split() -> None:
    with pytest.raises(NotSupportedError, match="norms over all queries and keys, which olmo3 has, is not built"):
        resolve_run(small("olmo3"), {"num_gpus": 2, "tp": 2, "max_length": 256})


def test_gate_and_up_in_one_map_are_not_split() -> None:
    with pytest.raises(NotSupportedError, match="gate and up in one map, which glm4 has, is not built"):
        resolve_run(small("glm4"), {"num_gpus": 2, "tp": 2, "max_length": 256})


def test_kernels_that_rotate_halves_are_left_out_of_neighbours() -> None:
    with pytest.raises(NotSupportedError, match="--fused-kernels rope was asked for, but glm4 rotates neighbours"):
        resolve_run(small("glm4"), {"fused_kernels": "rope"})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("glm4", "positions of neighbours in a head"),
        ("ministral3", "queries scaled by position"),
        ("lfm2", "short convolutions"),
    ],
)
def test_litgpt_has_no_formulas_of_them(name: str, what: str) -> None:
    with pytest.raises(NotSupportedError, match=f"is not built for {what} yet; use --stack hf-peft"):
        as_litgpt(small(name))


def test_exaone_reads_its_pattern_where_layers_are_not_told_apart() -> None:
    """transformers takes a whole number; "LLLG" of the hub's configs stands beside ``layer_types``, which it reads."""
    assert small("exaone4", sliding_window_pattern="LLLG").groups == small("exaone4").groups
    with pytest.raises(UnbuiltFamilyError, match="exaone4 has sliding_window_pattern='LLLG'"):
        small("exaone4", layer_types=None, sliding_window_pattern="LLLG")
    with pytest.raises(InputError, match="sliding_window=null, but it must be a number"):
        small("exaone4", layer_types=None, sliding_window=None)
