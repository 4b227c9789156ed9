"""Refreshed prices on disk: one JSON file in the user's cache folder, written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.files import write_whole
from tunecast.catalogs.prices import Offer, parse_offers
from tunecast.catalogs.tables import Row

SCHEMA = "tunecast.prices/1"
FILE_NAME = "prices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrices:
    """What the last refresh left behind."""

    fetched_on: str
    source: str
    """Where the prices came from and when, in words."""
    rows: tuple[Row, ...]
    """As in `prices.csv`."""

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The rows as offers of the refreshed layer."""
        return parse_offers(self.rows, layer="refreshed")


def default_cache_dir() -> Path:
    """`TUNECAST_CACHE_DIR`, else the platform's own place for caches (XDG, Library/Caches, LOCALAPPDATA)."""
    own = os.environ.get("TUNECAST_CACHE_DIR")
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tunecast"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "tunecast" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunecast"


def cached_offers(cache_dir: Path | None = None) -> CachedPrices | None:
    """The refreshed prices, None when there never was a refresh; raises TunecastError for a file it cannot read."""
    path = (cache_dir or default_cache_dir()) / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        held = json.loads(text)
        if held["schema"] != SCHEMA:
            raise ValueError(f"schema {held['schema']!r}")
        return CachedPrices(fetched_on=held["fetched_on"], source=held["source"], rows=tuple(held["rows"]))
    except (ValueError, KeyError, TypeError) as error:
        raise TunecastError(
            f"The refreshed prices in {path} cannot be read ({error}); delete that file, "
            "or run `tunecast catalog prices --refresh`."
        ) from error


def write_cache(prices: CachedPrices, cache_dir: Path | None = None) -> Path:
    """Replace the cache by these prices; a write that fails half-way leaves the old file as it was."""
    folder = cache_dir or default_cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    content: Mapping[str, Any] = {
        "schema": SCHEMA,
        "fetched_on": prices.fetched_on,
        "source": prices.source,
        "rows": list(prices.rows),
    }
    path = folder / FILE_NAME
    write_whole(path, json.dumps(content))
    return path
