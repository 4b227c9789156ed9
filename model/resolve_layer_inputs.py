"""What layers with an input of their own, and layers that reuse keys and values, have formulas for: transformers' own
code, whole on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.model.architecture import Architecture
from tunecast.model.optimizer_adafactor import NAME as ADAFACTOR
from tunecast.model.resolve_delta import check_delta, check_unproven
from tunecast.model.resolve_parallel import Fields
from tunecast.model.units import GIGA

WHOLE = ("none", "ddp")
"""Shardings that leave every GPU the whole model."""
LOST = (
    "Reentrant checkpoints make the keys and values that layers of {name} share without a graph: what the layers that "
    "reuse them make of their gradients is lost (--no-reentrant keeps it)."
)
WHOLE_INSTEAD = "use one GPU, or --sharding ddp"


def check_layer_kinds(fields: Fields, architecture: Architecture) -> None:
    """Refuse by name what linear attention is not built with, nor inputs of layers and shared keys and values."""
    check_delta(fields, architecture)
    found = what_is_shared(architecture)
    if not found:
        return
    check_unproven(fields, found, {**unbuilt(fields.values), **unbuilt_checkpoints(fields.values)})
    note_reentrant(fields, architecture)
    note_tables(fields, architecture)


def what_is_shared(architecture: Architecture) -> str:
    """What a model's layers have beyond their own, in words; empty where they have nothing."""
    names = ["the inputs that layers have of their own"] if architecture.layer_inputs is not None else []
    if any(group.layer.attention.reuses_keys for group in architecture.groups):
        names.append("the shared keys and values")
    return f"{' and '.join(names)} of {architecture.name}" if names else ""


def unbuilt(values: Mapping[str, Any]) -> dict[str, str]:
    """Options of a run that no trace proves them with, and what to type instead."""
    quantized = str(values.get("quant_method") or "")
    asked = {
        f"--tp {values['tp']}": (values["tp"] > 1, "use --tp 1"),
        f"--pp {values['pp']}": (values["pp"] > 1, "use --pp 1"),
        f"--cp {values['cp']}": (values["cp"] > 1, "use --cp 1"),
        f"--sharding {values['sharding']}": (values["sharding"] not in WHOLE, WHOLE_INSTEAD),
        f"--offload {values['offload']}": (values["offload"] != "none", "leave it out"),
        "--torch-compile": (values["torch_compile"], "leave it out"),
        f"--fp8 {values['fp8']}": (values["fp8"] is not None, "leave it out"),
        f"--quant-method {quantized}": (quantized not in ("", "bnb-4bit"), "use --quant-method bnb-4bit"),
        f"--optim {ADAFACTOR}": (values["optim"] == ADAFACTOR, "use --optim adamw_torch"),
        "--optimizer-in-backward": (values["optimizer_in_backward"], "leave it out"),
    }  # fmt: skip
    return {what: instead for what, (found, instead) in asked.items() if found}


def unbuilt_checkpoints(values: Mapping[str, Any]) -> dict[str, str]:
    """Kinds of checkpoints that no trace proves them with, and what to type instead. Unsloth's offloaded one runs a
    second time through the graph of keys and values, which PyTorch refuses."""
    every, offloaded = values["checkpoint_every"], values["activation_offloading"]
    asked = {
        f"--checkpoint-every {every}": (every > 1, "leave it out"),
        "--reentrant --activation-offloading": (values["reentrant"] and offloaded, "leave one of the two out"),
        "--checkpoint-keeps-ops": (values["checkpoint_keeps_ops"], "leave it out"),
        "--recompute-attention": (values["recompute_attention"], "type --gradient-checkpointing in its place"),
    }
    return {what: instead for what, (found, instead) in asked.items() if found}


def note_reentrant(fields: Fields, architecture: Architecture) -> None:
    """Say what reentrant checkpoints do to keys and values that several layers attend to."""
    reuses = any(group.layer.attention.reuses_keys for group in architecture.groups)
    if reuses and fields.values["reentrant"] and fields.values["gradient_checkpointing"]:
        fields.notes.append(LOST.format(name=architecture.name))


def note_tables(fields: Fields, architecture: Architecture) -> None:
    """Say how much 4-bit loading passes by: the second table of tokens is the largest tensor of such a model."""
    inputs, values = architecture.layer_inputs, fields.values
    if inputs is None or values["bnb_4bit_quant_type"] is None:
        return
    tables, total = inputs.table_params + architecture.embedding_params, architecture.total_params
    fields.notes.append(
        f"{tables / GIGA:.1f}B of the {total / GIGA:.1f}B parameters of {architecture.name} are tables of tokens, "
        f"which 4-bit loading leaves in {values['dtype']}."
    )
