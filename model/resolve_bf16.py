"""What a device without bf16 makes of a run: fp16 as the stack's code has it, or fp32 on a processor, and a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.joined import STACKS
from tunecast.model.litgpt import STACK
from tunecast.model.resolve_litgpt import half_precision
from tunecast.model.resolve_parallel import Fields
from tunecast.model.stacks import code_of

CARD = "card"
"""Origin of what a device without bf16 changes."""
OF_BF16 = ("dtype", "precision", "adapter_dtype", "bnb_4bit_compute_dtype", "upcast_non_quantized")
"""Fields that it changes."""


def by_card(fields: Fields, before: Mapping[str, Any]) -> None:
    """Fields whose values are no longer those before were changed by the device, whoever gave them."""
    changed = (name for name in OF_BF16 if fields.values.get(name) != before.get(name))
    fields.origins |= dict.fromkeys(changed, CARD)


def in_fp32(fields: Fields) -> None:
    """fp32 in place of all 16-bit numbers."""
    names = [name for name in ("precision", "dtype", "adapter_dtype") if fields.values[name] != "fp32"]
    if not names:
        return
    for name in names:
        fields.values[name] = "fp32"
    fields.values |= {"bnb_4bit_compute_dtype": None, "upcast_non_quantized": False}
    fields.notes.append(
        "This CPU has no 16-bit products and emulates them many times slower: the run is taken in fp32 (--precision "
        "fp32 --dtype fp32)."
    )


def without_bf16(fields: Fields) -> None:
    """fp16 in place of bf16, as the stack's code has it."""
    stack = fields.values["stack"]
    if stack == STACK or stack in STACKS:
        litgpts = "LitGPT's 16-mixed" if fields.values["precision"].endswith("-autocast") else "LitGPT's 16-true"
        half_precision(fields, litgpts if stack == STACK else "Megatron's --fp16")
    elif code_of(stack):
        raise NotSupportedError(
            f"{code_of(stack)} training in fp16 is not built, and this GPU has no bf16; take one that has, or leave "
            f"--stack {stack} out."
        )
    else:
        _fall_back_to_fp16(fields)


def _fall_back_to_fp16(fields: Fields) -> None:
    """fp16 instead of bf16. A trained base then keeps fp32 weights: a gradient scaler refuses fp16 ones."""
    trained_base = fields.values["method"] == "full"
    changed = []
    if fields.values["precision"].startswith("bf16"):
        fields.values["precision"] = "fp16-autocast"
        changed.append("fp16 autocast")
    if fields.values["dtype"] == "bf16":
        fields.values["dtype"] = "fp32" if trained_base else "fp16"
        changed.append(f"{fields.values['dtype']} weights")
    if fields.values["adapter_dtype"] == "bf16":
        fields.values["adapter_dtype"] = "fp32"
        changed.append("fp32 adapters")
    if fields.values.get("bnb_4bit_compute_dtype") == "bf16":
        fields.values["bnb_4bit_compute_dtype"] = "fp16"
        changed.append("4-bit products in fp16")
    if changed:
        fields.notes.append(f"This GPU has no bf16: the run uses {' with '.join(changed)} instead.")
