"""Variants of adapters and of checkpointing: which choices exist and which exclude each other."""

from __future__ import annotations

from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.resolve_parallel import Fields
from tunecast.model.stacks import stack_defaults

ADAPTER_SWITCHES = ("use_dora", "use_rslora", "lora_bias")
WHOLE_WEIGHTS = ("none", "ddp", "zero1", "zero2")
ROOT_MODULES = ("embed_tokens", "lm_head")
"""Modules outside the layers that may be trained whole beside adapters."""


def take_variants(fields: Fields, architecture: Architecture, whole_number: Any) -> None:
    """Adapter variants and kinds of checkpointing, after method, precision and checkpointing are known."""
    has_adapters = fields.values["method"] != "full"
    for name in (*ADAPTER_SWITCHES, "modules_to_save"):
        if fields.given.get(name) and not has_adapters:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} needs adapters, but --method is full; use --method lora or qlora.")
    for name in ADAPTER_SWITCHES:
        fields.values[name] = bool(fields.take(name, False, "stack-default"))
    asked = fields.take("modules_to_save", (), "stack-default")
    fields.values["modules_to_save"] = saved_modules(architecture, asked)
    if fields.values["modules_to_save"] and fields.values["loss_type"] != "nll":
        raise NotSupportedError(
            f"--modules-to-save with --loss-type {fields.values['loss_type']} is not built yet; use --loss-type nll."
        )
    sharding = fields.values["sharding"]
    if fields.values["modules_to_save"] and sharding not in WHOLE_WEIGHTS:
        raise NotSupportedError(
            f"--modules-to-save with --sharding {sharding} is not built yet; use --sharding ddp, zero1 or zero2."
        )
    if fields.values["optim"] == "adafactor" and sharding not in ("none", "ddp"):
        raise NotSupportedError(f"--optim adafactor with --sharding {sharding} is not built yet; use --sharding ddp.")
    check_dora(fields)
    take_checkpoints(fields, whole_number)


def check_dora(fields: Fields) -> None:
    """What DoRA's forward, another one than LoRA's, is not built with."""
    if not fields.values["use_dora"]:
        return
    others = {
        "--lora-bias": fields.values["lora_bias"],
        "--quant-method": fields.values.get("quant_method") not in (None, "bnb-4bit"),
        "fused LoRA kernels": "lora" in fields.values.get("fused_kernels", ()),
        "tensor parallelism": fields.values.get("tp", 1) > 1,
        "sharded weights": fields.values["sharding"] not in WHOLE_WEIGHTS,
    }
    for what, given in others.items():
        if given:
            raise NotSupportedError(f"--use-dora with {what} is not built yet; leave one of the two out.")


def saved_modules(architecture: Architecture, asked: Any) -> tuple[str, ...]:
    """The modules trained whole, in the model's order."""
    names = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else [str(part) for part in asked]
    names = [name for name in names if name]
    for name in names:
        if name not in ROOT_MODULES:
            raise NotSupportedError(
                f"--modules-to-save {name} is not built yet; it takes {' and '.join(ROOT_MODULES)}, or use --exact."
            )
    if names and architecture.tie_word_embeddings:
        raise NotSupportedError(
            f"--modules-to-save {','.join(names)} was asked for, but {architecture.name} shares one table between "
            "input and output, which is not built yet; leave it out."
        )
    return tuple(name for name in ROOT_MODULES if name in names)


def take_checkpoints(fields: Fields, whole_number: Any) -> None:
    """How many layers are checkpointed, and where their inputs are kept."""
    every = whole_number("checkpoint_every", fields.take("checkpoint_every", 1, "stack-default"))
    by_stack = stack_defaults(fields.values["stack"], fields.values["method"]).get("activation_offloading", False)
    wanted = by_stack and fields.values["gradient_checkpointing"]
    offloaded = bool(fields.take("activation_offloading", wanted, "stack-default"))
    keeps = bool(fields.take("checkpoint_keeps_ops", False, "stack-default"))
    fields.values |= {"checkpoint_every": every, "activation_offloading": offloaded, "checkpoint_keeps_ops": keeps}
    if keeps and fields.values["reentrant"]:
        raise InputError("--checkpoint-keeps-ops belongs to non-reentrant checkpoints; use --no-reentrant.")
    if every > 1 and fields.values.get("pp", 1) > 1:
        raise NotSupportedError("--checkpoint-every with --pp is not built yet; leave one of the two out.")
    if fields.values["gradient_checkpointing"]:
        if offloaded:
            fields.notes.append(
                "Copies of checkpoints to host memory and back are taken as hidden behind the layers' work."
            )
        return
    plain = (("checkpoint_every", 1), ("activation_offloading", False), ("checkpoint_keeps_ops", False))
    for name, ordinary in plain:
        if fields.values[name] != ordinary:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} speaks of checkpoints, but --no-gradient-checkpointing was asked for.")
