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


def switched(source: Source, entry: Mapping[str, Any]) -> Any:
    """True, the names that a field lists, or False; a word that is not among its ``words`` is refused."""
    field = entry["field"]
    value = source.get(field)
    if entry.get("names"):
        return names_of(source, field, value)
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        if value.lower() not in entry.get("words", {}):
            refuse(source, field, value, "another kind of it", "write true or false")
        return True
    return source.on(field)


def names_of(source: Source, field: str, value: Any) -> str:
    """Names that a field lists, or has in one text; empty where it has none."""
    names = value if isinstance(value, list) else [] if value in (None, False) else [value]
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{source.name}: {field} is {value!r}, but it names modules: [embed_tokens, lm_head], say.")
    return ",".join(names)
