"""What an LFM2 config says of its layers: attention in some, short convolutions in the others; and of their width.

Source: transformers 5 ``configuration_lfm2.py`` and ``modeling_lfm2.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp
from tunecast.model.config_fields import check_layer_types, kinds_by_layer, positive, switch
from tunecast.model.shapes import CONVOLVED, ShortConvolution

MODEL_TYPE = "lfm2"
CONV, FULL = "conv", "full_attention"
MOST_TIMES = 1000
"""Of the width that a config names: more is a slip of the pen."""
KERNEL, MULTIPLE = 3, 256
"""``conv_L_cache`` and ``block_multiple_of`` of a config that says nothing."""


def convolved_layers(layers: list[Layer], architecture: Architecture, config: Mapping[str, Any]) -> list[Layer]:
    """The layers, each of the kind that the config says, as wide as it makes them."""
    name, plain = architecture.name, layers[0]
    mlp = narrowed(plain.mlp, config, name)
    short = replace(plain, attention=short_convolution(plain.attention, architecture, config), mlp=mlp)
    whole = replace(plain, mlp=mlp)
    return [whole if kind == FULL else short for kind in kinds_of(config, len(layers), name)]


def kinds_of(config: Mapping[str, Any], num_layers: int, name: str) -> list[str]:
    """Kind of every layer: ``layer_types``, or attention at those of ``full_attn_idxs``, or everywhere."""
    check_layer_types(config, name, (CONV, FULL))
    kinds = kinds_by_layer(config, "layer_types", num_layers, name)
    if kinds is not None:
        return kinds
    given = config.get("full_attn_idxs")
    if given is None:
        return [FULL] * num_layers
    if not isinstance(given, list) or any(index not in range(num_layers) for index in given):
        raise InputError(
            f"The config {name} has full_attn_idxs={given!r}, but it lists layers from 0 to {num_layers - 1}; correct "
            "it, or give layer_types."
        )
    return [FULL if index in given else CONV for index in range(num_layers)]


def narrowed(mlp: Mlp, config: Mapping[str, Any], name: str) -> Mlp:
    """Two thirds of the width that the config names, times its multiplier, rounded up, unless it says not to."""
    inner = positive(config, "block_ff_dim", name, mlp.intermediate_size)
    if switch(config, "block_auto_adjust_ff_dim", name, default=True):
        inner = 2 * inner // 3
        multiplier = config.get("block_ffn_dim_multiplier", 1.0)
        wrong = isinstance(multiplier, bool) or not isinstance(multiplier, int | float)
        if wrong or not 0 < multiplier <= MOST_TIMES:
            raise InputError(
                f"The config {name} has block_ffn_dim_multiplier={multiplier!r}, but it must be a number above 0, "
                f"{MOST_TIMES} at most."
            )
        multiple = positive(config, "block_multiple_of", name, MULTIPLE)
        inner = multiple * -(-int(multiplier * inner) // multiple)
    *inward, outward = mlp.linears
    linears = (*(replace(each, out_features=inner) for each in inward), replace(outward, in_features=inner))
    return replace(mlp, linears=linears, intermediate_size=inner)


def short_convolution(whole: Attention, architecture: Architecture, config: Mapping[str, Any]) -> Attention:
    """A convolution with its maps; `whole` is the attention of other layers, whose rotary table stands for all."""
    hidden = architecture.hidden_size
    short = ShortConvolution(channels=hidden, kernel=positive(config, "conv_L_cache", architecture.name, KERNEL))
    linears = (
        Linear(name="in_proj", in_features=hidden, out_features=3 * hidden),
        Linear(name="out_proj", in_features=hidden, out_features=hidden),
    )
    return replace(whole, linears=linears, kind=CONVOLVED, qk_norm=False, convolution=short)
