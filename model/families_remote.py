"""Families whose code comes with the checkpoint: Qwen 1, ChatGLM, MPT as llm-foundry trains it, Megatron's GPT.

Written after that code, without a trace to prove them (transformers does not have it); parameter counts are checked
against published ones. Sources: ``modeling_qwen.py``, ``modeling_chatglm.py`` of the hub; llm-foundry
``models/mpt/modeling_mpt.py``; Megatron-Core ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from tunecast.model.family import Family

REMOTE_FAMILIES = (
    Family(
        model_type="qwen",
        architecture_class="QWenLMHeadModel",
        embedding_module="wte",
        in_transformers=False,
        attention_names=("c_attn", "c_proj"),
        qkv_split="chunks",
        mlp_names=("w1", "w2", "c_proj"),
        qkv_bias=True,
        o_bias=False,
        inner_divisor=2,
        rotary_wide=True,
        rotary_by_flash=True,
    ),
    Family(
        model_type="chatglm",
        architecture_class="ChatGLMModel",
        embedding_module="word_embeddings",
        head_module="output_layer",
        other_classes=("ChatGLMForConditionalGeneration",),
        in_transformers=False,
        attention_names=("query_key_value", "dense"),
        qkv_split="chunks",
        mlp_names=("dense_h_to_4h", "dense_4h_to_h"),
        qkv_bias=True,
        o_bias=False,
        rotary_share=0.5,
    ),
    Family(
        model_type="megatron_gpt",
        architecture_class="GPTModel",
        embedding_module="word_embeddings",
        head_module="output_layer",
        in_transformers=False,
        attention_names=("linear_qkv", "linear_proj"),
        qkv_split="by-head",
        mlp_names=("linear_fc1", "linear_fc2"),
        gated=False,
        activation="gelu",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        default_tied=True,
        positions="learned",
        norm="layernorm-low",
    ),
    Family(
        model_type="mpt",
        own_kv_heads=True,
        architecture_class="MptForCausalLM",
        embedding_module="wte",
        keeps_config=True,
        attention="mpt",
        finds_packing=False,
        other_classes=("MPTForCausalLM",),
        attention_names=("Wqkv", "out_proj"),
        qkv_split="chunks",
        mlp_names=("up_proj", "down_proj"),
        gated=False,
        activation="gelu",
        qkv_bias=False,
        o_bias=False,
        default_inner=4,
        default_tied=True,
        positions="alibi",
        norm="layernorm-plain",
    ),
)
"""In the order of `families.FAMILIES`, at its end."""
