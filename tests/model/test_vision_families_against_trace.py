"""Text decoders of models that see images against the traced stream of their real code: kernels, FLOPs, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.beside_the_text import config_notes
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.families_vision import VISION_FAMILIES

BASE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
JOINED = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": JOINED,
    "qwen2_5_vl_text": JOINED,
    "qwen3_vl_text": {"head_dim": 96, "rope_scaling": {"rope_type": "default", "mrope_section": [16, 16, 16]}},
    "qwen3_vl_moe_text": {
        "head_dim": 96, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    },
}  # fmt: skip
"""By ``model_type``."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "lora, two samples": {"max_length": 64, "per_device_train_batch_size": 2},
    "lora with padding": {"padding_mask": True, "per_device_train_batch_size": 2, "max_length": 256},
    "lora, eager": {"attn_implementation": "eager", "max_length": 256},
    "lora by FlashAttention-2": {"attn_implementation": "flash_attention_2", "max_length": 256},
    "qlora": {"method": "qlora", "max_length": 512},
    "full": {"method": "full", "max_length": 512},
    "full, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 256,
    },
    "lora in fp32, nothing checkpointed": {"dtype": "fp32", "gradient_checkpointing": False, "max_length": 256},
    "lora, bf16 without autocast": {"precision": "bf16", "max_length": 256},
}  # fmt: skip


def small(model_type: str, **changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[model_type], "model_type": model_type, **changes}, model_type)


def test_every_decoder_of_a_model_that_sees_is_here() -> None:
    assert set(CONFIGS) == {family.model_type for family in VISION_FAMILIES}


CASES = [(name, method) for name in CONFIGS for method in METHODS]


@pytest.mark.parametrize(("name", "method"), some_for_ci(CASES, 4))
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, method: str) -> None:
    same_as_traced(small(name), **METHODS[method])


PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 32768, "use_sliding_window": False,
    "tie_word_embeddings": False, "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "hidden_size": 1280},
}  # fmt: skip
"""Fields of Qwen/Qwen2.5-VL-7B-Instruct's config.json, which lie beside those of the vision part."""


def test_a_config_with_its_fields_beside_the_vision_part_is_that_of_the_decoder() -> None:
    """The text decoder is Qwen2.5 7B's, of 7,615,616,512 parameters."""
    found = architecture_from_config(PUBLISHED, "vl")
    assert found.model_type == "qwen2_5_vl_text"
    assert found.total_params == 7_615_616_512
    whole = ("architectures", "vision_config", "model_type", "tie_word_embeddings")
    text = {"model_type": "qwen2_5_vl_text", **{k: v for k, v in PUBLISHED.items() if k not in whole}}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": {}}
    assert architecture_from_config(nested, "vl").groups == found.groups
    assert config_notes(PUBLISHED, "vl") == config_notes({**nested, "architectures": PUBLISHED["architectures"]}, "vl")


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_model_says_whether_the_head_is_tied(tied: bool) -> None:
    text = {**BASE, **CONFIGS["qwen3_vl_moe_text"], "model_type": "qwen3_vl_moe_text", "tie_word_embeddings": True}
    whole = {"model_type": "qwen3_vl_moe", "text_config": text, **({"tie_word_embeddings": True} if tied else {})}
    assert architecture_from_config(whole, "vl").tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("sections", "told"), [([8, 8, 8], "must add up to the 32 angles"), ("8,12,12", "must be three whole numbers")]
)
def test_sections_that_no_table_has_are_refused(sections: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        small("qwen2_vl_text", rope_scaling={"type": "mrope", "mrope_section": sections})
