"""Cells as a table has them beside what they are read as: messages quote what stands there.

Where commas do not separate the columns, they may be decimal signs: three digits behind a point may then group
thousands (``1.024``), as a comma does elsewhere.
"""

from __future__ import annotations

import re

from tunecast.calibrate.cell_numbers import EACH, UNITS, with_point

GBITS = r"(?:G|Gig|GbE|GE|[Gg]b(?:it)?s?(?:ps|/s(?:ec)?| ?per ?s(?:ec(?:ond)?)?)?|GB(?:ps|/s(?:ec)?))"
MAY_GROUP = {
    "mean_tokens": rf"(?:{UNITS['mean_tokens']})?",
    "internode_gbps": rf"{GBITS}?",
    "peak_mem_gib": rf"MiB{EACH}?",
}
"""By column: the units in which both a number of three decimals and 1,000 times as much may be meant."""


class Cell(str):
    """What a cell is read as; its ``repr`` is what the table has there."""

    written: str
    commas: bool
    """Whether it is of a table that commas do not separate."""

    def __new__(cls, text: str, written: str, *, commas: bool) -> Cell:
        """The text, with what the table has in its place."""
        cell = super().__new__(cls, text)
        cell.written, cell.commas = written, commas
        return cell

    def __repr__(self) -> str:
        return repr(self.written)


def comma_cell(column: str, text: str) -> Cell:
    """A cell of a table that commas do not separate: a decimal comma is read as a point."""
    return Cell(with_point(column, text), text, commas=True)


def read_as(text: str, old: str) -> Cell:
    """Another text in place of a cell, which is quoted as it was written."""
    written, commas = (old.written, old.commas) if isinstance(old, Cell) else (old, False)
    return Cell(text, written, commas=commas)


def part_of(old: str, text: str) -> str:
    """A part of a cell as a cell of its own."""
    return Cell(text, text, commas=True) if isinstance(old, Cell) and old.commas else text


def two_readings(column: str, text: str, most: float | None = None) -> str:
    """What a number with a point may be, behind ``column 'text'``, where that is two numbers up to `most`; else
    nothing."""
    if not (isinstance(text, Cell) and text.commas and column in MAY_GROUP):
        return ""
    found = re.fullmatch(rf"[~\u2248]?\s*([1-9]\d{{0,2}})\.(\d{{3}})\s*{MAY_GROUP[column]}", text, re.IGNORECASE)
    if found is None or (most is not None and int(found[1] + found[2]) > most):
        return ""
    return f"may be {found[1]}.{found[2]} or {found[1]}{found[2]}: write it without a point"
