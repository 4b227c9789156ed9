"""Which parts of a run are fused kernels: those asked for, or a stack's own, as far as this model can have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Layer, Mlp
from tunecast.model.fused import FUSED_KERNELS, LINEAR_KERNELS
from tunecast.model.joined import STACKS
from tunecast.model.resolve_delta import canonical_name, has_convolutions, has_linear_attention
from tunecast.model.resolve_layer_inputs import what_is_shared
from tunecast.model.resolve_parallel import Fields
from tunecast.model.stacks import one_of

FUSED_LORA_BLOCKS = (("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj"))
"""Blocks that axolotl's fused low-rank kernels are for, by the names of their maps."""
FUSED_LORA_MAPS = " or ".join(map(", ".join, FUSED_LORA_BLOCKS))
FUSED_LORA_BASES = (None, "bnb-4bit", "gptq-4bit", "gptq-8bit")
"""Bases that the fused low-rank kernels multiply with (Unsloth, axolotl, fms-acceleration)."""


def take_fused(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> None:
    """The fused kernels of a run; those asked for that it cannot have are refused, a stack's are left out."""
    asked = fields.take("fused_kernels", defaults.get("fused_kernels", ()), "stack-default")
    names = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else list(asked)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"--fused-kernels is {asked!r}, but kernels are named; type for example rms_norm,rope.")
    names = [canonical_name(name) for name in names]
    if names == ["none"]:
        names = []
    for name in names:
        if name == "none":
            raise InputError(f"--fused-kernels is {asked!r}, but none goes alone; leave it out, or the others.")
        one_of("fused-kernels", name, FUSED_KERNELS)
    said = "fused_kernels" in fields.given
    chosen = tuple(part for part in FUSED_KERNELS if part in names)
    refusals = {part: why_not_fused(part, fields.values, architecture) for part in chosen}
    if said:
        refuse_kernels(refusals, of_file=fields.origins["fused_kernels"] == "file")
    fields.values["fused_kernels"] = tuple(part for part in chosen if not refusals[part])
    for part, why in refusals.items():
        if why:
            fields.notes.append(f"The stack's fused {part} kernel is left out: {why}.")


def refuse_kernels(refusals: Mapping[str, str], *, of_file: bool) -> None:
    """Raise NotSupportedError for kernels asked for that this run cannot have, all that have the first reason."""
    why = next(filter(None, refusals.values()), "")
    if not why:
        return
    parts = ",".join(part for part, found in refusals.items() if found == why)
    if not of_file:
        raise NotSupportedError(f"--fused-kernels {parts} was asked for, but {why}; leave {parts} out.")
    rest = ",".join(part for part, found in refusals.items() if not found) or "none"
    raise NotSupportedError(
        f"The training file asks for fused kernels of {parts}, but {why}; --fused-kernels {rest} leaves them out."
    )


def has_maps_of_fused_lora(layer: Layer) -> bool:
    """Whether axolotl finds an attention or a feed-forward block by the names of its maps (0.19 ``monkeypatch/
    lora_kernels.py``, ``find_self_attn_in_layer`` and ``find_mlp_in_layer``)."""
    names = {linear.name for linear in (*layer.attention.linears, *layer.mlp.linears)}
    return any(names >= set(block) for block in FUSED_LORA_BLOCKS)


def separate_silu_gate(mlp: Mlp) -> bool:
    """Whether the block is down(silu(gate(x)) * up(x)) with a map each."""
    return silu_gate(mlp) and len(mlp.linears) == 3


def silu_gate(mlp: Mlp) -> bool:
    """Whether the block is down(silu(gate(x)) * up(x)), with a map each or one for both."""
    return mlp.gated and mlp.activation == "silu"


def why_not_mixers(part: str, architecture: Architecture) -> str:
    """Why layers of this kind have none of the fused kernel; empty where nothing of theirs is in its way."""
    linear, shared = has_linear_attention(architecture), what_is_shared(architecture)
    if shared:
        return f"that is not built for {shared}"
    if has_convolutions(architecture):
        return f"{architecture.name} has short convolutions, for which that is not built"
    if part in ("rms_norm", "rope", "lora", "attention") and linear:
        return f"{architecture.name} has linear attention, for which that is not built"
    if part in LINEAR_KERNELS and not linear:
        return f"{architecture.name} has no linear attention"
    return ""


def why_not_fused(part: str, values: Mapping[str, Any], architecture: Architecture) -> str:
    """Why a part of this run cannot be one of the fused kernels; empty when it can."""
    layers, megatron = [group.layer for group in architecture.groups], values.get("stack") in STACKS
    method = values.get("quant_method")
    if part == "rms_norm" and any(layer.norm == "layernorm" for layer in layers):
        return f"{architecture.name} has layer norms"
    mixers = why_not_mixers(part, architecture)
    if mixers:
        return mixers
    if part == "rope" and not megatron and any(layer.attention.fused for layer in layers):
        return f"{architecture.name} joins its queries, keys and values in one map"
    if part == "rope" and any(layer.attention.rotary_pairs for layer in layers):
        return f"{architecture.name} rotates neighbours in a head, not its halves"
    gates = [silu_gate(layer.mlp) if megatron else separate_silu_gate(layer.mlp) for layer in layers]
    if part == "swiglu" and not all(gates):
        return f"{architecture.name} has no separate gate with SiLU"
    if part == "cross_entropy" and values["loss_type"] != "nll":
        return f"--loss-type is {values['loss_type']}, which has a loss kernel of its own"
    if part == "attention" and values["attn_implementation"] == "eager":
        return "--attn-implementation is eager"
    if part == "lora" and values["method"] == "full":
        return "--method is full"
    if part == "lora" and values.get("stack") == "axolotl" and not any(map(has_maps_of_fused_lora, layers)):
        return f"{architecture.name} has not the maps that they are for ({FUSED_LORA_MAPS})"
    if part == "lora" and method not in FUSED_LORA_BASES:
        return f"the fused adapters do not take a base of --quant-method {method}"
    return ""
