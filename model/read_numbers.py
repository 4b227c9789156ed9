"""Numbers as users give them, from Python too: whatever is none is refused in a sentence, never a traceback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from tunecast.catalogs.errors import InputError


def as_number(value: Any) -> float | None:
    """A finite number, or text that is one; None for anything else, switches included."""
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def is_infinite(value: Any) -> bool:
    """Whether it is infinity, or text that says so."""
    return str(value).strip().lower().lstrip("+-") in ("inf", "infinity")


def plain_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with NumPy's numbers and truth values, as a column of pandas gives them, as Python's."""
    return {name: value.item() if is_scalar(value) else value for name, value in options.items()}


def is_scalar(value: Any) -> bool:
    """Whether it is a number in an array of no dimensions."""
    return getattr(value, "shape", None) == () and callable(getattr(value, "item", None))


def number_that(flag: str, value: Any, holds: Callable[[float], bool], what: str, example: str) -> float:
    """`value` as a number for which `holds`; else an InputError that says `what` it is not."""
    number = as_number(value)
    if number is None and is_infinite(value):
        raise InputError(f"{flag} is {value!r}, but it must be finite; type for example {example}.")
    if number is None or not holds(number):
        raise InputError(f"{flag} is {value!r}, which is not {what}; type for example {example}.")
    return number


def number_above_zero(flag: str, value: Any, example: str) -> float:
    """`value` as a number above 0."""
    return number_that(flag, value, lambda number: number > 0.0, "above 0", example)


def is_count(number: float) -> bool:
    """Whether it is a whole number above 0."""
    return number.is_integer() and number >= 1.0


def whole_number(option: str, value: Any, *, at_least: int = 1) -> int:
    """`value` as a whole number of at least `at_least`; fractions and text are refused, never rounded."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if number is None or number < at_least:
        flag = option.replace("_", "-")
        raise InputError(f"--{flag} is {value!r}, but it must be a whole number of at least {at_least}.")
    return number
