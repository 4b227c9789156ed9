"""What a config says of positions in time, row and column of an image (``mrope_section``): Qwen's models that see.

Sources: transformers 5 ``modeling_qwen3_5.py``, ``Qwen3_5TextRotaryEmbedding``; ``modeling_qwen2_5_vl.py``,
``Qwen2_5_VLRotaryEmbedding``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.config_fields import inner
from tunecast.model.family import Family

GRIDS = 3
"""Kinds of positions."""


def sections_of(config: Mapping[str, Any], family: Family, angles: int, name: str) -> tuple[int, ...]:
    """Angles of a table taken from positions of rows and of columns: every third one, up to each section's end, or,
    where the family joins them, one section after the other. Empty for positions of one kind."""
    if not family.sections:
        return ()
    rope = inner(config, name, "rope_parameters", "rope_scaling")
    sections = rope.get("mrope_section", list(family.sections))
    if not isinstance(sections, list) or [type(each) for each in sections] != [int] * GRIDS:
        raise InputError(f"The config {name} has mrope_section={sections!r}, but it must be three whole numbers.")
    if not family.sections_joined:
        return tuple(len(range(grid, min(sections[grid] * GRIDS, angles), GRIDS)) for grid in (1, 2))
    if sum(sections) != angles:
        raise InputError(
            f"The config {name} has mrope_section={sections!r}, but its numbers must add up to the {angles} angles of "
            "a head."
        )
    return sections[1], sections[2]
