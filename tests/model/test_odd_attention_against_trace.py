"""Attention beyond plain heads against the traced stream of the real code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families_experts import ODD_FAMILIES
from tunecast.model.resolve import resolve_run

BASE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "sliding_window": 4096},
    "gemma2 local": {"head_dim": 64, "sliding_window": 256},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""By ``model_type``, and a word when there are several."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "qlora, two samples": {"method": "qlora", "max_length": 256, "per_device_train_batch_size": 2},
    "full": {"method": "full", "max_length": 512},
    "attention only, nothing checkpointed": {
        "gradient_checkpointing": False, "lora_target_modules": "o_proj", "max_length": 256,
    },
}  # fmt: skip


def small(name: str) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[name], "model_type": name.split()[0]}, name)


def test_every_odd_family_is_here() -> None:
    assert {name.split()[0] for name in CONFIGS} == {family.model_type for family in ODD_FAMILIES}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, method: str) -> None:
    same_as_traced(small(name), **METHODS[method])


def test_capped_scores_stay_inside_the_flash_kernel(same_as_traced: Callable[..., None]) -> None:
    same_as_traced(
        small("gemma2"), max_length=512, attn_implementation="flash_attention_2", gradient_checkpointing=False
    )


CLASSES = {family.architecture_class for family in ODD_FAMILIES}
ROWS = [row for row in load_models().values() if row.architecture_class in CLASSES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.hf_id)
def test_parameters_equal_the_catalog(row: Any) -> None:
    assert load_architecture(row.hf_id).total_params == row.total_params


def test_sdpa_of_a_family_without_it_is_refused_and_the_default_is_eager() -> None:
    gemma = small("gemma2")
    with pytest.raises(InputError, match="no sdpa"):
        resolve_run(gemma, {"attn_implementation": "sdpa"})
    resolved = resolve_run(gemma, {})
    assert resolved.run.attn_implementation == "eager"
    assert any("no sdpa" in note for note in resolved.notes)
