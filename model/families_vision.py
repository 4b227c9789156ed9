"""Text decoders of models that see images: Qwen2, Qwen3 and Qwen3's mixtures with positions in time, row and column.

Sources: ``models/<type>/{configuration,modeling}_<type>.py`` of transformers 5. Text alone goes through the decoder as
through that of the family it comes from; what tells them apart are the rotary tables, made of three.
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.model.family import Family

QWEN2 = Family(
    model_type="qwen2_vl_text",
    architecture_class="Qwen2VLForConditionalGeneration",
    keeps_config=True,
    qkv_bias=True,
    o_bias=False,
    default_kv_heads=8,
    window_rule="late",
    default_window=4096,
    finds_packing=False,
    sections=(16, 24, 24),
    sections_joined=True,
)
VISION_FAMILIES = (
    QWEN2,
    replace(QWEN2, model_type="qwen2_5_vl_text", architecture_class="Qwen2_5_VLForConditionalGeneration"),
    Family(
        model_type="qwen3_vl_text",
        architecture_class="Qwen3VLForConditionalGeneration",
        keeps_config=True,
        qk_norm=True,
        default_kv_heads=32,
        default_head_dim=128,
        sections=(24, 20, 20),
    ),
    Family(
        model_type="qwen3_vl_moe_text",
        architecture_class="Qwen3VLMoeForConditionalGeneration",
        keeps_config=True,
        qk_norm=True,
        default_kv_heads=16,
        sections=(24, 20, 20),
    ),
)
"""In the order of `families.FAMILIES`, after Gemma's later relatives."""
WHOLE = {family.model_type: family.model_type.removesuffix("_text") for family in VISION_FAMILIES}
"""By the decoder's ``model_type``, that of the model it is part of: transformers has no causal language model of the
decoder alone."""
FLAT = {WHOLE[part]: part for part in ("qwen2_vl_text", "qwen2_5_vl_text")}
"""Models whose published configs have the decoder's fields beside ``vision_config``, not in a ``text_config``."""
