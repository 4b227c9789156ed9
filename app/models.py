"""MODEL as an architecture: a local config.json, a catalog model, or an id of the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunecast.beside_the_text import config_notes, vision_notes
from tunecast.catalogs.errors import UnbuiltFamilyError, UnknownNameError
from tunecast.few_bits import storage_of
from tunecast.hub import count_note, from_hub, looks_like_hub_id
from tunecast.model.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """An architecture, and what the user should be told about where it came from."""

    architecture: Architecture
    notes: tuple[str, ...] = ()
    stored: Mapping[str, Any] = field(default_factory=dict)
    """Run options that follow from weights stored in few bits."""


def find_architecture(name: str, *, exact: bool = False) -> FoundModel:
    """The architecture that MODEL names; with `exact` also of families that only the real code knows."""
    from tunecast.catalogs.models import find_model
    from tunecast.model.architectures import (
        architecture_from_config,
        architecture_from_row,
    )
    from tunecast.model.config_file import config_path, looks_like_path, read_config

    if looks_like_path(name):
        path = config_path(name)
        config = read_config(path)
        notes, stored = config_notes(config, str(path)), storage_of(config)
        plain = {key: value for key, value in config.items() if not stored or key != "quantization_config"}
        known = known_or_traced(lambda: architecture_from_config(plain, str(path)), plain, str(path), exact)
        return FoundModel(architecture=known, notes=notes, stored=stored)
    try:
        row = find_model(name)
    except UnknownNameError as unknown:
        if not looks_like_hub_id(name):
            raise
        return hub_model(name, unknown, exact)
    try:
        return FoundModel(architecture=architecture_from_row(row), notes=vision_notes(row))
    except UnbuiltFamilyError:
        if not exact:
            raise
        from tunecast.calibrate.exact import load_real_architecture

        return FoundModel(architecture=load_real_architecture(name))


def hub_model(name: str, unknown: UnknownNameError, exact: bool) -> FoundModel:
    """A model whose config comes from the hub, its parameters compared with those its files state."""
    from tunecast.model.architectures import architecture_from_config

    found = from_hub(name, unknown)
    architecture = known_or_traced(lambda: architecture_from_config(found.config, name), found.config, name, exact)
    notes = (f"{name} was read from the hub.", *count_note(name, architecture.total_params, found.stated_params))
    notes = (*notes, *config_notes(found.config, name))
    return FoundModel(architecture=architecture, notes=notes)


def known_or_traced(
    by_formula: Callable[[], Architecture], config: Mapping[str, Any], name: str, exact: bool
) -> Architecture:
    """The architecture by its family; one without formulas as the real code builds it, if `exact`."""
    try:
        return by_formula()
    except UnbuiltFamilyError:
        if not exact:
            raise
        from tunecast.calibrate.exact import real_architecture

        return real_architecture(config, name)
