"""Versions of packages, compared by their numbers, and ranges of them."""

from __future__ import annotations

import re

from tunecast.catalogs.errors import InputError


def version_key(version: str) -> tuple[int, ...]:
    """``1.10.0.dev0`` as (1, 10, 0), so that versions compare by their numbers."""
    parts = re.match(r"\d+(?:\.\d+)*", version.strip().lstrip("v"))
    if parts is None:
        raise InputError(f"{version!r} is no version; type for example 1.7.0.")
    return tuple(int(part) for part in parts[0].split("."))


def in_range(version: str, versions: str) -> bool:
    """Whether a version lies in a range such as ``>=1.0,<1.7``."""
    return all(_holds(version_key(version), bound.strip()) for bound in versions.split(","))


def _holds(version: tuple[int, ...], bound: str) -> bool:
    sign, other = bound[: -len(bound.lstrip("<>="))], version_key(bound.lstrip("<>="))
    width = max(len(version), len(other))
    left, right = (key + (0,) * (width - len(key)) for key in (version, other))
    return {">=": left >= right, "<": left < right}[sign]
