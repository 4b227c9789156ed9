"""The modules that PEFT adapts of a family when nobody names any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from tunecast.model.architecture import Architecture

LINEAR_MODULES = "linear-modules"
"""Word of stacks that name every linear map which is a module of its own (`adapter_targets.linear_modules`)."""
OWN_ALL_LINEAR = ("llama-factory", "ms-swift")
"""Stacks that look for linear modules themselves where they are asked for all (``find_all_linear_modules``,
``find_all_linears``)."""
MODULES_ALONE = "modules-alone"
"""Word beside names of stacks whose PEFT adapts no stacked experts by the names of their maps (before 0.19)."""
LEFT_TO_PEFT = "peft"
"""A stack's targets where it passes none on to PEFT."""


@cache
def _targets() -> dict[str, list[str]]:
    text = files("tunecast.model").joinpath("data", "peft_targets.json").read_text(encoding="utf-8")
    found: dict[str, list[str]] = json.loads(text)["targets"]
    return found


def peft_targets(architecture: Architecture, known: Sequence[str]) -> tuple[str, ...]:
    """PEFT's own targets among the `known` modules of the model; empty for a family that PEFT has none for, and tells
    its user to name some ("Please specify `target_modules` in `peft_config`")."""
    names = _targets().get(architecture.model_type, [])
    return tuple(names) if set(names) <= set(known) else ()
