"""What a Qwen3.5 or Qwen3-Next config says of its layers: three of linear attention, then one of attention, or as it
lists them.

Source: transformers 5 ``configuration_qwen3_5.py`` and ``configuration_qwen3_next.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture, Attention, Layer, Linear
from tunecast.model.config_fields import check_layer_types, kinds_by_layer, positive
from tunecast.model.shapes import DELTA, DELTA_JOINED, DeltaNet

QWEN_MOE, QWEN_NEXT = "qwen3_5_moe_text", "qwen3_next"
MODEL_TYPES = ("qwen3_5_text", QWEN_MOE, QWEN_NEXT)
LINEAR, FULL = "linear_attention", "full_attention"
PERIOD = 4
"""``full_attention_interval`` of a config that says nothing."""


def delta_layers(layers: list[Layer], architecture: Architecture, config: Mapping[str, Any]) -> list[Layer]:
    """The layers, each of the kind that the config says; queries' maps make a gate beside them."""
    name, plain = architecture.name, layers[0].attention
    query, *rest = plain.linears
    wide = replace(query, out_features=2 * query.out_features)
    whole = replace(plain, linears=(wide, *rest))
    linear = linear_attention(whole, architecture, config)
    kinds = kinds_of(config, len(layers), name)
    return [
        replace(layer, attention=whole if kind == FULL else linear) for layer, kind in zip(layers, kinds, strict=True)
    ]


def kinds_of(config: Mapping[str, Any], num_layers: int, name: str) -> list[str]:
    """Kind of every layer: ``layer_types``, or attention at each ``full_attention_interval``-th."""
    check_layer_types(config, name, (LINEAR, FULL))
    kinds = kinds_by_layer(config, "layer_types", num_layers, name)
    if kinds is not None:
        return kinds
    period = positive(config, "full_attention_interval", name, PERIOD)
    return [LINEAR if (index + 1) % period else FULL for index in range(num_layers)]


def linear_attention(whole: Attention, architecture: Architecture, config: Mapping[str, Any]) -> Attention:
    """Linear attention with its maps; `whole` is the attention of other layers, whose rotary table stands for all."""
    name, hidden = architecture.name, architecture.hidden_size
    net = DeltaNet(
        key_heads=positive(config, "linear_num_key_heads", name, 16),
        value_heads=positive(config, "linear_num_value_heads", name, 32),
        key_dim=positive(config, "linear_key_head_dim", name, 128),
        value_dim=positive(config, "linear_value_head_dim", name, 128),
        kernel=positive(config, "linear_conv_kernel_dim", name, 4),
    )
    if net.value_heads % net.key_heads:
        raise InputError(
            f"The config {name} has {net.value_heads} linear_num_value_heads, which {net.key_heads} "
            "linear_num_key_heads do not divide; correct one of them."
        )
    kind = DELTA_JOINED if architecture.model_type == QWEN_NEXT else DELTA
    widths = {
        "in_proj_qkv": net.channels, "in_proj_z": net.values_width, "in_proj_b": net.value_heads,
        "in_proj_a": net.value_heads,
    }  # fmt: skip
    if kind == DELTA_JOINED:
        widths = {"in_proj_qkvz": net.channels + net.values_width, "in_proj_ba": 2 * net.value_heads}
    inward = [Linear(name=each, in_features=hidden, out_features=width) for each, width in widths.items()]
    outward = Linear(name="out_proj", in_features=net.values_width, out_features=hidden)
    return replace(whole, linears=(*inward, outward), kind=kind, qk_norm=False, delta=net)
