"""Linear maps that adapters may sit on, by the names that PEFT and the frameworks give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.joined import is_joined, joined_names
from tunecast.model.litgpt import is_litgpt
from tunecast.model.peft_targets import LINEAR_MODULES, MODULES_ALONE
from tunecast.model.resolve_adapters import refuse_input_maker, todays_name
from tunecast.model.resolve_experts import renamed_targets, stacked_targets
from tunecast.model.resolve_litgpt import adapted_parts, litgpt_targets
from tunecast.model.root_modules import root_modules
from tunecast.model.target_patterns import is_pattern, matched_targets


def adaptable_modules(architecture: Architecture) -> tuple[str, ...]:
    """Linear maps an adapter may sit on: all of them, in the layers or not, but the head, as PEFT's ``all-linear``."""
    if is_litgpt(architecture):
        return adapted_parts(architecture)
    inner = (linear for group in architecture.groups for linear in group.layer.linears)
    names = dict.fromkeys(linear.name for linear in (*architecture.root_linears, *inner))
    stacked = renamed_targets(architecture)
    return (*(name for name in names if name not in stacked), *dict.fromkeys(stacked.values()))


def linear_modules(architecture: Architecture) -> tuple[str, ...]:
    """Those that are modules of their own, not parts of stacked experts: what a search for ``nn.Linear`` finds, as
    axolotl's ``find_all_linear_names`` and LLaMA-Factory's ``find_all_linear_modules``. Raises NotSupportedError where
    dense or shared parts have the names of the stacked experts, which adapters by name cannot be told apart from."""
    stacked = renamed_targets(architecture)
    apart = {each.name for group in architecture.groups for each in group.layer.mlp.linears if each.name in stacked}
    if apart:
        raise NotSupportedError(
            f"Adapters on the dense and shared {', '.join(sorted(apart))} of {architecture.name} without its experts "
            "are not built yet; name attention's maps with --lora-target-modules, or all-linear for the experts too."
        )
    return tuple(name for name in adaptable_modules(architecture) if name not in stacked.values())


def _refuse_stacked(architecture: Architecture, names: Sequence[str]) -> None:
    """Refuse names of the maps of stacked experts, by which PEFT before 0.19 finds no module, or shared parts alone."""
    stacked = renamed_targets(architecture)
    named = [name for name in names if name in stacked]
    if named:
        maps = ", ".join(name for name in adaptable_modules(architecture) if name not in stacked.values())
        raise NotSupportedError(
            f"The file's targets {', '.join(named)} are maps of {architecture.name}'s experts, which transformers 5 "
            f"keeps in one parameter and its framework's PEFT (before 0.19) does not adapt; name {maps} in its place."
        )


def targets_there(architecture: Architecture, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that mean modules of the model, and those that mean none.

    PEFT passes over the latter where others match (``tuners_utils.py``, ``inject_adapter``), as files for many models
    have it.
    """
    found: dict[bool, list[str]] = {True: [], False: []}
    for name in names:
        there = True
        if name not in (LINEAR_MODULES, MODULES_ALONE, "all-linear"):
            try:
                target_modules(architecture, [name])
            except UnknownNameError:
                there = False
            except InputError:
                pass  # there, but not alone: both maps of a stacked parameter
        found[there].append(name)
    return tuple(found[True]), tuple(found[False])


def _of_pattern(architecture: Architecture, pattern: str) -> list[str]:
    """The maps that a regular expression means; refused where modules have other paths than transformers'."""
    if is_litgpt(architecture) or is_joined(architecture):
        raise NotSupportedError(
            f"--lora-target-modules is a regular expression ({pattern}), which PEFT alone reads, not this stack; name "
            "the modules."
        )
    return matched_targets(architecture, pattern)


def _by_path(architecture: Architecture, name: str) -> list[str]:
    """A name with the end of its module's path before it (``self_attn.q_proj``), as PEFT takes it, without."""
    if "." not in name or name in adaptable_modules(architecture):
        return [name]
    try:
        return matched_targets(architecture, rf"(.*\.)?{re.escape(name)}")
    except (InputError, NotSupportedError):
        return [name]


def target_modules(architecture: Architecture, asked: Any) -> tuple[str, ...]:
    """Adapter targets as module names in forward order; an unknown one is refused with the closest."""
    known = adaptable_modules(architecture)
    if asked == "all-linear":
        return known
    if is_pattern(asked):
        names = _of_pattern(architecture, str(asked))
    else:
        names = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else [str(part) for part in asked]
    names = [name for name in names if name]
    if LINEAR_MODULES in names:
        names = [*(name for name in names if name != LINEAR_MODULES), *linear_modules(architecture)]
    if MODULES_ALONE in names:
        names = [name for name in names if name != MODULES_ALONE]
        _refuse_stacked(architecture, names)
    if not names:
        raise InputError(f"--lora-target-modules names nothing; give all-linear or some of {', '.join(known)}.")
    if is_litgpt(architecture):
        return litgpt_targets(architecture, names)
    if is_joined(architecture):
        names = joined_names(names, architecture.groups[0].layer)
    names = [found for name in names for found in _by_path(architecture, name)]
    names = stacked_targets(architecture, [todays_name(architecture, name) for name in names])
    refuse_input_maker(architecture, names, "--lora-target-modules")
    every = (architecture.embedding_module, *known, architecture.head_module)
    if "all-linear" in names and set(names) <= {"all-linear", *root_modules(architecture)}:
        names = [*(name for name in names if name != "all-linear"), *known]
    for name in names:
        if name == "all-linear":
            raise InputError("--lora-target-modules takes all-linear alone, not together with names of linear maps.")
        if name not in every:
            hint = f"{architecture.name} has {', '.join(every)}."
            instead = "type all-linear for all linear maps" if name in ("all", "linear") else ""
            raise UnknownNameError("target module", name, every, hint=hint, instead=instead)
    return tuple(name for name in every if name in names)
