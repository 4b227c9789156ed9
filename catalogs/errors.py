"""The exception tree. It lives in the lowest layer so that every layer may raise from it.

    TunecastError            run-time failure                       exit code 1
    ├── InputError           bad input or usage                     exit code 2
    │   └── UnknownNameError a model, GPU or option we do not know  exit code 2
    ├── NotSupportedError    understood, but not built: refused     exit code 2
    │   └── UnbuiltFamilyError  a model without formulas            exit code 2
    ├── ImpossibleError      a forecast above what can be           exit code 1
    └── DeviceError          the hardware or its driver said no     exit code 1

Every message is one sentence: what was asked, what was found, what to type instead.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache


class TunecastError(Exception):
    """Root of all errors that tunecast raises on purpose."""

    exit_code = 1


class InputError(TunecastError):
    """The user's input cannot be used; the message says what to type instead."""

    exit_code = 2


CLOSE = 0.6
"""Least share of letters in common (`difflib`) at which a name is offered for another."""
OFFERED = 3
HELD = 3
"""Fewest letters for which names that begin with them are offered."""


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that a typed one may be a slip of, closest first: beginning with it, or alike as a whole, in the
    part after the last slash, or in as many of the last words."""
    return list(_closest(name, tuple(known)))


@lru_cache(maxsize=256)
def _closest(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    typed = name.lower()
    model, words = typed.rsplit("/", 1)[-1], len(typed.split())

    def alike(other: str) -> float:
        whole = other.lower()
        if len(typed) >= HELD and whole.startswith(typed):
            return 1.0
        pairs = {(typed, whole), (model, whole.rsplit("/", 1)[-1]), (typed, " ".join(whole.split()[-words:]))}
        return max(in_common(*pair) for pair in pairs)

    scores = {other: alike(other) for other in known}
    near = sorted((other for other in scores if scores[other] >= CLOSE), key=lambda other: -scores[other])
    return tuple(near[:OFFERED])


def in_common(first: str, second: str) -> float:
    """Share of letters in common, in order; 0 where they are below `CLOSE` in any order, which takes a tenth of the
    time to see."""
    both = len(first) + len(second)
    if 2 * min(len(first), len(second)) < CLOSE * both:
        return 0.0
    if 2 * (Counter(first) & Counter(second)).total() < CLOSE * both:
        return 0.0
    return difflib.SequenceMatcher(None, first, second).ratio()


class UnknownNameError(InputError):
    """A name that is in no catalog; the message says what is typed `instead`, or else offers the closest ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, hint: str = "", instead: str = "") -> None:
        if instead:
            super().__init__(f"Unknown {what} {name!r}; {instead}.")
            return
        offer = ", ".join(closest(name, known))
        did_you_mean = f" Did you mean {offer}?" if offer else ""
        super().__init__(f"Unknown {what} {name!r}.{did_you_mean}{' ' + hint if hint else ''}")


class NotSupportedError(InputError):
    """Understood, but not built; named instead of guessed."""


class UnbuiltFamilyError(NotSupportedError):
    """A model whose family has no formulas; its real code may still be traced."""


class ImpossibleError(TunecastError):
    """A forecast came out above what the hardware can do: its peaks, its record or our factors are wrong."""


class DeviceError(TunecastError):
    """The hardware, its driver or its library failed; the message says which and what to try."""
