"""Reading and showing the data files: CSV in, plain values out.

The files under `catalogs/data/` are the source of truth. Their columns keep the names under which
the facts were collected, and `tunecast catalog ... --json` prints the same names.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunecast.catalogs.prices import Offer

MIB = 1024**2
GIB = 1024**3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12
"""This layer imports nothing of ours, so it keeps the few units that the files need."""

Row = dict[str, str]
Cell = str | int | float | bool | None

TEXT_COLUMNS = frozenset({"compute_capability", "snapshot_date", "source_date", "canonical_id", "hf_id", "family"})
"""Columns that stay text even where they look like numbers."""


@cache
def _read(name: str) -> tuple[Row, ...]:
    text = files("tunecast.catalogs").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def read_rows(name: str) -> list[Row]:
    """The rows of one data file, every cell as text; a fresh copy, so a caller may change it."""
    return [dict(row) for row in _read(name)]


def number(text: str) -> float | None:
    """A cell as a number, None where the fact was not found."""
    return float(text) if text else None


def integer(text: str) -> int | None:
    """A cell as a whole number, None where the fact was not found."""
    return int(float(text)) if text else None


def names(text: str) -> tuple[str, ...]:
    """A `;`-separated cell as its parts."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def cell(column: str, text: str) -> Cell:
    """A cell as a JSON value: None for empty, a number where it is one, else the text."""
    if not text:
        return None
    if column in TEXT_COLUMNS:
        return text
    if text in ("true", "false"):
        return text == "true"
    return _numeric(text)


def _numeric(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def json_rows(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Cell]]:
    """Rows with the facts' column names and JSON-safe values, as `catalog ... --json` prints them."""
    return [{column: cell(column, text) for column, text in row.items()} for row in rows]


def gpu_rows() -> list[dict[str, Cell]]:
    """`tunecast catalog gpus`: one row per GPU."""
    return json_rows(read_rows("gpus.csv"))


def model_rows() -> list[dict[str, Cell]]:
    """`tunecast catalog models`: one row per model."""
    return json_rows(read_rows("models.csv"))


def price_rows(offers: Iterable[Offer] | None = None, *, current_only: bool = False) -> list[dict[str, Cell]]:
    """`tunecast catalog prices`: one row per price, with whether it may be ranked and how old it is.

    By default those that ship; `current_only` leaves their history out.
    """
    from tunecast.catalogs.prices import current_offers, load_prices

    shown = (current_offers() if current_only else load_prices()) if offers is None else offers
    return [
        {
            **{column: cell(column, text) for column, text in offer.raw.items()},
            "rankable": offer.rankable,
            "why_not_rankable": offer.why_not_rankable or None,
            "age_days": offer.age_days(),
        }
        for offer in shown
    ]
