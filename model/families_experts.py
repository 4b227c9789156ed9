"""Families with routed experts or latent attention: rows of `families.FAMILIES`.

What their configs say of experts is in `family_experts.py`.
"""

from __future__ import annotations

from tunecast.model.family import Family

EXPERT_FAMILIES = (
    Family(
        model_type="mixtral",
        architecture_class="MixtralForCausalLM",
        qkv_bias=False,
        default_kv_heads=8,
        window_rule="all",
    ),
    Family(
        model_type="qwen3_moe",
        architecture_class="Qwen3MoeForCausalLM",
        qk_norm=True,
        default_kv_heads=4,
        window_rule="late",
    ),
    Family(model_type="olmoe", architecture_class="OlmoeForCausalLM", qk_norm=True, qk_norm_by_head=False),
    Family(
        model_type="granitemoe",
        architecture_class="GraniteMoeForCausalLM",
        residual_scaled=True,
        embedding_scale="stream",
        logits="scaled",
    ),
)
"""Llama's attention, or nearly so."""

ODD_FAMILIES = (
    Family(
        model_type="gemma2",
        masks="both",
        architecture_class="Gemma2ForCausalLM",
        default_kv_heads=4,
        default_head_dim=256,
        default_tied=True,
        window_rule="period",
        default_window=4096,
        global_period=2,
        activation="gelu",
        norm="rmsnorm-shifted",
        norm_order="both",
        embedding_scale="table",
        logits="capped",
        config_fields=("head_dim", "attention_bias", "sliding_window", "layer_types"),
    ),
    Family(
        model_type="gpt_oss",
        masks="both",
        architecture_class="GptOssForCausalLM",
        qkv_bias=True,
        o_bias=True,
        default_kv_heads=8,
        default_head_dim=64,
        window_rule="period",
        default_window=128,
        global_period=2,
        norm="rmsnorm-wide",
        finds_packing=False,
    ),
    Family(model_type="deepseek_v2", architecture_class="DeepseekV2ForCausalLM", qkv_bias=False),
    Family(model_type="deepseek_v3", architecture_class="DeepseekV3ForCausalLM", qkv_bias=False),
)
"""Attention beyond plain heads: capped scores and sinks, which transformers has as plain products only; latents."""
