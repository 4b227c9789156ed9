"""Gemma 4's layers beyond plain ones: heads of two widths, keys and values that others reuse, inputs of their own.

Source: transformers 5 ``configuration_gemma4.py``, ``Gemma4TextConfig``, and ``modeling_gemma4.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError, UnbuiltFamilyError
from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp
from tunecast.model.config_fields import positive, switch
from tunecast.model.shapes import OWN, REUSED, REUSED_LAST, STORED, LayerInputs

GLOBAL_HEAD_DIM, OWN_FIELDS = 512, frozenset({"head_dim", "num_key_value_heads"})
"""Width of heads without a window when the config says nothing, and what layers may have of their own."""
INPUT_WIDTH, INPUT_ROWS = 256, 262144
"""Width of a layer's own input, and rows of the table that it comes from, when the config says nothing."""


def gemma_layers(layers: list[Layer], architecture: Architecture, config: Mapping[str, Any]) -> list[Layer]:
    """Gemma 4: layers without a window, of which the last is always one, have heads of their own; the last layers may
    reuse keys and values, and each may have an input of its own; its output is scaled."""
    name, plain = architecture.name, layers[0].attention
    in_one = switch(config, "attention_k_eq_v", name)
    whole = [i for i, layer in enumerate(layers) if layer.attention.window is None or i == len(layers) - 1]
    said = own_heads(config, whole, name)
    head_dim = positive(said, "head_dim", name, plain.head_dim)
    kv_heads = positive(said, "num_key_value_heads", name, plain.num_kv_heads)
    if plain.num_heads % kv_heads:
        raise InputError(
            f"The config {name} has {plain.num_heads} attention heads, which {kv_heads} key-value heads of layers "
            "without a window do not divide; correct num_global_key_value_heads."
        )
    q, k, v, out = plain.linears
    widths = [replace(q, out_features=plain.num_heads * head_dim), replace(k, out_features=kv_heads * head_dim)]
    widths += [] if in_one else [replace(v, out_features=kv_heads * head_dim)]
    linears = (*widths, replace(out, in_features=plain.num_heads * head_dim))
    wide = replace(plain, linears=linears, num_kv_heads=kv_heads, head_dim=head_dim, window=None)
    found = [replace(layer, attention=wide) if index in whole else layer for index, layer in enumerate(layers)]
    maps = own_maps(config, architecture)
    return [replace(layer, output_scaled=True, own_input=maps) for layer in with_reuse(found, config, name)]


def with_reuse(layers: list[Layer], config: Mapping[str, Any], name: str) -> list[Layer]:
    """The layers, of which the last ones attend to the keys and values that the last layer before them of their kind
    has made; their feed-forward blocks are twice as wide where the config says so."""
    shared = whole_number_of(config, "num_kv_shared_layers", name, 0)
    doubled = switch(config, "use_double_wide_mlp", name)
    if not shared:
        return layers
    if not input_width(config, name):
        raise InputError(
            f"The config {name} has num_kv_shared_layers={shared} and hidden_size_per_layer_input=0, on which "
            "transformers' Gemma4TextModel fails; correct one of the two."
        )
    first = len(layers) - shared
    windows = [layer.attention.window for layer in layers]
    if first < 1 or set(windows[:first]) != set(windows):
        raise InputError(
            f"The config {name} has num_kv_shared_layers={shared} of {len(layers)} layers, but of each kind of "
            "layer_types one before them must make keys and values; correct one of the two."
        )
    makers = {window: max(i for i in range(first) if windows[i] == window) for window in windows}
    ends = {window: max(i for i, each in enumerate(windows) if each == window) for window in windows}
    found = []
    for index, layer in enumerate(layers):
        if index < first:
            keys = STORED if index in makers.values() else OWN
            found.append(replace(layer, attention=replace(layer.attention, keys=keys)))
            continue
        keys = REUSED_LAST if index in ends.values() else REUSED
        mlp = twice_as_wide(layer.mlp) if doubled else layer.mlp
        found.append(replace(layer, attention=reusing(layer.attention, keys), mlp=mlp))
    return found


def reusing(block: Attention, keys: str) -> Attention:
    """Attention with maps of queries and of its output alone."""
    return replace(block, linears=(block.linears[0], block.linears[-1]), keys=keys)


def twice_as_wide(block: Mlp) -> Mlp:
    """A gated feed-forward block of twice the inner width; a router behind it stays as it is."""
    gate, up, down, *rest = block.linears
    inner = 2 * block.intermediate_size
    wide = (*(replace(linear, out_features=inner) for linear in (gate, up)), replace(down, in_features=inner))
    return replace(block, linears=(*wide, *rest), intermediate_size=inner)


def input_width(config: Mapping[str, Any], name: str) -> int:
    """Width of the input that every layer has of its own; 0 without any."""
    return whole_number_of(config, "hidden_size_per_layer_input", name, INPUT_WIDTH)


def own_maps(config: Mapping[str, Any], architecture: Architecture) -> tuple[Linear, ...]:
    """Maps of a layer into the width of its own input, and back."""
    width, hidden = input_width(config, architecture.name), architecture.hidden_size
    if not width:
        return ()
    into = Linear(name="per_layer_input_gate", in_features=hidden, out_features=width)
    return into, Linear(name="per_layer_projection", in_features=width, out_features=hidden)


def inputs_of_layers(config: Mapping[str, Any], architecture: Architecture) -> LayerInputs | None:
    """What makes the inputs that layers have of their own; None without any."""
    width, name = input_width(config, architecture.name), architecture.name
    if not width:
        return None
    rows = positive(config, "vocab_size_per_layer_input", name, INPUT_ROWS)
    return LayerInputs(layers=architecture.num_layers, width=width, vocab_size=rows)


def whole_number_of(config: Mapping[str, Any], field: str, name: str, default: int) -> int:
    """A whole number of a config that may be 0."""
    value = config.get(field, default)
    return value if value == 0 and not isinstance(value, bool) else positive(config, field, name, default)


def own_heads(config: Mapping[str, Any], whole: list[int], name: str) -> Mapping[str, Any]:
    """What a Gemma 4 config says of the heads of its `whole` layers, those without a window: by layer as transformers
    saves it, else in fields of their own."""
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        said = {"head_dim": positive(config, "global_head_dim", name, GLOBAL_HEAD_DIM)}
        few = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return said if few is None else {**said, "num_key_value_heads": few}
    if by_layer == {}:
        return {}
    each = list(by_layer.values()) if isinstance(by_layer, dict) else []
    first: Mapping[str, Any] = each[0] if each and isinstance(each[0], dict) else {}
    alike = bool(first) and all(other == first for other in each)
    layers = {str(key).lstrip("0") or "0" for key in by_layer} if alike else set()  # saved as 05, 11, ...
    if not alike or layers != {str(index) for index in whole} or not set(first) <= OWN_FIELDS:
        raise UnbuiltFamilyError(
            f"{name} has per_layer_config={by_layer!r}, which has no formulas: they know equal head_dim and "
            "num_key_value_heads of all layers without a window; trace its real code with --exact."
        )
    return first
