"""The decoder inside the config of a model that also sees or hears, and what its config leaves out there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from tunecast.model.config_fields import OTHER_NAMES
from tunecast.model.families_vision import FLAT, WHOLE


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder of a multimodal config (Gemma 3): its ``text_config``, with what stands beside it, or (Qwen2-VL) the
    fields beside ``vision_config``."""
    text = config.get("text_config")
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        return {**config, "model_type": FLAT[config["model_type"]]} if is_flat(config) else config
    beside = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    if text["model_type"] in WHOLE:  # the whole model says whether its head is tied, by silence too
        return {**text, "tie_word_embeddings": False, **beside}
    return {**beside, **text}


def untold(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a multimodal config's ``text_config`` that are what its class has by default, which transformers
    leaves out when it saves a config inside another; none of another config."""
    text = text_part(config)
    if text is config or is_flat(config):
        return {}
    defaults = class_defaults().get(str(text["model_type"]), {})
    said = {name for name, others in OTHER_NAMES.items() if any(field in text for field in (name, *others))}
    return {field: value for field, value in defaults.items() if field not in said}


@cache
def class_defaults() -> dict[str, dict[str, int]]:
    """By ``model_type``: what transformers' configuration class has where a config says nothing."""
    text = resources.files("tunecast.model").joinpath("data/class_defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, int]] = json.loads(text)["defaults"]
    return found


def is_flat(config: Mapping[str, Any]) -> bool:
    """Whether a multimodal config has its decoder's fields beside those of the other parts (Qwen2-VL)."""
    return str(config.get("model_type")) in FLAT and config.get("hidden_size") is not None
