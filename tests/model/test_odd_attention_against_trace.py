"""Attention beyond plain heads against the traced stream of the real code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_pairs_for_ci

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families_experts import ODD_FAMILIES
from tunecast.model.flops import attention_flops_per_sample
from tunecast.model.inventory import step_operations
from tunecast.model.resolve import resolve_run

BASE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 2,
    "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "first_k_dense_replace": 1, "num_key_value_heads": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "sliding_window": 4096},
    "gemma2 local": {"head_dim": 64, "sliding_window": 256},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "q_lora_rank": 192, "n_group": 4, "topk_group": 2},
    "deepseek_v3 of one group": {**LATENT, "q_lora_rank": 192, "n_group": 1, "topk_group": 1},
}
"""By ``model_type``, and a word when there are several."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "qlora, two samples": {"method": "qlora", "max_length": 256, "per_device_train_batch_size": 2},
    "full": {"method": "full", "max_length": 512},
    "attention only, nothing checkpointed": {
        "gradient_checkpointing": False, "lora_target_modules": "o_proj", "max_length": 256,
    },
    "lora in fp32": {"dtype": "fp32", "max_length": 256, "gradient_checkpointing": False},
    "lora with padding": {"padding_mask": True, "per_device_train_batch_size": 2, "max_length": 256},
    "full with padding": {
        "method": "full", "padding_mask": True, "per_device_train_batch_size": 2, "max_length": 256,
        "gradient_checkpointing": False,
    },
}  # fmt: skip


def small(name: str, **changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[name], "model_type": name.split()[0], **changes}, name)


def test_every_odd_family_is_here() -> None:
    assert {name.split()[0] for name in CONFIGS} == {family.model_type for family in ODD_FAMILIES}


@pytest.mark.parametrize(("name", "method"), some_pairs_for_ci(CONFIGS, METHODS, 3))
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, method: str) -> None:
    same_as_traced(small(name), **METHODS[method])


def test_how_experts_are_chosen_is_read_of_families_whose_code_reads_it() -> None:
    """DeepSeek-V3's and Kimi K2's published configs say ``noaux_tc``, which their code does not ask for."""
    assert small("deepseek_v3", topk_method="noaux_tc").groups == small("deepseek_v3").groups


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


def test_latent_attention_needs_less_work_for_narrower_values() -> None:
    """DeepSeek-V2-Lite by hand: scores over 192 numbers, values over 128, causal half, twice as much backward."""
    lite = load_architecture("deepseek-ai/DeepSeek-V2-Lite")
    attention = lite.groups[-1].layer.attention
    by_hand = 3 * 16 * 2 * (192 + 128) * 1024 * 1024 / 2
    assert attention_flops_per_sample(attention, 1024) == pytest.approx(by_hand, rel=1e-12)


def test_what_latent_attention_has_no_formulas_for_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="topk_method"):
        small("deepseek_v2", topk_method="group_limited_greedy")
    latent = small("deepseek_v2")
    for asked in ("flash_attention_2", "eager"):
        with pytest.raises(NotSupportedError, match="latent attention has no formulas"):
            step_operations(latent, resolve_run(latent, {"attn_implementation": asked}).run)
