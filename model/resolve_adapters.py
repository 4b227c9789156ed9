"""Variants of adapters and of checkpointing: which choices exist and which exclude each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import FSDP, ZERO, Fields
from tunecast.model.resolve_shared_dtypes import casts_all
from tunecast.model.root_modules import root_modules
from tunecast.model.shapes import INPUT_MAP, INPUT_TABLE
from tunecast.model.stacks import DTYPE_ALIASES, DTYPES, load_stacks, one_of, stack_defaults

ADAPTER_SWITCHES = ("use_dora", "use_rslora", "lora_bias")
WHOLE_WEIGHTS = ("none", "ddp", "zero1", "zero2")
OLDER_NAMES = {("gpt_neox", "embed_out"): "lm_head", ("gemma4_text", "router.proj"): "proj"}
"""What transformers 4 called a module of a family, and how transformers 5 does; and longer names of modules."""


def take_variants(fields: Fields, architecture: Architecture) -> None:
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
    save_instead(fields, architecture)
    take_saved_dtype(fields)
    sharding = fields.values["sharding"]
    if fields.values["modules_to_save"]:
        check_shards(fields, "--modules-to-save")
    if fields.values["optim"] == "adafactor" and sharding not in ("none", "ddp"):
        raise NotSupportedError(f"--optim adafactor with --sharding {sharding} is not built yet; use --sharding ddp.")
    check_torchao(fields)
    check_root_adapters(fields, architecture)
    check_dora(fields)
    take_checkpoints(fields)


def check_torchao(fields: Fields) -> None:
    """What torchao's optimizers are not built with: flat buffers of DeepSpeed, Megatron and FSDP 1, where blocks of a
    part of many tensors are not known."""
    values = fields.values
    if values["optim"] not in TORCHAO:
        return
    flat = values["sharding"] in ZERO or (values["sharding"] in FSDP and values["fsdp_version"] == 1)
    if flat:
        raise NotSupportedError(
            f"--optim {values['optim']} with --sharding {values['sharding']}"
            f"{' --fsdp-version 1' if values['sharding'] in FSDP else ''} is not built yet; use --sharding fsdp "
            "--fsdp-version 2, or ddp."
        )
    fields.notes.append(
        "torchao compiles its update for each shape of a tensor in the first step, which is not counted; finding each "
        "tensor's update costs the host 0.3 ms in every step, which is assumed."
    )


def check_dora(fields: Fields) -> None:
    """What DoRA's forward, another one than LoRA's, is not built with."""
    if not fields.values["use_dora"]:
        return
    if fields.values["lora_bias"]:
        raise InputError("--use-dora and --lora-bias were both asked for, but PEFT refuses the two together; drop one.")
    others = {
        "--quant-method": fields.values.get("quant_method") not in (None, "bnb-4bit"),
        "fused LoRA kernels": "lora" in fields.values.get("fused_kernels", ()),
        "tensor parallelism": fields.values.get("tp", 1) > 1,
        "sharded weights": fields.values["sharding"] not in WHOLE_WEIGHTS,
    }
    kept = ",".join(part for part in fields.values.get("fused_kernels", ()) if part != "lora")
    instead = {"fused LoRA kernels": f"type --fused-kernels {kept or 'none'}"}
    for what, given in others.items():
        if given:
            remedy = instead.get(what, "leave one of the two out")
            raise NotSupportedError(f"--use-dora with {what} is not built yet; {remedy}.")


def todays_name(architecture: Architecture, name: str) -> str:
    """A module's name in transformers 5."""
    return OLDER_NAMES.get((architecture.model_type, name), name)


def check_shards(fields: Fields, what: str) -> None:
    """Trained modules outside the layers under sharded weights: FSDP 2 has them in one group of one dtype."""
    values = fields.values
    if values["sharding"] in WHOLE_WEIGHTS:
        return
    if values["sharding"] == "zero3" or values["fsdp_version"] == 1:
        named = "--sharding zero3" if values["sharding"] == "zero3" else "FSDP 1"
        raise NotSupportedError(f"{what} with {named} is not built yet; use --sharding fsdp (version 2), ddp or zero2.")
    own = values["modules_to_save_dtype"] or values["dtype"]
    if values["modules_to_save"] and own != values["dtype"]:
        raise InputError(
            f"FSDP shards one dtype per group, but modules that are saved whole are {own} (--modules-to-save-dtype, or "
            f"the stack's default) and the base is {values['dtype']}; type --modules-to-save-dtype {values['dtype']}."
        )


def check_root_adapters(fields: Fields, architecture: Architecture) -> None:
    """What adapters on the table of tokens or on the head are not built with, or PEFT refuses."""
    values = fields.values
    found = [name for name in root_modules(architecture) if name in values["lora_target_modules"]]
    if not found:
        return
    if architecture.embedding_module in found and values["lora_bias"]:
        raise InputError(
            f"--lora-bias was asked for, but PEFT has none on {architecture.embedding_module}, an embedding; leave one "
            "of the two out."
        )
    both = [name for name in found if name in values["modules_to_save"]]
    if both:
        raise InputError(f"--modules-to-save and --lora-target-modules both name {both[0]}; PEFT takes one of the two.")
    if architecture.head_module in found and values["loss_type"] != "nll":
        raise NotSupportedError(
            f"--loss-type {values['loss_type']} multiplies with the head's own weight and passes an adapter on "
            f"{architecture.head_module} by; use --loss-type nll."
        )
    others = {
        "--use-dora": values["use_dora"],
        "--tp or --pp": values.get("tp", 1) * values.get("pp", 1) > 1,
    }
    check_shards(fields, f"An adapter on {' and '.join(found)}")
    for what, given in others.items():
        if given:
            raise NotSupportedError(
                f"Adapters on {' and '.join(found)} with {what} are not built yet; leave one of the two out."
            )


def saved_modules(architecture: Architecture, asked: Any) -> tuple[str, ...]:
    """The modules trained whole, in the model's order; a name that the real model lacks is refused with what it has."""
    names = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else [str(part) for part in asked]
    names = [todays_name(architecture, name) for name in names if name]
    refuse_input_maker(architecture, names, "--modules-to-save")
    roots = root_modules(architecture)
    inner = {linear.name for group in architecture.groups for linear in group.layer.linears}
    for name in names:
        if name in inner:
            raise NotSupportedError(
                f"--modules-to-save {name}, inside the layers, is not built; it takes {' and '.join(roots)}."
            )
        if name not in roots:
            raise UnknownNameError(
                "module to save", name, roots, hint=f"{architecture.name} has {' and '.join(roots)}."
            )
    return tuple(name for name in roots if name in names)


def refuse_input_maker(architecture: Architecture, names: Sequence[str], flag: str) -> None:
    """Refuse to adapt the table that inputs of layers come from, and to train whole what makes them."""
    made_by = (INPUT_TABLE, INPUT_MAP) if flag == "--modules-to-save" else (INPUT_TABLE,)
    for name in made_by if architecture.layer_inputs is not None else ():
        if name in names:
            raise NotSupportedError(
                f"{flag} {name}, of what makes the inputs that layers of {architecture.name} have of their own, is not "
                "built; leave it out."
            )


def save_instead(fields: Fields, architecture: Architecture) -> None:
    """Unsloth trains whole what is named as a target outside the layers."""
    values, roots = fields.values, root_modules(architecture)
    moved = [name for name in roots if name in values["lora_target_modules"]]
    if not moved or not load_stacks()[values["stack"]].get("saves_root_targets"):
        return
    rest = tuple(name for name in values["lora_target_modules"] if name not in moved)
    if not rest:
        raise InputError(
            f"--lora-target-modules names {' and '.join(moved)} alone, which --stack {values['stack']} trains whole: "
            "no adapter is left; name modules of the layers too."
        )
    values["lora_target_modules"] = rest
    values["modules_to_save"] = tuple(name for name in roots if name in (*moved, *values["modules_to_save"]))
    fields.notes.append(f"Unsloth puts no adapter on {' and '.join(moved)}: it trains a copy of the whole.")


def take_saved_dtype(fields: Fields) -> None:
    """Storage of modules trained whole: their base's, or what the stack casts all trained parameters to."""
    values = fields.values
    by_stack = stack_defaults(values["stack"], values["method"]).get("modules_to_save_dtype")
    by_stack = None if casts_all(fields) and values["precision"] in DTYPES else by_stack
    said = fields.take("modules_to_save_dtype", by_stack, "stack-default")
    if not values["modules_to_save"]:
        if fields.origins["modules_to_save_dtype"] == "cli":
            raise InputError("--modules-to-save-dtype needs --modules-to-save; add it, or leave both out.")
        fields.put("modules_to_save_dtype", None, "stack-default")
        return
    if said is not None:
        values["modules_to_save_dtype"] = one_of("modules-to-save-dtype", DTYPE_ALIASES.get(said, said), DTYPES)
    chosen = values["modules_to_save_dtype"] or values["dtype"]
    if chosen == "fp16" and values["precision"] == "fp16-autocast":
        if fields.origins["modules_to_save_dtype"] == "cli":
            raise InputError("A gradient scaler refuses fp16 gradients; use --modules-to-save-dtype fp32.")
        fields.put("modules_to_save_dtype", "fp32", "stack-default")
        fields.notes.append("Modules trained whole are taken as fp32: a gradient scaler refuses fp16 gradients.")
    check_saved_dtype(fields)


def check_saved_dtype(fields: Fields) -> None:
    """Refuse modules of another dtype than the arithmetic's where nothing casts between them.

    PEFT's copies of modules run as they are: without autocast torch refuses the product of two dtypes.
    """
    values = fields.values
    saved, precision = values["modules_to_save_dtype"], values["precision"]
    if saved in (None, precision) or precision not in DTYPES:
        return
    if casts_all(fields):
        raise InputError(
            f"DeepSpeed casts all parameters to {precision}, but --modules-to-save-dtype is {saved}; leave it out."
        )
    raise InputError(
        f"--modules-to-save-dtype is {saved}, but --precision is {precision}, and without autocast PyTorch multiplies "
        f"no {saved} by {precision}; leave it out, or use --precision bf16-autocast."
    )


def take_checkpoints(fields: Fields) -> None:
    """How many layers are checkpointed, and where their inputs are kept."""
    every = whole_number("checkpoint_every", fields.take("checkpoint_every", 1, "stack-default"))
    by_stack = stack_defaults(fields.values["stack"], fields.values["method"]).get("activation_offloading", False)
    wanted = by_stack and fields.values["gradient_checkpointing"]
    offloaded = bool(fields.take("activation_offloading", wanted, "stack-default"))
    keeps = bool(fields.take("checkpoint_keeps_ops", False, "stack-default"))
    first = fields.take("checkpoint_first", None, "stack-default")
    first = None if first is None else whole_number("checkpoint_first", first)
    fields.values |= {"checkpoint_every": every, "checkpoint_first": first}
    fields.values |= {"activation_offloading": offloaded, "checkpoint_keeps_ops": keeps}
    if keeps and fields.values["reentrant"]:
        raise InputError("--checkpoint-keeps-ops belongs to non-reentrant checkpoints; use --no-reentrant.")
    if keeps and offloaded:
        raise NotSupportedError(
            "--checkpoint-keeps-ops with checkpoints in host memory is not built yet; add --no-activation-offloading."
        )
    if every > 1 and first is not None:
        raise InputError(
            f"--checkpoint-every {every} and --checkpoint-first {first} each say which layers are checkpointed; leave "
            "one out."
        )
    some = "--checkpoint-every" if every > 1 else "--checkpoint-first" if first is not None else ""
    if some and fields.values.get("pp", 1) > 1:
        raise NotSupportedError(f"{some} with --pp is not built yet; leave one of the two out.")
    if fields.values["gradient_checkpointing"]:
        if offloaded:
            fields.notes.append(
                "Copies of checkpoints to host memory and back are taken as hidden behind the layers' work."
            )
        return
    plain = {"checkpoint_every": 1, "checkpoint_first": None}
    plain |= {"activation_offloading": False, "checkpoint_keeps_ops": False}
    for name, ordinary in plain.items():
        if fields.values[name] != ordinary:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} speaks of checkpoints, but {_without_checkpoints(fields)}.")


def _without_checkpoints(fields: Fields) -> str:
    """Why no layer is checkpointed, and what to type."""
    if fields.values["recompute_attention"]:
        return (
            "--recompute-attention makes attention alone again and checkpoints no layer; leave one of the two out, or "
            "type --gradient-checkpointing in place of --recompute-attention"
        )
    if fields.origins["gradient_checkpointing"] == "stack-default":
        return f"--stack {fields.values['stack']} checkpoints no layer by itself; add --gradient-checkpointing"
    return "--no-gradient-checkpointing was asked for; leave one of the two out"
