"""Projections of one input joined into one map each, as Megatron-Core builds every decoder layer.

``SelfAttention.linear_qkv`` holds queries, keys and values, ``MLP.linear_fc1`` gate and up; a tensor-parallel rank
holds whole groups of heads of the first and equal halves of the second. Source: Megatron-LM
``megatron/core/transformer/attention.py`` and ``mlp.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp
from tunecast.model.run import Run

STACKS = ("megatron", "nemo")
"""Software stacks that train such layers."""
JOINED = "joined"
"""``Attention.qkv_split`` of these layers."""
QKV, GATE_UP = "qkv_proj", "gate_up_proj"
PARTS = {QKV: ("q_proj", "k_proj", "v_proj"), GATE_UP: ("gate_proj", "up_proj")}
"""What is joined, by the names of separate maps."""
WORDS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron-Core's names of a layer's maps, in order."""


def joined(architecture: Architecture) -> Architecture:
    """The architecture with one map into attention and one into a gated feed-forward."""
    groups = [replace(group, layer=joined_layer(architecture, group.layer)) for group in architecture.groups]
    return replace(architecture, groups=tuple(groups))


def joined_layer(architecture: Architecture, layer: Layer) -> Layer:
    """One layer; what is joined already stays."""
    if layer.attention.kind != "heads" or layer.mlp.kind != "dense":
        has = "experts" if layer.mlp.kind != "dense" else "other heads"
        raise NotSupportedError(
            f"The joined projections of {' and '.join(STACKS)} are built for dense layers of plain heads, and "
            f"{architecture.name} has {has}; use --stack hf-peft, without --tp."
        )
    attention = layer.attention if layer.attention.fused else joined_attention(layer.attention)
    mlp = joined_mlp(layer.mlp) if layer.mlp.gated and len(layer.mlp.linears) == 3 else layer.mlp
    return replace(layer, attention=attention, mlp=mlp)


def joined_attention(block: Attention) -> Attention:
    """Queries, keys and values as one output."""
    *entering, leaving = block.linears
    return replace(block, linears=(one_map(QKV, entering), leaving), qkv_split=JOINED)


def joined_mlp(block: Mlp) -> Mlp:
    """Gate and up as halves of one output."""
    *entering, leaving = block.linears
    return replace(block, linears=(one_map(GATE_UP, entering), leaving))


def is_joined(architecture: Architecture) -> bool:
    """Whether layers are as `joined` makes them."""
    return any(group.layer.attention.qkv_split == JOINED for group in architecture.groups)


def joined_names(names: Sequence[str], layer: Layer | None = None) -> list[str]:
    """Targets with one adapter on each joined map, Megatron-Core's names as those of `layer`; raises InputError where
    only some of what is joined has one."""
    attention, mlp = ((), ()) if layer is None else (layer.attention.linears, layer.mlp.linears)
    known = dict(zip(WORDS, (linear.name for linear in (*attention, *mlp)), strict=False))
    targets = [known.get(name, name) for name in names]
    for whole, parts in PARTS.items():
        named = [name for name in parts if name in targets]
        if named and len(named) < len(parts):
            raise InputError(
                f"lora_target_modules names {', '.join(named)}, but {', '.join(parts)} are one map here, with one "
                f"adapter: name all of them, or none."
            )
        targets = [*dict.fromkeys(whole if name in parts else name for name in targets)]
    return targets


def joined_targets(run: Run) -> Run:
    """The run with one adapter on each joined map."""
    return replace(run, lora_target_modules=tuple(joined_names(run.lora_target_modules)))


def one_map(name: str, linears: list[Linear]) -> Linear:
    """A map with the outputs of several side by side."""
    return replace(linears[0], name=name, out_features=sum(linear.out_features for linear in linears))
