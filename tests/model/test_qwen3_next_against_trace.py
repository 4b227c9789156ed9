"""Qwen3-Next against the traced stream of its real code: kernels, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.catalogs.errors import InputError, UnbuiltFamilyError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config

BASE: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8000,
    "max_position_embeddings": 8192, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 384,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "full": {"method": "full", "max_length": 512},
    "lora, a chunk filled up, two samples": {"max_length": 100, "per_device_train_batch_size": 2},
    "lora on linear attention": {"lora_target_modules": "in_proj_qkvz,in_proj_ba,out_proj", "max_length": 256},
    "lora, nothing checkpointed": {"max_length": 700, "gradient_checkpointing": False},
    "lora with padding": {"padding_mask": True, "max_length": 200, "per_device_train_batch_size": 2},
    "full with padding, nothing checkpointed": {
        "method": "full", "padding_mask": True, "max_length": 130, "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
    },
    "lora, eager": {"attn_implementation": "eager", "max_length": 256},
    "lora, fp16": {"dtype": "fp16", "precision": "fp16-autocast", "max_length": 256},
    "lora in fp32, two samples": {"dtype": "fp32", "max_length": 40, "per_device_train_batch_size": 2},
    "lora in fp32, whole chunks of two samples": {
        "dtype": "fp32", "precision": "fp32", "max_length": 128, "per_device_train_batch_size": 2,
    },
    "lora, bf16 without autocast": {"precision": "bf16", "max_length": 256},
    "qlora, two samples": {"method": "qlora", "max_length": 130, "per_device_train_batch_size": 2},
    "full, eager, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 200,
        "attn_implementation": "eager",
    },
}  # fmt: skip


def small(**changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **changes}, "qwen3-next")


@pytest.mark.parametrize("method", some_for_ci(METHODS.values(), 3), ids=METHODS)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], method: dict[str, Any]) -> None:
    same_as_traced(small(), **method)


VARIANTS: dict[str, dict[str, Any]] = {
    "as many heads of values as of keys": {"linear_num_value_heads": 4},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "dense layers": {"mlp_only_layers": [0, 2]},
    "every other layer dense": {"decoder_sparse_step": 2},
    "linear attention alone": {"layer_types": ["linear_attention"] * 4},
    "whole heads rotated": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    "a deep model": {"num_hidden_layers": 16},
}


@pytest.mark.parametrize("changes", some_for_ci(VARIANTS.values(), 4, first=1), ids=VARIANTS)
def test_variants_are_the_traced_ones(same_as_traced: Callable[..., None], changes: dict[str, Any]) -> None:
    same_as_traced(small(**changes), max_length=200, per_device_train_batch_size=2)
    same_as_traced(small(**changes), method="full", max_length=128, gradient_checkpointing=False)


def test_the_published_model_has_its_published_size() -> None:
    """Qwen3-Next-80B-A3B by the defaults of its configuration class: 80 billion parameters, of which 3.9 act."""
    whole = {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "vocab_size": 151936,
    }  # fmt: skip
    architecture = architecture_from_config(whole, "qwen3-next")
    assert architecture.total_params == pytest.approx(80e9, rel=0.01)
    assert 3e9 < architecture.active_params < 4e9


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnbuiltFamilyError, match="qwen3-next has norm_topk_prob=False"):
        small(norm_topk_prob=False)
    with pytest.raises(InputError, match="which 3 linear_num_key_heads do not divide"):
        small(linear_num_key_heads=3)
