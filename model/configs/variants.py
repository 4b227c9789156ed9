"""Adapter variants and places of checkpoints, which the frameworks write as plain switches: fields as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import load_frameworks, refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source


def read_variants(framework: str, source: Source, draft: Draft) -> None:
    """Every switch of the framework that the file turns on; those of adapters say nothing of a full fine-tune."""
    for entry in load_frameworks()[framework].get("switches", ()):
        if entry.get("adapters") and draft.options.get("method") == "full":
            continue
        field, value = entry["field"], switched(source, entry)
        if not value:
            continue
        draft.put(entry["option"], value, field)
        implied = entry.get("also", {}) | entry.get("words", {}).get(str(source.get(field)).lower(), {})
        for option, set_to in implied.items():
            draft.put(option, set_to, field)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def switched(source: Source, entry: Mapping[str, Any]) -> Any:
    """True, the names that a field lists, or False; a word that is not among its ``words`` is refused."""
    field = entry["field"]
    value = source.get(field)
    if entry.get("names"):
        if value is not None and not (isinstance(value, str) or _are_words(value)):
            raise InputError(f"{source.name}: {field} is {value!r}, but it lists names of modules, such as lm_head.")
        return ",".join(value) if isinstance(value, list) else value
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        if value.lower() not in entry.get("words", {}):
            refuse(source, field, value, "another kind of it", "write true or false")
        return True
    return source.on(field)
