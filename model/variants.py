"""What a config decides about its family: the same modelling code, with switches.

Sources: ``models/<type>/configuration_<type>.py`` of transformers 5, whose defaults stand where a config is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError, UnbuiltFamilyError
from tunecast.model.family import Family

Config = Mapping[str, Any]
Changes = dict[str, Any]


def adapted(family: Family, config: Config, name: str) -> Family:
    """The family as this config has it."""
    changes = VARIANTS.get(family.model_type)
    return family if changes is None else replace(family, **changes(config, name))


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
    bias = config.get("attention_bias", True)
    parallel = "norms" if config.get("use_parallel_residual", True) else "none"
    return {"parallel": parallel, "qkv_bias": bias, "o_bias": bias}


def phi(config: Config, name: str) -> Changes:
    """Phi-1.5 and Phi-2."""
    refuse(config, name, qk_layernorm=False)
    return {"dropout": config.get("resid_pdrop", 0.0), "embedding_dropout": config.get("embd_pdrop", 0.0)}


def starcoder2(config: Config, name: str) -> Changes:
    """``use_bias`` speaks of every linear map."""
    bias = config.get("use_bias", True)
    drops = {"dropout": config.get("residual_dropout", 0.0), "embedding_dropout": config.get("embedding_dropout", 0.0)}
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, **drops}


def stablelm(config: Config, name: str) -> Changes:
    """Biases of q, k, v; norms of each head, and blocks side by side behind one norm (StableLM 2 12B)."""
    refuse(config, name, hidden_dropout=0.0, attention_dropout=0.0)
    parallel = "shared" if config.get("use_parallel_residual", False) else "none"
    norms = bool(config.get("qk_layernorm", False))
    bias = config.get("use_qkv_bias", False)
    return {"qkv_bias": bias, "parallel": parallel, "qk_norm": norms, "qk_norm_each": norms}


def qwen(config: Config, name: str) -> Changes:
    """Qwen 1: biases on the fused map alone (``no_bias``)."""
    refuse(config, name, no_bias=True, attn_dropout_prob=0.0, emb_dropout_prob=0.0, rotary_pct=1.0)
    return {}


def chatglm(config: Config, name: str) -> Changes:
    """ChatGLM 2 and 3 as they are; the first one has layer norms, biases everywhere, gelu and a tied head.

    Left out of the first one: its residual of normalised inputs, and the second of its two rotations.
    """
    if not config.get("position_encoding_2d", False):
        return {}
    shape = {"gated": False, "activation": "gelu", "norm": "layernorm", "rotary_share": 1.0}
    return {**shape, "o_bias": True, "mlp_bias": True, "default_tied": True}


def mpt(config: Config, name: str) -> Changes:
    """As transformers runs it: ALiBi and no biases. Without ALiBi, as llm-foundry trains it."""
    attention = config.get("attn_config") or {}
    refuse(attention, name, clip_qkv=None, attn_pdrop=0.0, qk_ln=False)
    if attention.get("alibi", True):
        return {}
    bias = not config.get("no_bias", False)
    positions = "learned" if config.get("learned_pos_emb", True) else "none"
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
    return {ours: config.get(theirs, 0.1) for ours, theirs in drops.items()}


def gptj(config: Config, name: str) -> Changes:
    """The rotated part of a head is a number of the config."""
    refuse(config, name, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False)
    return {"rotary_dim": config.get("rotary_dim", 64)}


def opt(config: Config, name: str) -> Changes:
    """Norms before each block and tables as wide as the stream: all but OPT-350M."""
    refuse(config, name, do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True)
    refuse(config, name, activation_function="relu", word_embed_proj_dim=config.get("hidden_size"))
    return {"dropout": config.get("dropout", 0.1)}


def cohere(config: Config, name: str) -> Changes:
    """Command-R without norms of queries and keys."""
    refuse(config, name, use_qk_norm=False, attention_dropout=0.0)
    return {}


def bloom(config: Config, name: str) -> Changes:
    """BLOOM and BLOOMZ."""
    refuse(config, name, apply_residual_connection_post_layernorm=False, hidden_dropout=0.0, attention_dropout=0.0)
    return {"default_kv_heads": None}


def gemma4(config: Config, name: str) -> Changes:
    """Gemma 4 without embeddings per layer and without layers that share keys and values (31B and 26B-A4B)."""
    refuse(config, name, num_kv_shared_layers=0, use_double_wide_mlp=False, attention_dropout=0.0)
    own = () if "per_layer_config" in config else ("global_head_dim",)
    for field in ("sliding_window", *own, "hidden_size_per_layer_input"):
        if field in config and config[field] is None:
            raise InputError(f"The config {name} has {field}=null, but it must be a number.")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(kinds) <= {"sliding_attention", "full_attention"}):
        raise InputError(
            f"The config {name} has layer_types {str(kinds)[:80]}, but they are a list of sliding_attention and "
            "full_attention."
        )
    if config.get("use_bidirectional_attention") == "all":
        refuse(config, name, use_bidirectional_attention="vision")
    refuse(
        {"hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 256)},
        name,
        hidden_size_per_layer_input=0,
    )
    return {"logits": "plain" if config.get("final_logit_softcapping") is None else "capped"}


def qwen3_5(config: Config, name: str) -> Changes:
    """Qwen3.5's text model with its usual activation."""
    refuse(config, name, hidden_act="silu", attention_dropout=0.0)
    return {}


def falcon(config: Config, name: str) -> Changes:
    """Falcon 40B's few key-value heads and two norms; Falcon 7B's one key-value head and one norm."""
    refuse(config, name, alibi=False, bias=False, parallel_attn=True, hidden_dropout=0.0, attention_dropout=0.0)
    if config.get("new_decoder_architecture", False):
        one = config.get("num_ln_in_parallel_attn") == 1
        return {"parallel": "shared" if one else "norms-first"}
    refuse(config, name, multi_query=True)
    return {"fixed_kv_heads": 1}


VARIANTS: dict[str, Callable[[Config, str], Changes]] = {
    "bloom": bloom,
    "chatglm": chatglm,
    "cohere": cohere,
    "cohere2": cohere,
    "gemma4_text": gemma4,
    "gpt2": gpt2,
    "falcon": falcon,
    "gpt_neox": gpt_neox,
    "gptj": gptj,
    "mpt": mpt,
    "opt": opt,
    "phi": phi,
    "qwen": qwen,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
}
"""By ``model_type``."""
