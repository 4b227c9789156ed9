"""What a config decides about its family: the same modelling code, with switches.

Sources: ``models/<type>/configuration_<type>.py`` of transformers 5, whose defaults stand where a config is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError, UnbuiltFamilyError
from tunecast.model.config_fields import DENSE, LAYER_KINDS, SPARSE, check_layer_types, inner, positive, switch
from tunecast.model.family import Family

Config = Mapping[str, Any]
Changes = dict[str, Any]
SEED_DROPS, SEED_DROP = {"dropout": "residual_dropout", "attention_dropout": "attention_dropout"}, 0.1
"""Our fields and Seed-OSS's of what is dropped while training, and how much when its config says nothing."""
POSITION_SCALES = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Fields of Ministral 3's ``rope_parameters`` that scale its queries."""
LAYER_TYPES = ("sliding_attention", "full_attention")
"""Kinds of attention that layers of windowed families are of."""


ONE_KERNEL = {"silu": ("silu", "swish"), "gelu": ("gelu", "gelu_pytorch_tanh")}
"""Names of ``transformers.activations.ACT2FN`` for an activation that is one kernel each way."""


NOT_OBEYED = ("lfm2", "qwen", "chatglm", "megatron_gpt")
"""Families whose attention does not read ``attention_dropout`` (``modeling_lfm2.py`` passes 0), or whose code, which
transformers does not hold, has fields of its own for it."""


def adapted(family: Family, config: Config, name: str) -> Family:
    """The family as this config has it: attention weights are dropped while training where it says so."""
    config = {field: value for field, value in config.items() if field != "attention_dropout" or value is not None}
    changes, dropped = VARIANTS.get(family.model_type), dropped_weights(config, name)
    dropped = 0.0 if family.model_type in NOT_OBEYED else dropped
    given = {"attention_dropout": dropped, **({} if changes is None else changes(config, name))}
    found = replace(family, **given)
    if config.get("hidden_act", "") is None:
        raise InputError(f"The config {name} has hidden_act null, which names no activation; correct it.")
    known = ONE_KERNEL.get(found.activation)
    if known and config.get("hidden_act") not in known:
        refuse(config, name, hidden_act=known[0])
    return found


def dropped_weights(config: Config, name: str) -> float:
    """``attention_dropout`` of a config, 0 where it says nothing. Raises InputError for what is no share."""
    dropped = config.get("attention_dropout", 0.0)
    if isinstance(dropped, bool) or not isinstance(dropped, int | float) or not 0.0 <= dropped < 1.0:
        raise InputError(
            f"The config {name} has attention_dropout {dropped!r}, which is no share from 0 to below 1; correct it."
        )
    return float(dropped)


def refuse(config: Config, name: str, **ordinary: Any) -> None:
    """Refuse a switch that is not at its ordinary value (the value also stands for silence)."""
    for field, value in ordinary.items():
        given = config.get(field)
        if given is not None and given != value:
            raise UnbuiltFamilyError(
                f"{name} has {field}={given!r}, which has no formulas; trace its real code with --exact."
            )


def gpt_neox(config: Config, name: str) -> Changes:
    """Blocks side by side unless ``use_parallel_residual`` is false."""
    refuse(config, name, hidden_dropout=0.0, attention_dropout=0.0)
    bias = switch(config, "attention_bias", name, default=True)
    parallel = "norms" if switch(config, "use_parallel_residual", name, default=True) else "none"
    return {"parallel": parallel, "qkv_bias": bias, "o_bias": bias}


def phi(config: Config, name: str) -> Changes:
    """Phi-1.5 and Phi-2."""
    refuse(config, name, qk_layernorm=False)
    drops = {"dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop", "attention_dropout": "attention_dropout"}
    return {ours: dropped(config, theirs, name) for ours, theirs in drops.items()}


def phi3(config: Config, name: str) -> Changes:
    """Phi-3 and Phi-4, which drop nothing of their blocks' outputs."""
    refuse(config, name, resid_pdrop=0.0)
    return {}


def starcoder2(config: Config, name: str) -> Changes:
    """``use_bias`` speaks of every linear map."""
    bias = switch(config, "use_bias", name, default=True)
    fields = {**SEED_DROPS, "embedding_dropout": "embedding_dropout"}
    drops = {ours: dropped(config, theirs, name) for ours, theirs in fields.items()}
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, **drops}


def stablelm(config: Config, name: str) -> Changes:
    """Biases of q, k, v; norms of each head, and blocks side by side behind one norm (StableLM 2 12B)."""
    refuse(config, name, hidden_dropout=0.0, attention_dropout=0.0)
    parallel = "shared" if switch(config, "use_parallel_residual", name) else "none"
    norms = switch(config, "qk_layernorm", name)
    bias = switch(config, "use_qkv_bias", name)
    return {"qkv_bias": bias, "parallel": parallel, "qk_norm": norms, "qk_norm_each": norms}


def qwen(config: Config, name: str) -> Changes:
    """Qwen 1: biases on the fused map alone (``no_bias``)."""
    refuse(config, name, no_bias=True, attn_dropout_prob=0.0, emb_dropout_prob=0.0, rotary_pct=1.0)
    return {}


def chatglm(config: Config, name: str) -> Changes:
    """ChatGLM 2 and 3 as they are; the first one has layer norms, biases everywhere, gelu and a tied head.

    Left out of the first one: its residual of normalised inputs, and the second of its two rotations.
    """
    if not switch(config, "position_encoding_2d", name):
        return {}
    shape = {"gated": False, "activation": "gelu", "norm": "layernorm", "rotary_share": 1.0}
    return {**shape, "o_bias": True, "mlp_bias": True, "default_tied": True}


def mpt(config: Config, name: str) -> Changes:
    """As transformers runs it: ALiBi and no biases. Without ALiBi, as llm-foundry trains it."""
    attention = inner(config, name, "attn_config")
    refuse(attention, name, clip_qkv=None, attn_pdrop=0.0, qk_ln=False)
    if attention.get("alibi", True):
        return {}
    bias = not switch(config, "no_bias", name)
    positions = "learned" if switch(config, "learned_pos_emb", name, default=True) else "none"
    shape = {
        "positions": positions,
        "norm": "layernorm-low" if bias else "layernorm-low-plain",
        "in_transformers": False,
    }
    shape |= {"attention": "heads", "model_type": "llm_foundry_mpt"}
    return {**shape, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def gpt2(config: Config, name: str) -> Changes:
    """Dropout of embeddings, of attention weights (a fused kernel does it inside) and of each block's output."""
    refuse(config, name, activation_function="gelu_new", add_cross_attention=False, reorder_and_upcast_attn=False)
    drops = {"dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop", "attention_dropout": "attn_pdrop"}
    return {ours: dropped(config, theirs, name, 0.1) for ours, theirs in drops.items()}


def gptj(config: Config, name: str) -> Changes:
    """The rotated part of a head is a number of the config."""
    refuse(config, name, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False)
    return {"rotary_dim": positive(config, "rotary_dim", name, 64)}


def opt(config: Config, name: str) -> Changes:
    """Norms before each block and tables as wide as the stream: all but OPT-350M."""
    refuse(config, name, do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True)
    refuse(config, name, activation_function="relu", word_embed_proj_dim=config.get("hidden_size"), layerdrop=0.0)
    return {"dropout": dropped(config, "dropout", name, 0.1)}


def cohere(config: Config, name: str) -> Changes:
    """Command-R without norms of queries and keys."""
    refuse(config, name, use_qk_norm=False, attention_dropout=0.0)
    return {}


def bloom(config: Config, name: str) -> Changes:
    """BLOOM and BLOOMZ."""
    refuse(config, name, apply_residual_connection_post_layernorm=False, hidden_dropout=0.0, attention_dropout=0.0)
    return {}


def olmo3(config: Config, name: str) -> Changes:
    """OLMo 3, whose masks need a window."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    check_layer_types(config, name, LAYER_TYPES)
    need_numbers(config, name, "sliding_window")
    return {}


def ministral3(config: Config, name: str) -> Changes:
    """Ministral 3, whose queries are scaled by two numbers of the config's rotary positions."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    positions = config.get("rope_scaling") or config.get("rope_parameters")
    for field in POSITION_SCALES if positions is not None else ():
        number = positions.get(field) if isinstance(positions, Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InputError(
                f"The config {name} has no number {field!r} in rope_parameters; give a complete config.json."
            )
    return {}


def ministral(config: Config, name: str) -> Changes:
    """Ministral of 2024, whose masks need a window and whose heads need a width of their own."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    positive(config, "head_dim", name, 0)
    check_layer_types(config, name, LAYER_TYPES)
    need_numbers(config, name, "sliding_window")
    return {}


def glm(config: Config, name: str) -> Changes:
    """GLM-4 of 2024 and of April 2025: biases of queries, keys and values unless the config says otherwise."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    return {"qkv_bias": switch(config, "attention_bias", name, default=True)}


def glm4_moe(config: Config, name: str) -> Changes:
    """GLM-4.5 to 4.7: norms of queries and keys in the large ones."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0, norm_topk_prob=True, output_router_logits=False)
    for field, least in (("first_k_dense_replace", 0), ("n_shared_experts", 1)):
        number = config.get(field, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(
                f"The config {name} has {field}={number!r}, but it must be a whole number of at least {least}."
            )
    norms = switch(config, "use_qk_norm", name)
    return {"qk_norm": norms, "qk_norm_late": norms}


def exaone4(config: Config, name: str) -> Changes:
    """EXAONE 4: where there is a window, layers without it have no rotary positions."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    check_layer_types(config, name, LAYER_TYPES)
    if config.get("layer_types") is None:
        need_numbers(config, name, "sliding_window")
        refuse(config, name, sliding_window_pattern=4)
    return {"global_rotary": config.get("sliding_window", 0) is None}


def seed_oss(config: Config, name: str) -> Changes:
    """Seed-OSS: biases of queries, keys and values, of the output by a switch of its own; dropout while training."""
    refuse(config, name, hidden_act="silu")
    drops = {ours: dropped(config, theirs, name, SEED_DROP) for ours, theirs in SEED_DROPS.items()}
    qkv_bias = switch(config, "attention_bias", name, default=True)
    return {"qkv_bias": qkv_bias, "o_bias": switch(config, "attention_out_bias", name), **drops}


def minimax(config: Config, name: str) -> Changes:
    """MiniMax-M2, whose released configs give the rotated part of a head as a number of its own."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0, router_jitter_noise=0.0, output_router_logits=False)
    given, width = config.get("rotary_dim"), config.get("head_dim", 128)
    if given is None or not isinstance(width, int):
        return {}
    if isinstance(given, bool) or not isinstance(given, int) or not 0 < given <= width:
        raise InputError(f"The config {name} has rotary_dim={given!r}, but heads have {width} values; correct it.")
    return {"rotary_share": given / width}


def arcee(config: Config, name: str) -> Changes:
    """Arcee's AFM: Llama's layers with a feed-forward block of two maps and a squared relu in between."""
    refuse(config, name, hidden_act="relu2", attention_dropout=0.0)
    return {}


def dropped(config: Config, field: str, name: str, default: float = 0.0) -> float:
    """A part of what is dropped while training."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"The config {name} has {field}={value!r}, but it must be a number from 0 to below 1.")
    return float(value)


def need_numbers(config: Config, name: str, *fields: str) -> None:
    """Refuse fields that are null, of code that counts with them."""
    for field in fields:
        if field in config and config[field] is None:
            raise InputError(f"The config {name} has {field}=null, but it must be a number.")


def gemma4(config: Config, name: str) -> Changes:
    """Gemma 4 without dropout, whose attention looks back."""
    refuse(config, name, attention_dropout=0.0)
    own = () if "per_layer_config" in config else ("global_head_dim",)
    need_numbers(config, name, "sliding_window", *own, "hidden_size_per_layer_input", "num_kv_shared_layers")
    check_layer_types(config, name, LAYER_TYPES)
    if config.get("use_bidirectional_attention") == "all":
        refuse(config, name, use_bidirectional_attention="vision")
    return {"logits": "plain" if config.get("final_logit_softcapping") is None else "capped"}


def glm4_moe_lite(config: Config, name: str) -> Changes:
    """GLM-4.7-Flash: DeepSeek-V3's attention, and after a dense layer GLM-4.5's experts."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0, norm_topk_prob=True, output_router_logits=False)
    check_layer_types(config, name, (DENSE, SPARSE), LAYER_KINDS)
    return {}


def hunyuan(config: Config, name: str) -> Changes:
    """HunYuan's dense models, 0.5B to 7B, whose heads need a width of their own."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    positive(config, "head_dim", name, 0)
    return {}


def qwen2_moe(config: Config, name: str) -> Changes:
    """Qwen1.5-MoE and Qwen2-57B-A14B without windows."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0, output_router_logits=False)
    return {"qkv_bias": switch(config, "qkv_bias", name, default=True)}


def qwen3_5(config: Config, name: str) -> Changes:
    """Qwen3.5's text model with its usual activation."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    return {}


def qwen3_next(config: Config, name: str) -> Changes:
    """Qwen3-Next with its usual activation and router."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0, norm_topk_prob=True, output_router_logits=False)
    return {}


def lfm2(config: Config, name: str) -> Changes:
    """LFM2 without biases; its first configs say ``tie_embedding``, which goes before the common name."""
    tied = switch(config, "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings", name, default=True)
    refuse(config, name, conv_bias=False, tie_word_embeddings=tied)
    return {"default_tied": tied}


def falcon(config: Config, name: str) -> Changes:
    """Falcon 40B's few key-value heads and two norms; Falcon 7B's one key-value head and one norm.

    One head of the newer code is seen by every query in the same memory, of which no published model is.
    """
    refuse(config, name, alibi=False, bias=False, parallel_attn=True, hidden_dropout=0.0, attention_dropout=0.0)
    if switch(config, "new_decoder_architecture", name):
        for field in ("num_kv_heads", "num_key_value_heads"):
            if config.get(field) == 1:
                refuse(config, name, **{field: "several"})
        one = config.get("num_ln_in_parallel_attn") == 1
        return {"parallel": "shared" if one else "norms-first"}
    refuse(config, name, multi_query=True)
    return {"fixed_kv_heads": 1}


VARIANTS: dict[str, Callable[[Config, str], Changes]] = {
    "arcee": arcee,
    "bloom": bloom,
    "chatglm": chatglm,
    "cohere": cohere,
    "cohere2": cohere,
    "gemma4_text": gemma4,
    "gpt2": gpt2,
    "exaone4": exaone4,
    "falcon": falcon,
    "glm": glm,
    "glm4": glm,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "hunyuan_v1_dense": hunyuan,
    "lfm2": lfm2,
    "minimax_m2": minimax,
    "ministral": ministral,
    "ministral3": ministral3,
    "mpt": mpt,
    "olmo3": olmo3,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen": qwen,
    "qwen2_moe": qwen2_moe,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "seed_oss": seed_oss,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
}
"""By ``model_type``."""
