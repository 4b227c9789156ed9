"""What the data file knows about each framework: defaults by version range, and fields that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.configs.source import Source
from tunecast.model.versions import in_range

_OFF_WORDS = ("no", "none", "false")


@cache
def load_frameworks() -> dict[str, dict[str, Any]]:
    """Every framework by name; older ranges of versions list what differs from the newest, first one."""
    text = files("tunecast.model.configs").joinpath("data", "frameworks.json").read_text(encoding="utf-8")
    frameworks: dict[str, dict[str, Any]] = json.loads(text)["frameworks"]
    for facts in frameworks.values():
        for entry in facts.get("ranges", ()):
            entry.setdefault("defaults", {**facts["ranges"][0]["defaults"], **entry.get("changes", {})})
    return frameworks


@cache
def known_fields(framework: str) -> frozenset[str] | None:
    """Every field that the framework's newest recorded version has; None where its list is not recorded."""
    text = files("tunecast.model.configs").joinpath("data", "known_fields.json").read_text(encoding="utf-8")
    found = json.loads(text).get(framework)
    return None if found is None else frozenset(found["fields"])


def framework_range(framework: str, version: str | None) -> dict[str, Any]:
    """The entry of the data file whose range holds `version`; the newest one without a version."""
    facts = load_frameworks()[framework]
    if version is None:
        newest: dict[str, Any] = facts["ranges"][0]
        return newest
    for entry in facts["ranges"]:
        if in_range(version, entry["versions"]):
            found: dict[str, Any] = entry
            return found
    known = "; ".join(entry["versions"] for entry in facts["ranges"])
    raise InputError(f"No defaults of {facts['title']} {version} are recorded; recorded are {known}.")


def refuse_unsupported(framework: str, source: Source) -> None:
    """Stop at the first field that asks for something tunecast does not forecast, by name and value."""
    for entry in load_frameworks()[framework]["refused"]:
        value = source.get(entry["field"])
        if not _is_off(value, entry) or not _stands_beside(source, value, entry):
            refuse(source, entry["field"], value, entry["what"], entry.get("instead"))


def refuse(source: Source, field: str, value: Any, what: str, instead: str | None = None) -> None:
    """Raise the refusal of one field."""
    remedy = instead or "take it out of the file to forecast the run without it"
    raise NotSupportedError(f"{source.name}: {field}: {value} asks for {what}, which is not built yet; {remedy}.")


def _is_off(value: Any, entry: Mapping[str, Any]) -> bool:
    plain = value.strip().lower() if isinstance(value, str) else value
    return plain is None or plain in _OFF_WORDS or plain in (False, 0) or plain in entry.get("unless", ())


def _stands_beside(source: Source, value: Any, entry: Mapping[str, Any]) -> bool:
    """Whether the other fields are as a value needs them that is let through only then."""
    beside = {} if value is None else entry.get("with", {})
    return all([source.get(field) == needed for field, needed in beside.items()])


def differences(recorded: Mapping[str, Any], installed: Mapping[str, Any]) -> list[str]:
    """One line for every recorded default that the installed framework states differently."""
    return [
        f"{field}: recorded {recorded[field]!r}, installed {installed[field]!r}"
        for field in recorded
        if field in installed and installed[field] is not None and _plain(installed[field]) != _plain(recorded[field])
    ]


def _plain(value: Any) -> Any:
    """An enumeration's value, so that ``OptimizerNames.X`` compares with its word."""
    return getattr(value, "value", value)
