"""What a config decides about its family: the same modelling code, with switches.

Sources: ``models/<type>/configuration_<type>.py`` of transformers 5, whose defaults stand where a config is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
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
            raise NotSupportedError(
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
    refuse(config, name, qk_layernorm=False, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    return {}


def starcoder2(config: Config, name: str) -> Changes:
    """``use_bias`` speaks of every linear map."""
    refuse(config, name, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
    bias = config.get("use_bias", True)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def stablelm(config: Config, name: str) -> Changes:
    """Biases of q, k, v, and blocks side by side behind one norm (StableLM 2 12B)."""
    refuse(config, name, qk_layernorm=False, hidden_dropout=0.0, attention_dropout=0.0)
    parallel = "shared" if config.get("use_parallel_residual", False) else "none"
    return {"qkv_bias": config.get("use_qkv_bias", False), "parallel": parallel}


VARIANTS: dict[str, Callable[[Config, str], Changes]] = {
    "gpt_neox": gpt_neox,
    "phi": phi,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
}
"""By ``model_type``."""
