"""Defaults of a software stack by the version of its packages: which recorded range applies, and what it changes.

A stack's entry in ``data/stacks.json`` has its defaults as of today, and for each package that changed one of them
the ranges of versions, newest first. An older range lists what was different then; the newest what differs from
tunecast's own choice where its version is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.stacks import built_stack, load_stacks
from tunecast.model.versions import in_range

TOLD = r"[\w.-]+ [<>=][^ ]*(, [\w.-]+ [<>=][^ ]*)*"
"""``transformers >=5.0, peft >=0.12``."""
BASE = "base"
"""Adapters in the dtype of the base, as PEFT made them before 0.12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One package's range of versions whose defaults apply."""

    package: str
    versions: str
    changes: Mapping[str, Mapping[str, Any]]
    """What was different, by ``all`` or method."""
    note: str = ""


def asked_versions(stack: str, asked: str | None) -> dict[str, str]:
    """``1.2`` as the version of the stack's own package, ``peft=0.11,transformers=4.44`` by their names.

    The ranges that a run prints (`told_ranges`) are read back as themselves.
    """
    packages = list(built_stack(stack).get("packages", {}))
    found: dict[str, str] = {}
    told = re.fullmatch(TOLD, asked or "") is not None
    for part in re.split(r",\s+" if told else ",", asked or ""):
        name, separator, version = part.strip().partition(" " if told else "=")
        if not part.strip():
            continue
        if not separator:
            name, version = (packages or [stack])[0], name
        if name not in packages:
            known = ", ".join(packages) or "none"
            raise InputError(
                f"--stack-version {asked} names {name}, but versions of {stack} are recorded for {known}; "
                f"type for example {packages[0]}={_example(stack, packages[0])}."
                if packages
                else f"--stack-version {asked} was asked for, but no versions of {stack} are recorded; leave it out."
            )
        if not version:
            raise InputError(f"--stack-version {asked} gives {name} no version; type {name}={_example(stack, name)}.")
        found[name] = version
    return found


def _example(stack: str, package: str) -> str:
    """A version of the package: the first of the newest range."""
    return str(built_stack(stack)["packages"][package][0]["versions"].split(",")[0].lstrip("<>="))


def chosen_ranges(stack: str, asked: str | None) -> tuple[Chosen, ...]:
    """The range of every package: that of the version asked for, else the newest."""
    versions = asked_versions(stack, asked)
    return tuple(
        _chosen(package, entries, versions.get(package))
        for package, entries in built_stack(stack).get("packages", {}).items()
    )


def _chosen(package: str, entries: list[dict[str, Any]], version: str | None) -> Chosen:
    for entry in entries:
        told = version in (None, entry["versions"])
        if told or (version is not None and version[:1] not in "<>=" and in_range(version, entry["versions"])):
            newest = version is not None and not told and entry is entries[0]
            return Chosen(
                package=package,
                versions=entry["versions"],
                changes=entry.get("changes", {}) if told else entry.get("changes", entry.get("asked", {})),
                note=f"{_newest(package, version, entry) if newest else ''}{entry.get('note', '')}",
            )
    known = "; ".join(entry["versions"] for entry in entries)
    raise InputError(f"No defaults of {package} {version} are recorded; --stack-version takes versions {known}.")


def _newest(package: str, version: str | None, entry: Mapping[str, Any]) -> str:
    """That a version has the newest defaults recorded, which may be older than it is."""
    told = f"{package} {version} is taken to have the defaults of {entry['versions']}, the newest that are recorded"
    return f"{told}; " if entry.get("note") else told


def told_ranges(chosen: tuple[Chosen, ...]) -> str:
    """The ranges in words: ``trl >=1.7``."""
    return ", ".join(f"{one.package} {one.versions}" for one in chosen)


def silent_note(stack: str, asked: str | None) -> tuple[str, ...]:
    """That versions of other packages of the stack were not asked for, and which are taken; empty where none is."""
    named = asked_versions(stack, asked)
    silent = [package for package in built_stack(stack).get("packages", {}) if package not in named]
    if not (named and silent):
        return ()
    return (f"--stack-version names {', '.join(named)} alone: {', '.join(silent)} as of today.",)


def changed(chosen: tuple[Chosen, ...], method: str) -> Iterator[tuple[str, Any]]:
    """(field, default then) of every older range, the general ones before those of the method."""
    for one in chosen:
        yield from one.changes.get("all", {}).items()
        yield from one.changes.get(method, {}).items()


def defaults_then(defaults: Mapping[str, Any], chosen: tuple[Chosen, ...], method: str) -> dict[str, Any]:
    """Today's defaults of a stack with those of older versions in their place."""
    return {**defaults, **dict(changed(chosen, method))}


def adapter_default(asked: Any, dtype: Any) -> Any:
    """Storage of adapters: a dtype, or that of the base."""
    return dtype if asked == BASE else asked


def code_age(options: Mapping[str, Any]) -> str | None:
    """``hf_code`` as asked for, or as the asked version of the stack implies; None: today's."""
    if options.get("hf_code") is not None:
        return str(options["hf_code"])
    stack, asked = str(options.get("stack") or "hf-peft"), options.get("stack_version")
    if asked is None or not load_stacks().get(stack, {}).get("built"):
        return None
    age = dict(changed(chosen_ranges(stack, str(asked)), str(options.get("method") or "lora"))).get("hf_code")
    return None if age is None else str(age)
