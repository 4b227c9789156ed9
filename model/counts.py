"""Amounts of data as they are typed."""

from __future__ import annotations

import math
import re

from tunecast.catalogs.errors import InputError
from tunecast.model.bounds import MOST_AMOUNT, at_most
from tunecast.model.units import GIGA, KILO, MEGA, TERA

WHOLE = ("--num-samples", "--tokens")
"""Of which no part can be typed: a mean may be one."""
_SUFFIX = {"": 1.0, "k": KILO, "m": MEGA, "b": GIGA, "g": GIGA, "t": TERA}


def parse_count(text: str | float, *, name: str) -> float:
    """``10M``, ``1.5B``, ``15T`` or a plain number, its thousands apart (``10_000_000``) or not.

    Raises InputError for anything else or below 1, and for a part of a sample or token.
    """
    digits = re.sub(r"(?<=\d)[_,](?=\d{3}(\D|$))", "", str(text))
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", digits)
    count = float(match[1]) * _SUFFIX[match[2].lower()] if match else 0.0
    if not math.isfinite(count) or count < 1:
        raise InputError(f"{name} is {text!r}, which is not a positive amount; type it as 10M, 1.5B, 15T or 250000.")
    if isinstance(text, str) and name in WHOLE and not count.is_integer():
        raise InputError(f"{name} is {text!r}, which is not a whole number; round it.")
    return at_most(name, count, MOST_AMOUNT)
