"""What the user asks for: a catalog model or config.json with options, or a training file of another tool."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.model.architecture import Architecture

if TYPE_CHECKING:
    from tunecast.model.whole_run_options import WholeRunOptions

FILE_OPTIONS = ("config_format", "accelerate", "deepspeed")
"""Options that say how to read a training file."""
TRAINING_FILE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A model and the options of its run, with where each option came from."""

    architecture: Architecture
    options: dict[str, Any]
    origins: dict[str, str]
    """Of the options that a file gave; the others were typed."""
    notes: tuple[str, ...] = ()
    saves: Mapping[str, int] = field(default_factory=dict)
    """``save_steps`` and ``save_total_limit`` that a training file asks for."""
    weights: str = ""
    """The hub's name of the weights as asked for, which the catalog may have under another of the same shape."""


def read_asked(model: str, options: Mapping[str, Any], *, exact: bool = False, as_stored: bool = True) -> Asked:
    """Read MODEL: a ``.yaml`` is a training file (axolotl, LLaMA-Factory, TRL, torchtune, litgpt), a ``.json`` by what
    it holds or with ``config_format``, the rest a model.

    With `exact` a model may be of a family that only the real code knows. A quantized copy's name says how it is
    trained, unless other methods are asked for as well (not `as_stored`).
    """
    from tunecast.catalogs.errors import InputError
    from tunecast.few_bits import alias_notes, by_its_name, published_as, with_storage
    from tunecast.model.documents import flat_by_stack
    from tunecast.model.resolve_stacks import SPLITTER_NOTE, implied_stack, of_stack
    from tunecast.models import find_architecture

    typed = {name: value for name, value in options.items() if name not in FILE_OPTIONS}
    reading = {name: options[name] for name in FILE_OPTIONS if options.get(name) is not None}
    if _is_training_file(model, "config_format" in reading):
        return from_training_file(Path(model), typed, reading, exact=exact)
    if reading:
        flag = "--" + next(iter(reading)).replace("_", "-")
        instead = "type --sharding zero3, or another, and --num-gpus" if flag == "--deepspeed" else f"leave {flag} out"
        raise InputError(f"{flag} says how to read a training file, but {model} is none; {instead}.")
    if typed.get("max_steps") is not None and typed.get("num_train_epochs") is not None:
        raise InputError("--max-steps and --num-train-epochs both say how long training is; leave one of them out.")
    found = find_architecture(model, exact=exact)
    named, said = by_its_name(model, typed) if as_stored and not found.stored else ({}, ())
    options = {**with_storage(typed, found.stored, model), **named}
    stack = None if exact else implied_stack(found.architecture, options)
    options |= published_as(model, found.stored, options) | ({} if stack is None else {"stack": stack})
    flat, told = flat_by_stack(found.architecture, options)
    options |= flat
    return Asked(
        architecture=of_stack(found.architecture, options),
        options=options,
        origins={
            **dict.fromkeys(found.stored, "file"),
            **{option: "assumed" for option in named if typed.get(option) is None},
            **({} if stack is None else {"stack": "assumed"}),
        },
        notes=(*found.notes, *said, *alias_notes(model, options), *([] if stack is None else [SPLITTER_NOTE]), *told),
        weights=on_hub(model),
    )


def on_hub(name: str) -> str:
    """The name if it is one of the hub, ``owner/model``, and no file of this machine; else empty."""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).expanduser().exists() else ""


def options_by_count(model: str, options: Mapping[str, Any]) -> Callable[[int], Mapping[str, Any]] | None:
    """What a training file means on so many GPUs, where the number is searched; None of a model, or a number."""
    from tunecast.model.num_gpus import AUTO

    if options.get("num_gpus") != AUTO or not _is_training_file(model, options.get("config_format") is not None):
        return None
    return lambda count: read_asked(model, {**options, "num_gpus": count}).options


COUNTED = (
    ("--eval-samples N with --eval-steps N", {"eval", "evals", "val"}),
    ("--save-steps N", {"save", "saves"}),
)
"""Options that count what a file's fields ask for, and the words of such fields' names."""


def _is_training_file(model: str, said: bool) -> bool:
    """Whether MODEL is a training file; a JSON one bears the sign of a format, or the user said that it has one."""
    if not model.lower().endswith(".json"):
        return model.lower().endswith(TRAINING_FILE_SUFFIXES)
    from tunecast.model.configs import looks_like_training_file

    return said or looks_like_training_file(model)


def from_training_file(
    path: Path, typed: Mapping[str, Any], reading: Mapping[str, Any], *, exact: bool = False
) -> Asked:
    """The file's options under those that were typed. ``stack_version`` is that of the file's framework, but for parts
    that name another package (``torch=2.10``)."""
    from tunecast.few_bits import alias_notes, file_with_storage, published_as, stored_by_name, with_storage
    from tunecast.model.configs import merge_options, read_config
    from tunecast.model.configs.frameworks import known_fields
    from tunecast.model.resolve_stacks import of_stack
    from tunecast.models import find_architecture

    version, of_packages = _versions(typed.get("stack_version"))
    typed = {name: typed[name] for name in typed if name != "stack_version"} | of_packages
    run_file = read_config(path, num_gpus=_known_count(typed.get("num_gpus")), framework_version=version, **reading)
    merged = merge_options(run_file, typed)
    found = find_architecture(run_file.model_name, exact=exact)
    stored = found.stored or stored_by_name(run_file.model_name)
    options, told = file_with_storage(merged.options, stored, typed, run_file.model_name)
    options = with_storage(options, found.stored, run_file.model_name)
    options |= published_as(run_file.model_name, found.stored, options)
    passed_over = () if exact else _without_absent(options, typed, found.architecture, run_file.format)
    said = stored if told else found.stored
    return Asked(
        architecture=of_stack(found.architecture, options),
        options=options,
        origins={**merged.origins, **dict.fromkeys(said, "file")},
        notes=(
            *found.notes,
            *told,
            *alias_notes(run_file.model_name, options),
            f"{path.name} was read as {run_file.format}.",
            *merged.notes,
            *passed_over,
            *ignored_notes(run_file.ignored, all_known=known_fields(run_file.format) is not None),
        ),
        saves=run_file.saves,
        weights=on_hub(run_file.model_name),
    )


def _versions(asked: str | None) -> tuple[str | None, dict[str, str]]:
    """The framework's version among those that were asked for, and the option that has the rest."""
    from tunecast.model.configs.frameworks import load_frameworks

    if asked is None or "=" not in asked:
        return asked, {}
    frameworks = {facts.get("package") for facts in load_frameworks().values()}
    own: str | None = None
    rest: list[str] = []
    for part in asked.split(","):
        name, separator, version = part.strip().partition("=")
        if not separator or name in frameworks:
            own = version or name
        else:
            rest.append(part.strip())
    return own, {"stack_version": ",".join(rest)} if rest else {}


def _without_absent(
    options: dict[str, Any], typed: Mapping[str, Any], architecture: Architecture, form: str
) -> tuple[str, ...]:
    """Take targets of a file that the model has not out of `options`, and say so: PEFT adapts the others."""
    from tunecast.catalogs.errors import InputError
    from tunecast.model.adapter_targets import adaptable_modules, targets_there
    from tunecast.model.peft_targets import MODULES_ALONE

    names = options.get("lora_target_modules")
    if form not in BY_PEFT or isinstance(names, str | None) or typed.get("lora_target_modules") is not None:
        return ()
    there, absent = targets_there(architecture, names)
    if absent and not set(there) - {MODULES_ALONE}:
        known = ", ".join(adaptable_modules(architecture))
        raise InputError(
            f"The file's adapter targets ({', '.join(absent)}) are no modules of {architecture.name}; it has {known}."
        )
    if not absent:
        return ()
    options["lora_target_modules"] = there
    return (f"PEFT passes over {', '.join(absent)}: {architecture.name} has no module of that name.",)


BY_PEFT = ("axolotl", "llama-factory", "trl")
"""Formats whose frameworks hand names of modules to PEFT."""


SAVES_NOTHING = "--save-total-limit says how many checkpoints stay, and none is written: add --save-steps N"

BY_MINUTES = "--save-steps is not counted, on demand neither: --checkpoint-interval-min says how often"


def with_saves(around: WholeRunOptions, asked: Asked) -> tuple[WholeRunOptions, tuple[str, ...]]:
    """What is around the run, with the checkpoints that its training file asks for where nobody typed how often, and a
    note; without an amount of data no step is counted."""
    from tunecast.model.amount import AMOUNTS

    if around.train_only or not any(asked.options.get(name) is not None for name in AMOUNTS):
        return around, ()
    limit = around.save_total_limit or asked.saves.get("save_total_limit")
    if around.save_steps is not None:
        by_minutes = around.spot and around.checkpoint_interval_min is not None
        return replace(around, save_total_limit=limit), (BY_MINUTES,) if by_minutes else ()
    steps = asked.saves.get("save_steps")
    if steps is None or around.checkpoint_interval_min is not None:
        writes = around.spot or around.checkpoint_interval_min is not None
        idle = around.save_total_limit is not None and not writes
        return around, (SAVES_NOTHING,) if idle else ()
    note = f"Checkpoints every {steps:,} steps are counted, as the file asks for; --save-steps N counts others."
    return replace(around, save_steps=steps, save_total_limit=limit), (note,)


def ignored_notes(fields: tuple[str, ...], *, all_known: bool = True) -> list[str]:
    """The fields of a file that no option was made of; those of evaluation and checkpoints, whose time they would
    count, apart. `all_known`: whether the fields of its framework are recorded, so that others are told apart."""
    counted = {flags: [field for field in fields if words & set(re.split(r"[._]", field))] for flags, words in COUNTED}
    told = [
        f"{', '.join(found)} of the file: counted only where {flags} says it."
        for flags, found in counted.items()
        if found
    ]
    rest = [field for field in fields if not any(field in found for found in counted.values())]
    unsure = "" if all_known else ", or that nothing here knows"
    return told + ([f"Fields of the file that change nothing here{unsure}: {', '.join(rest)}."] if rest else [])


def _known_count(num_gpus: Any) -> int | None:
    """The number of GPUs where it is one, not ``auto``."""
    return num_gpus if isinstance(num_gpus, int) else None
