"""Where an `Architecture` comes from: a catalog row, or a Hugging Face ``config.json``.

One function turns a family (`families.py`) and a set of dimensions into layer groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.configs import config_from_row, config_table
from tunecast.catalogs.errors import InputError, NotSupportedError, UnbuiltFamilyError
from tunecast.model.architecture import Architecture, Attention, Layer, LayerGroup, Linear, Mlp
from tunecast.model.config_fields import OTHER_NAMES, inner, kinds_by_layer, positive, share, switch, whole
from tunecast.model.config_file import config_path, looks_like_path, model_word, read_config
from tunecast.model.families import FAMILIES, family_of
from tunecast.model.family import Family
from tunecast.model.family_experts import with_experts
from tunecast.model.family_grid import sections_of
from tunecast.model.text_part import text_part, untold
from tunecast.model.variants import adapted

if TYPE_CHECKING:
    from tunecast.catalogs.models import ModelRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The numbers of one model, whatever file they were read from."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position: int | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens."""
    sections: tuple[int, ...] = ()
    """See ``Attention.sections``."""
    rotary_dim: int | None = None
    """Leading part of a head that is rotated; None for all of it."""
    masks: tuple[int | None, ...] = ()
    """See ``Architecture.masks``."""


def attention_block(dims: Dimensions, family: Family, window: int | None, *, rotary: bool) -> Attention:
    """Grouped-query attention with its linear maps."""
    hidden, q_width, kv_width = dims.hidden_size, dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    *inward_names, outward_name = family.attention_names
    widths = (q_width, kv_width, kv_width) if len(inward_names) > 1 else (q_width + 2 * kv_width,)
    inward = (
        Linear(name=name, in_features=hidden, out_features=width, bias=dims.qkv_bias)
        for name, width in zip(inward_names, widths, strict=True)
    )
    return Attention(
        linears=(*inward, Linear(name=outward_name, in_features=q_width, out_features=hidden, bias=dims.o_bias)),
        kind=family.attention,
        qkv_split=family.qkv_split,
        softmax_wide=family.softmax_wide,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        qk_norm=family.qk_norm,
        qk_norm_by_head=family.qk_norm_by_head,
        qk_norm_late=family.qk_norm_late,
        qk_norm_each=family.qk_norm_each,
        rotary=rotary and family.positions == "rotary",
        rotary_dim=dims.rotary_dim,
        sections=dims.sections,
        sections_joined=family.sections_joined,
        rotary_joins=family.rotary_joins,
        rotary_pairs=family.rotary_pairs,
        q_scaled=family.q_scaled,
        q_scaled_by_position=family.q_scaled_by_position,
        window=window,
    )


def mlp_block(dims: Dimensions, family: Family) -> Mlp:
    """Up to the intermediate size (gate and up, where there is a gate), down back to the hidden size."""
    hidden, inner, bias = dims.hidden_size, dims.intermediate_size, dims.mlp_bias
    *inward_names, outward_name = family.mlp_names
    width = 2 * inner if family.gated and len(inward_names) == 1 else inner
    inward = (Linear(name=name, in_features=hidden, out_features=width, bias=bias) for name in inward_names)
    return Mlp(
        linears=(*inward, Linear(name=outward_name, in_features=inner, out_features=hidden, bias=bias)),
        intermediate_size=inner,
        gated=family.gated,
        activation=family.activation,
    )


def layer_groups(dims: Dimensions, family: Family) -> tuple[LayerGroup, ...]:
    """Runs of equal layers, in order; layers differ in their attention window and rotary embedding."""
    groups: list[LayerGroup] = []
    mlp = mlp_block(dims, family)
    for index, window in enumerate(dims.windows):
        rotary = family.nope_period is None or (index + 1) % family.nope_period != 0
        rotary = rotary and (window is not None or family.global_rotary)
        layer = Layer(
            attention=attention_block(dims, family, window, rotary=rotary),
            mlp=mlp,
            norm=family.norm,
            norm_order=family.norm_order,
            parallel=family.parallel,
            dropout=family.dropout,
            residual_first=family.residual_first,
            residual_scaled=family.residual_scaled,
        )
        if groups and groups[-1].layer == layer:
            groups[-1] = LayerGroup(layer=layer, count=groups[-1].count + 1)
        else:
            groups.append(LayerGroup(layer=layer, count=1))
    return tuple(groups)


def build_architecture(name: str, family: Family, dims: Dimensions) -> Architecture:
    """An `Architecture` from a family and its dimensions."""
    return Architecture(
        name=name,
        model_type=family.model_type,
        hidden_size=dims.hidden_size,
        vocab_size=dims.vocab_size,
        groups=layer_groups(dims, family),
        tie_word_embeddings=dims.tie_word_embeddings,
        max_position=dims.max_position,
        embedding_scale=family.embedding_scale,
        rotary_sets=rotary_sets(dims, family),
        rotary_wide=family.rotary_wide,
        rotary_by_flash=family.rotary_by_flash,
        logits=family.logits,
        position_rows=position_rows(dims, family),
        embedding_norm=family.embedding_norm,
        masks=dims.masks,
        head_bias=family.head_bias,
        embedding_module=family.embedding_module,
        head_module=family.head_module,
        rotary_early=family.rotary_early,
        finds_packing=family.finds_packing,
        alibi=family.model_type if family.positions == "alibi" else "",
        embedding_dropout=family.embedding_dropout,
        attention_dropout=family.attention_dropout,
    )


def rotary_sets(dims: Dimensions, family: Family) -> int:
    """Tables of rotary positions: none where positions are not rotary, one per kind of window where they differ."""
    if family.positions != "rotary":
        return 0
    return min(family.rotary_sets, len({window is None for window in dims.windows}))


def position_rows(dims: Dimensions, family: Family) -> int:
    """Rows of a learned table of positions."""
    if family.positions != "learned" or dims.max_position is None:
        return 0
    return dims.max_position + family.position_extra


def architecture_from_row(row: ModelRow) -> Architecture:
    """The architecture of one catalog model."""
    if row.architecture_class in config_table():
        config = config_from_row(row)
        if config["model_type"] in FAMILIES:
            return architecture_from_config(config, row.hf_id)
    family = family_of(row.architecture_class, row.hf_id)
    if row.intermediate_size is None:
        raise NotSupportedError(f"{row.hf_id} has no dense MLP, which {family.architecture_class} needs.")
    dims = Dimensions(
        hidden_size=row.hidden_size,
        intermediate_size=row.intermediate_size,
        num_layers=row.num_layers,
        num_heads=row.num_heads,
        num_kv_heads=row.num_kv_heads,
        head_dim=int(row.head_dim),
        vocab_size=row.vocab_size,
        tie_word_embeddings=row.tie_word_embeddings,
        max_position=row.max_position,
        qkv_bias=row.qkv_bias,
        o_bias=False,
        mlp_bias=False,
        windows=windows_by_rule(row.sliding_window, family, row.num_layers),
    )
    return build_architecture(row.hf_id, family, dims)


UNLIMITED = 1 << 62
"""Stands for a config that gives no limit of positions."""


def _positive(config: Mapping[str, Any], field: str, name: str, default: int | None = None) -> int:
    """A positive whole number of the config, by any of its names; absent or null falls back to `default`."""
    value = next((config[key] for key in (field, *OTHER_NAMES.get(field, ())) if key in config), None)
    return positive({field: value}, field, name, default or 0)


MOST_LAYERS = 1000
"""Layers beyond any model's; a forecast goes through each."""


def check_layers(layers: Any, name: str) -> None:
    """Raise InputError for more layers than a forecast goes through."""
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise InputError(f"The config {name} has num_hidden_layers {layers:,}, above {MOST_LAYERS:,}; correct it.")


def windows_by_rule(window: int | None, family: Family, num_layers: int, first: int = 0) -> tuple[int | None, ...]:
    """Sliding window of each layer by the family's rule; `first` is the first layer of rule ``late``."""
    if family.window_rule == "period":
        return tuple(window if (i + 1) % family.global_period else None for i in range(num_layers))
    return tuple(window if i >= first else None for i in range(num_layers))


def layer_windows(config: Mapping[str, Any], family: Family, num_layers: int, name: str) -> tuple[int | None, ...]:
    """Sliding window of each layer: ``layer_types`` when given, else the family's own rule."""
    given = config.get("sliding_window", family.default_window) is not None
    if family.window_rule == "none" and config.get("use_sliding_window"):
        raise UnbuiltFamilyError(
            f"The config {name} has use_sliding_window, which {family.model_type} has no formulas with; "
            "`tunecast estimate` traces its real code with --exact."
        )
    used = switch(config, "use_sliding_window", name, default=family.window_rule != "late")
    if not given or family.window_rule == "none" or not used:
        return (None,) * num_layers
    window = _positive(config, "sliding_window", name, family.default_window)
    types = kinds_by_layer(config, "layer_types", num_layers, name)
    if types is None:
        first = whole(config, "max_window_layers", name, 28) if family.window_rule == "late" else 0
        return windows_by_rule(window, family, num_layers, first)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rotary_dim(config: Mapping[str, Any], family: Family, head_dim: int, name: str) -> int | None:
    """Rotated part of a head; None for all of it."""
    rope = inner(config, name, "rope_parameters", "rope_scaling")
    said = [(rule, key) for rule in (rope, config) for key in family.rotary_share_fields if rule.get(key) is not None]
    rotated = share(*said[0], name, 1.0) if said else family.rotary_share
    size = int(head_dim * rotated)
    if family.positions == "rotary" and size == head_dim and head_dim % 2:
        raise InputError(
            f"The config {name} has heads of {head_dim} values, whose halves cannot be rotated; correct it."
        )
    return None if size == head_dim or family.positions != "rotary" else size


def key_value_heads(config: Mapping[str, Any], family: Family, heads: int, name: str) -> int:
    """How many heads have keys and values; null is all of them, as the configurations' classes read it."""
    if family.own_kv_heads or family.fixed_kv_heads:
        return family.fixed_kv_heads or heads
    said_none = config.get("num_key_value_heads", 0) is None
    return _positive(config, "num_key_value_heads", name, heads if said_none else family.default_kv_heads or heads)


def dimensions_from_config(config: Mapping[str, Any], family: Family, name: str) -> Dimensions:
    """The numbers of a ``config.json``, with the defaults of its configuration class."""
    hidden = _positive(config, "hidden_size", name)
    heads = _positive(config, "num_attention_heads", name)
    layers = _positive(config, "num_hidden_layers", name)
    check_layers(layers, name)
    if config.get("head_dim") is None and family.default_head_dim is None and hidden % heads:
        raise InputError(
            f"The config {name} has hidden_size {hidden}, which {heads} attention heads do not divide; "
            "correct one of them, or give head_dim."
        )
    head_dim = _positive(config, "head_dim", name, family.default_head_dim or hidden // heads)
    attention_bias = switch(config, "attention_bias", name) if family.qkv_bias is None else False
    rotated = family.rotary_dim or rotary_dim(config, family, head_dim, name)
    unlimited = 0 if family.positions == "learned" else UNLIMITED  # whose table has as many rows
    limit = _positive(config, "max_position_embeddings", name, unlimited)
    inner_size = None if family.default_inner is None else family.default_inner * hidden
    return Dimensions(
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size", name, inner_size) // family.inner_divisor,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_value_heads(config, family, heads, name),
        head_dim=head_dim,
        vocab_size=_positive(config, "vocab_size", name),
        tie_word_embeddings=switch(config, "tie_word_embeddings", name, default=family.default_tied),
        max_position=None if limit == UNLIMITED else limit,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=switch(config, "mlp_bias", name) if family.mlp_bias_field else family.mlp_bias,
        rotary_dim=rotated,
        sections=sections_of(config, family, (rotated or head_dim) // 2, name),
        windows=layer_windows(config, family, layers, name),
        masks=masks_anyway(config, family, name),
    )


def masks_anyway(config: Mapping[str, Any], family: Family, name: str) -> tuple[int | None, ...]:
    """Windows of the masks that the family's code makes whatever its layers need."""
    if family.masks == "both":
        if config.get("sliding_window", 0) is None:
            raise InputError(
                f"The config {name} has sliding_window null, but its code makes a mask of it; give a number."
            )
        return None, _positive(config, "sliding_window", name, family.default_window)
    if family.masks == "empty":
        return None, 0
    return (None,) if family.masks == "full" else ()


def architecture_from_config(config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture a Hugging Face ``config.json`` describes; `name` appears in every message."""
    left_out, config = untold(config), text_part(config)
    config = {**left_out, **config} if left_out else config
    model_type, classes = config.get("model_type"), config.get("architectures")
    if "zero_optimization" in config:
        raise InputError(f"{name} is a file of DeepSpeed, which goes with a training file: add it with --deepspeed.")
    if not isinstance(model_type, str):
        raise InputError(f"The file {name} is JSON but has no 'model_type'; give a Hugging Face config.json.")
    if config.get("is_encoder_decoder"):
        raise NotSupportedError(
            f"{name} is an encoder and a decoder ({model_type}), which is not built: only causal language models are "
            "forecast; `tunecast catalog models` lists them."
        )
    given_class = classes[0] if isinstance(classes, list) and classes else None
    family = FAMILIES.get(model_type)
    if family is None or (given_class is not None and given_class not in family.classes):
        of_class = family_of(str(given_class or f"model of type {model_type!r}"), name)
        if family is not None:
            raise InputError(
                f"The config {name} has model_type {model_type!r}, but its architectures name {given_class}, which is "
                f"of type {of_class.model_type!r}; correct one of the two (transformers goes by model_type)."
            )
        family = of_class
    quantization = config.get("quantization_config")
    if quantization is not None:
        how = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise NotSupportedError(f"The config {name} is already quantized ({how}); give the unquantized model's config.")
    family = adapted(family, config, name)
    dims = dimensions_from_config(config, family, name)
    if dims.num_heads % dims.num_kv_heads:
        raise InputError(
            f"The config {name} has {dims.num_heads} attention heads, which {dims.num_kv_heads} key-value heads "
            "do not divide; correct num_key_value_heads."
        )
    architecture = build_architecture(name, family, dims)
    if family.keeps_config and family.in_transformers:
        fields = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
        architecture = replace(architecture, config=json.dumps(fields, sort_keys=True))
    architecture = with_experts(architecture, config, name)
    kinds_by_layer(config, "layer_types", dims.num_layers, name)  # transformers refuses other lengths of every family
    return architecture


def load_architecture(name_or_path: str | Path) -> Architecture:
    """The architecture of a catalog model, or of a local config.json (or the folder that holds one).

    Raises InputError where there is none.
    """
    name = model_word(name_or_path)
    if looks_like_path(name):
        path = config_path(name)
        return architecture_from_config(read_config(path), str(path))
    from tunecast.catalogs.models import find_model

    return architecture_from_row(find_model(name))
