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
