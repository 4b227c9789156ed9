"""Stacks that train with code of their own: whose layers they build, and what they have of a run's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.joined import STACKS, is_joined, joined
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_litgpt import of_stack as of_litgpt
from tunecast.model.resolve_parallel import FSDP, MEGATRONS, Fields
from tunecast.model.stacks import load_stacks, only_of_stack, shardings_of

SPLITTER = STACKS[0]
"""The stack of who splits layers and names none: transformers' Trainer splits none."""
SPLITTER_NOTE = (
    "--stack not given: --tp and --pp split layers, as Megatron does, so --stack megatron is taken (NeMo and "
    "Megatron-Bridge run it too); type --stack torchtitan, or another, for its code."
)


def of_stack(architecture: Architecture, options: Mapping[str, Any]) -> Architecture:
    """The architecture as the software stack that the run options ask for builds it; raises NotSupportedError."""
    if options.get("stack") in STACKS:
        return joined(architecture)
    return of_litgpt(architecture, options)


def implied_stack(architecture: Architecture, options: Mapping[str, Any]) -> str | None:
    """The stack of a run that splits layers and names none, where Megatron has all that it asks for; else None."""
    split = any(whole_number(name, options.get(name) or 1) > 1 for name in ("tp", "pp"))
    if not split or options.get("stack") is not None or options.get("stack_version") is not None:
        return None
    only = only_of_stack(SPLITTER)
    foreign = [
        name for name, allowed in only.items() if options.get(name) is not None and not has(options, name, allowed)
    ]
    if foreign or options.get("method") == "qlora" or options.get("sharding") not in (None, *MEGATRONS):
        return None
    try:
        joined(architecture)
    except NotSupportedError:
        return None
    return SPLITTER


def has(values: Mapping[str, Any], name: str, allowed: list[Any]) -> bool:
    """Whether a field has one of these values; several of a field are compared in order."""
    value = values[name]
    return (list(value) if isinstance(value, tuple) else value) in allowed


def check_layers(architecture: Architecture, stack: str) -> None:
    """Joined layers and a stack that trains them belong together."""
    if stack in STACKS:
        if joined(architecture) != architecture:
            raise InputError(
                f"--stack {stack} has formulas only, which this command does not use; use tunecast estimate."
            )
        return
    if is_joined(architecture):
        raise InputError(
            f"--stack {stack} was asked for, but {architecture.name} has layers as Megatron joins them; "
            f"use --stack {SPLITTER}."
        )


def defaults_by_spread(fields: Fields, defaults: dict[str, Any]) -> dict[str, Any]:
    """The stack's defaults, with those that it has under FSDP alone where that spreads the run."""
    stack = fields.values["stack"]
    under = load_stacks()[stack].get("defaults_under_fsdp")
    if under is None:
        return defaults
    inner = whole_number("tp", fields.given.get("tp") or 1) * whole_number("pp", fields.given.get("pp") or 1)
    alone = fields.values["num_gpus"] <= inner
    sharding = fields.given.get("sharding") or ("none" if alone else shardings_of(stack)[0])
    return {**defaults, **under} if str(sharding).startswith(("fsdp", "hsdp")) else defaults


def check_stack(fields: Fields) -> None:
    """Refuse by name what the stack's code does not have, or what of it has no formulas."""
    values = fields.values
    stack = values["stack"]
    for name, allowed in only_of_stack(stack).items():
        if name in values and not has(values, name, allowed):
            flag, told = name.replace("_", "-"), " or ".join(_word(value) for value in allowed)
            raise NotSupportedError(
                f"--{flag} {_word(values[name])} is not built for --stack {stack}, which takes {told}."
            )
    split = values["tp"] * values["pp"] > 1
    if "defaults_under_fsdp" in load_stacks()[stack] and split and values["sharding"] not in FSDP:
        raise InputError(
            f"--stack {stack} computes in fp32 where --tp or --pp split layers without FSDP, which nobody trains; "
            "raise --num-gpus, so that FSDP has copies to shard over."
        )


def _word(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ",".join(str(one) for one in value) or "none"
    return "none" if value is None else str(value)
