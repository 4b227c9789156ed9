"""From files to `RunFile`: load, detect, read with the format's own reader, add the companions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunecast.catalogs.confined import is_there
from tunecast.catalogs.errors import InputError
from tunecast.model.configs import axolotl, litgpt, llama_factory, torchtune, trl
from tunecast.model.configs.accelerate import put_launcher_precision, read_accelerate
from tunecast.model.configs.deepspeed import check_whole_batch, read_deepspeed
from tunecast.model.configs.detect import FORMATS, detect_format, matching_formats, refuse_other_kind
from tunecast.model.configs.frameworks import framework_range, known_fields, load_frameworks, refuse_unsupported
from tunecast.model.configs.load import WANTED, load_mapping, load_with_repeated
from tunecast.model.configs.merge import REPEATING
from tunecast.model.configs.run_file import Draft, RunFile
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import settle_spread
from tunecast.model.configs.variants import read_variants

READERS: dict[str, Callable[..., None]] = {
    "axolotl": axolotl.read,
    "llama-factory": llama_factory.read,
    "trl": trl.read,
    "torchtune": torchtune.read,
    "litgpt": litgpt.read,
}


SETTLING: dict[str, Callable[[Draft], None]] = {"trl": trl.settle, "llama-factory": llama_factory.settle}
"""What a framework changes when all is read."""


def looks_like_training_file(text: str) -> bool:
    """Whether CONFIG|MODEL names a training file rather than a model: YAML, or JSON that bears a format's sign."""
    if text.lower().endswith((".yaml", ".yml")):
        return True
    if not text.lower().endswith(".json"):
        return False
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a home folder of nobody
        return False
    return is_there(path, file=True) and is_training_json(path)


def is_training_json(path: Path) -> bool:
    """Whether a JSON file bears the sign of a training file; what cannot be read is left to the reader of models."""
    try:
        found = matching_formats(load_mapping(path))
    except InputError:
        return False
    return any(name in FORMATS for name in found)


def read_config(
    path: str | Path,
    *,
    config_format: str | None = None,
    accelerate: str | Path | None = None,
    deepspeed: str | Path | None = None,
    num_gpus: int | None = None,
    framework_version: str | None = None,
) -> RunFile:
    """Read a training file and its companions.

    `num_gpus` is the command line's, for the formats whose accumulation depends on it. `framework_version`
    chooses the recorded defaults; without it the newest recorded ones apply. Companions that the file names
    itself are read when they are found beside it or in the working folder.
    """
    path = Path(path)
    mapping, repeated = load_with_repeated(path)
    beside = _Neighbours(path.parent)
    accelerate_mapping = _companion(accelerate, "accelerate") or beside.named(mapping, "accelerate_config")
    deepspeed_mapping = _companion(deepspeed, "deepspeed") or beside.named(mapping, "deepspeed")
    if deepspeed_mapping is None and accelerate_mapping is not None:
        inner = accelerate_mapping.get("deepspeed_config")
        deepspeed_mapping = beside.named(inner, "deepspeed_config_file") if isinstance(inner, dict) else None
    found = read_mapping(
        mapping,
        name=path.name,
        config_format=config_format,
        accelerate=accelerate_mapping,
        deepspeed=deepspeed_mapping,
        num_gpus=num_gpus,
        framework_version=framework_version,
    )
    told = (f"{field} stands twice in {path.name}: the last one counts." for field in repeated)
    return replace(found, notes=(*told, *found.notes))


def _companion(path: str | Path | None, kind: str) -> dict[str, Any] | None:
    """A companion file that was named; None where none was."""
    if not path:
        return None
    mapping = load_mapping(Path(path), WANTED[kind])
    refuse_other_kind(mapping, kind, str(path))
    return mapping


class _Neighbours:
    """Files that a training file names, looked for in the working folder and around the file."""

    def __init__(self, folder: Path) -> None:
        self._folders = (Path(), folder, *folder.resolve().parents)

    def named(self, mapping: Mapping[str, Any], field: str) -> dict[str, Any] | None:
        """The mapping in, or in the file named by, a field; None where there is neither."""
        value = mapping.get(field)
        if isinstance(value, dict):
            return value
        if not isinstance(value, str) or not value.strip():
            return None
        found = next((path for path in (folder / value for folder in self._folders) if is_there(path, file=True)), None)
        return None if found is None else load_mapping(found)


def read_mapping(
    mapping: Mapping[str, Any],
    *,
    name: str,
    config_format: str | None = None,
    accelerate: Mapping[str, Any] | None = None,
    deepspeed: Mapping[str, Any] | None = None,
    num_gpus: int | None = None,
    framework_version: str | None = None,
) -> RunFile:
    """The same from mappings: no file is opened. `name` is used in messages."""
    chosen = detect_format(mapping, name=name, asked=config_format)
    recorded = framework_range(chosen, framework_version)
    source = Source(mapping, name=name, defaults=recorded["defaults"])
    if chosen == "litgpt":
        litgpt.refuse_pretraining(source)
    refuse_unsupported(chosen, source)
    draft = Draft()
    READERS[chosen](source, draft, num_gpus=num_gpus)
    read_variants(chosen, source, draft)
    _check_model(source, draft, chosen)
    unread = _companions(source, draft, chosen, accelerate, deepspeed)
    settle_spread(draft, chosen)
    check_whole_batch(draft, num_gpus)
    if chosen in SETTLING:
        SETTLING[chosen](draft)
    off = {field for field in source.unread() if field in SWITCHED_OFF and source.word(field) in NOTHING}
    title = load_frameworks()[chosen]["title"]
    strange = _strange(source, draft, chosen)
    draft.note(f"Fields that the file leaves out have the defaults of {title} {recorded['versions']}.")
    return RunFile(
        format=chosen,
        model_name=draft.model_name,
        options=draft.options,
        their_fields=draft.their_fields,
        stack=str(draft.options["stack"]),
        ignored=(*(field for field in source.unread() if field not in strange | off), *unread),
        notes=tuple(draft.notes),
        whole_dtypes=draft.whole_dtypes,
        wide_notes=tuple(draft.wide_notes),
        mesh=draft.mesh,
        most_samples=draft.most_samples,
        saves=draft.saves,
        tf32=source.word("tf32") == "true",
    )


LAUNCHERS_ARGUMENTS = {
    "mixed_precision": None,
    "fsdp_offload_params": "fsdp_config",
    "offload_optimizer_device": "deepspeed_config",
    "offload_param_device": "deepspeed_config",
}
"""Arguments of ``accelerate launch`` that are read where TRL's file has them, and the group of accelerate's file that
each stands in."""
SWITCHED_OFF = ("eval_strategy", "evaluation_strategy", "do_eval", "save_strategy")
"""Fields that may say that nothing is evaluated or saved: they are left out rightly."""
NOTHING = ("no", "false", "none")


def _strange(source: Source, draft: Draft, chosen: str) -> set[str]:
    """Fields that look like slips or that the framework does not have; each gets a note."""
    slips, known = dict(source.misspelt()), known_fields(chosen)
    draft.notes[:0] = [f"{field} is read by nothing here: is {meant} meant?" for field, meant in slips.items()]
    left = (field for field in source.unread() if field not in slips)
    unknown = [] if known is None else [field for field in left if field.split(".")[0] not in known]
    if unknown:
        title = load_frameworks()[chosen]["title"]
        draft.note(f"No fields of {title}, as far as is recorded: {', '.join(unknown)}.")
    return {*slips, *unknown}


def _check_model(source: Source, draft: Draft, chosen: str) -> None:
    if draft.model_name in ("", "None"):
        raise InputError(f"{source.name} names no model, though it was read as {chosen}; add it, or --config-format.")


def _companions(
    source: Source,
    draft: Draft,
    chosen: str,
    accelerate: Mapping[str, Any] | None,
    deepspeed: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """Read accelerate's and DeepSpeed's files; returns their unread fields."""
    unread: list[str] = []
    named = source.get("deepspeed")
    if deepspeed is None and isinstance(named, dict):
        deepspeed = named
    if deepspeed is None and named is not None:
        raise InputError(f"{source.name}: deepspeed names {named}, which is not found from here; add --deepspeed FILE.")
    preset = source.get("accelerate_config") if chosen == "trl" else None
    if accelerate is None and preset is not None:
        accelerate = _preset(source, str(preset))
    if chosen == "trl" and accelerate is not None:
        accelerate = _with_arguments(source, accelerate)
    for mapping, kind, reader in (
        (deepspeed, "deepspeed", read_deepspeed),
        (accelerate, "accelerate", read_accelerate),
    ):
        if mapping is not None:
            companion = Source(mapping, name=f"{kind} file")
            draft.prefix = f"{kind}: "
            reader(companion, draft)
            if kind == "accelerate" and chosen in REPEATING:  # axolotl exports its own
                put_launcher_precision(companion, draft)
            unread += [draft.prefix + field for field in companion.unread()]
    draft.prefix = ""
    _processes(source, draft)
    return tuple(unread)


def _with_arguments(source: Source, accelerate: Mapping[str, Any]) -> Mapping[str, Any]:
    """accelerate's file with the arguments of its launcher that stand in TRL's, which win over it."""
    found = dict(accelerate)
    for name, group in LAUNCHERS_ARGUMENTS.items():
        stated = source.get(name)
        if stated is None:
            continue
        if group is None:
            found[name] = stated
        else:
            found[group] = {**(found.get(group) or {}), name: stated}
    return found


def _preset(source: Source, name: str) -> Mapping[str, Any]:
    """One of the accelerate files that ship with TRL, by name."""
    presets = load_frameworks()["trl"]["accelerate_presets"]
    if name not in presets:
        raise InputError(
            f"{source.name}: accelerate_config is {name}, neither a file found from here nor one of "
            f"{', '.join(presets)}; add --accelerate FILE."
        )
    preset: Mapping[str, Any] = presets[name]
    return preset


def _processes(source: Source, draft: Draft) -> None:
    """``num_processes`` in a TRL file goes to the launcher and wins over its accelerate file."""
    count = source.count("num_processes")
    if count is not None:
        draft.put("num_gpus", count, "num_processes")
