"""Families with layer norms: GPT-NeoX, Phi, StableLM, StarCoder 2 and their like, as data read from their code.

Sources: ``models/<type>/{configuration,modeling}_<type>.py`` of transformers 5.
"""

from __future__ import annotations

from tunecast.model.family import Family

LAYER_NORM_FAMILIES = (
    Family(
        model_type="gpt_neox",
        architecture_class="GPTNeoXForCausalLM",
        attention_names=("query_key_value", "dense"),
        qkv_split="by-head",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
        gated=False,
        activation="gelu",
        mlp_bias=True,
        rotary_share=0.25,
        rotary_share_fields=("partial_rotary_factor", "rotary_pct"),
        norm="layernorm",
        parallel="norms",
    ),
    Family(
        model_type="phi",
        architecture_class="PhiForCausalLM",
        attention_names=("q_proj", "k_proj", "v_proj", "dense"),
        mlp_names=("fc1", "fc2"),
        gated=False,
        activation="gelu_new",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        rotary_share=0.5,
        norm="layernorm",
        parallel="shared",
        head_bias=True,
    ),
    Family(
        model_type="stablelm",
        architecture_class="StableLmForCausalLM",
        default_kv_heads=32,
        o_bias=False,
        rotary_share=0.25,
        norm="layernorm",
        residual_first=True,
    ),
    Family(
        model_type="starcoder2",
        architecture_class="Starcoder2ForCausalLM",
        mlp_names=("c_fc", "c_proj"),
        gated=False,
        activation="gelu",
        default_kv_heads=2,
        default_tied=True,
        window_rule="all",
        norm="layernorm",
    ),
)
"""In the order of `families.FAMILIES`, after Llama's relatives."""
