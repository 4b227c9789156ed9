"""Reading values out of a nested mapping: by dotted name, typed, remembering what was read.

A key with nothing after it means absent, as the frameworks' own examples use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from tunecast.catalogs.errors import InputError

SHORTEST_NAME = 5
"""Letters of a name below which a likeness says nothing: fp16 and bf16 are both fields."""
SLIP_LETTERS = 2
"""Letters of the one place in which a slip may differ."""
ENDING_LETTERS = 4
"""Letters of an ending without which two names are the same: ``gradient_checkpoint``, ``lora_rank``."""
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def is_empty(value: Any) -> bool:
    """Whether a value means that the key is absent."""
    return value is None or value == {} or value == [] or (isinstance(value, str) and not value.strip())


class Source:
    """One file's mapping under reading."""

    def __init__(self, mapping: Mapping[str, Any], *, name: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._mapping = mapping
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def get(self, field: str) -> Any:
        """The file's value of a dotted field, None where it is absent or empty."""
        self._read.add(field)
        return self.peek(field)

    def peek(self, field: str) -> Any:
        """The same of a field from which no option follows: it stays among those that are unread."""
        value = self._mapping.get(field)
        if value is None and "." in field:
            value = self._nested(field)
        if isinstance(value, str) and "${" in value:
            raise InputError(f"{self.name}: {field} is {value!r}, an interpolation; write its value into the file.")
        return None if is_empty(value) else value

    def word(self, field: str) -> str:
        """What a field that stays unread says, in lower case: ``none`` where it is absent or empty."""
        return str(self.peek(field)).lower()

    def has(self, field: str) -> bool:
        """Whether the file gives the field a value."""
        return self.get(field) is not None

    def nulls(self, field: str) -> bool:
        """Whether the file gives the field no value in so many words (null), which may mean something."""
        return field in self._mapping and self._mapping[field] is None

    def default(self, field: str) -> Any:
        """What the framework takes when the file has no such field."""
        return self._defaults.get(field)

    def first(self, fields: Sequence[str]) -> tuple[Any, str | None]:
        """Value and name of the only given one of several spellings; two that disagree are refused."""
        given = [(self.get(field), field) for field in fields if self.has(field)]
        if not given:
            return None, None
        for value, field in given[1:]:
            if value != given[0][0]:
                raise InputError(
                    f"{self.name}: {given[0][1]} is {given[0][0]!r} but {field} is {value!r}; keep one of them."
                )
        return given[0]

    def flag(self, field: str) -> bool | None:
        """A yes or no, None where absent."""
        value = self.get(field)
        if value is None or isinstance(value, bool):
            return value
        word = _WORDS.get(str(value).strip().lower())
        if word is None:
            raise InputError(f"{self.name}: {field} is {value!r}, but it must be true or false.")
        return word

    def on(self, field: str) -> bool:
        """Whether a switch is on, by the file or by the framework's default."""
        value = self.flag(field)
        return bool(self.default(field)) if value is None else value

    def whole(self, field: str) -> int | None:
        """A whole number, None where absent; fractions and words are refused."""
        value = self.number(field)
        if value is None:
            return None
        if not float(value).is_integer():
            raise InputError(f"{self.name}: {field} is {value!r}, but it must be a whole number.")
        return int(value)

    def count(self, field: str) -> int | None:
        """A whole number of at least 1, None where absent."""
        value = self.whole(field)
        if value is not None and value < 1:
            raise InputError(f"{self.name}: {field} is {value}, but it must be at least 1.")
        return value

    def number(self, field: str) -> float | int | None:
        """A number, None where absent; numbers in quotes and YAML's ``1e-4`` count as numbers."""
        value = self.get(field)
        try:
            told = isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool))
            number = float(value if told else "") if value is not None else 0.0
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{self.name}: {field} is {value!r}, but it must be a number.")
        return number if isinstance(value, str) else value

    def words(self, field: str) -> tuple[str, ...] | None:
        """A list of words, written as a YAML list or with commas; None where absent."""
        value = self.get(field)
        if value is None:
            return None
        parts = value if isinstance(value, list | tuple) else str(value).split(",")
        return tuple(str(part).strip() for part in parts if str(part).strip())

    def unread(self) -> tuple[str, ...]:
        """Dotted names of every given value that nobody asked for."""
        return tuple(field for field in _leaves(self._mapping) if not self._was_read(field))

    def misspelt(self) -> tuple[tuple[str, str], ...]:
        """(field, what is meant): fields nobody read that differ by a slip from one that was looked for, in vain or
        not: both may stand in the file."""
        looked_for = sorted(self._read, key=lambda field: (self.has(field), field))
        found = ((field, next((name for name in looked_for if _is_slip(field, name)), None)) for field in self.unread())
        return tuple((field, meant) for field, meant in found if meant is not None)

    def _was_read(self, field: str) -> bool:
        parts = field.split(".")
        return any(".".join(parts[:n]) in self._read for n in range(1, len(parts) + 1))

    def _nested(self, field: str) -> Any:
        value: Any = self._mapping
        for part in field.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif not is_empty(value):
            yield f"{prefix}{key}"


def _is_slip(typed: str, meant: str) -> bool:
    """Whether two names differ in one place, by two letters at most, or one word of theirs has another ending."""
    if typed == meant or min(len(typed), len(meant)) < SHORTEST_NAME:
        return False
    short, long = sorted((typed, meant), key=len)
    if long.startswith(short) and 0 < len(long) - len(short) <= ENDING_LETTERS and "_" not in long[len(short) :]:
        return True
    start = _alike(typed, meant)
    end = _alike(typed[start:][::-1], meant[start:][::-1])
    return max(len(typed), len(meant)) - start - end <= SLIP_LETTERS


def _alike(one: str, other: str) -> int:
    """Letters that two words begin with together."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
