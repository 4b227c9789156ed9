"""Fields of a ``config.json``, read with a sentence for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError

KIND = re.compile(r"\w*(attention|sparse|sliding)|mamba|moe|conv|hybrid|dense")
"""Kinds of layers that transformers 5 knows (``configuration_utils.ALLOWED_LAYER_TYPES`` and their older names)."""
LAYER_KINDS, DENSE, SPARSE = "mlp_layer_types", "dense", "sparse"
"""Field of a config that lists the feed-forward blocks layer by layer, and their kinds."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "inner_hidden_size", "block_ff_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}
"""What configs of some families call the common fields (``attribute_map`` of their configuration classes)."""


def positive(config: Mapping[str, Any], field: str, name: str, default: int) -> int:
    """A positive whole number of a config; a `default` of 0 is none."""
    value = config.get(field)
    value = default if value is None else value
    if value == 0 and config.get(field) is None:
        raise InputError(f"The config {name} has no {field!r}; give a complete Hugging Face config.json.")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InputError(f"The config {name} has {field}={value!r}, but it must be a positive whole number.")
    return value


def whole(config: Mapping[str, Any], field: str, name: str, default: int) -> int:
    """A whole number of a config, 0 among them; null is 0, as in most configuration classes."""
    value = config.get(field, default)
    value = 0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"The config {name} has {field}={value!r}, but it must be a whole number from 0.")
    return value


def share(config: Mapping[str, Any], field: str, name: str, default: float) -> float:
    """A number from 0 to 1 of a config; null and absent are the default."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise InputError(f"The config {name} has {field}={value!r}, but it must be a number from 0 to 1.")
    return float(value)


def inner(config: Mapping[str, Any], name: str, *fields: str) -> Mapping[str, Any]:
    """The JSON object of the first of these fields that has one; empty without any."""
    for field in fields:
        value = config.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"The config {name} has {field}={value!r}, but it must be an object of fields.")
        if value:
            return value
    return {}


def switch(config: Mapping[str, Any], field: str, name: str, *, default: bool = False) -> bool:
    """A true/false field of a config; absent is false, as in most configuration classes."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise InputError(f"The config {name} has {field}={value!r}, but it must be true or false.")
    return value


def check_layer_types(
    config: Mapping[str, Any], name: str, allowed: tuple[str, str], field: str = "layer_types"
) -> None:
    """Refuse ``layer_types``, or another field, that is no list of the two kinds of layers of a family."""
    kinds = config.get(field)
    if kinds is None or (isinstance(kinds, list) and all(kind in allowed for kind in kinds)):
        return
    raise InputError(
        f"The config {name} has {field} {str(kinds)[:80]}, but they are a list of {allowed[0]} and {allowed[1]}."
    )


def kinds_by_layer(config: Mapping[str, Any], field: str, num_layers: int, name: str) -> list[str] | None:
    """The kinds that a field lists, one for every layer; None without the field."""
    kinds: list[str] | None = config.get(field)
    if kinds is not None and not isinstance(kinds, list):
        raise InputError(f"The config {name} has {field}={kinds!r}, but it must be a list of the layers' kinds.")
    if kinds is not None and len(kinds) != num_layers:
        raise InputError(f"The config {name} has {len(kinds)} {field} for {num_layers} layers; they must agree.")
    if kinds is not None and not all(isinstance(kind, str) and KIND.fullmatch(kind) for kind in kinds):
        odd = next(kind for kind in kinds if not isinstance(kind, str) or not KIND.fullmatch(kind))
        raise InputError(f"The config {name} has {odd!r} among its {field}, which is no kind of layer; correct it.")
    return kinds
