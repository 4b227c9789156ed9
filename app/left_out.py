"""Several cards asked at once: those that have no answer are left out with their reason, and the others answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tunecast.catalogs.errors import ImpossibleError, InputError

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.target import Target

SHOWN = 3
"""Cards of one reason that are named."""


def answered(targets: Sequence[Target], ask: Callable[[Target], Forecast]) -> tuple[list[Target], list[Forecast]]:
    """Cards that answer and their forecasts, with notes on the other cards.

    When every card refuses, the first refusal is raised: it is then most likely the question's.
    """
    found: list[tuple[Target, Forecast]] = []
    refused: list[tuple[str, InputError | ImpossibleError]] = []
    for target in targets:
        try:
            found.append((target, ask(target)))
        except (InputError, ImpossibleError) as error:
            if len(targets) == 1:
                raise
            refused.append((target.id, error))
    if refused and not found:
        raise refused[0][1]
    notes = left_out_notes((card, str(error)) for card, error in refused)
    return [target for target, _ in found], [replace(f, notes=(*f.notes, *notes)) for _, f in found]


def left_out_notes(refused: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """One note per reason, with the cards that have it."""
    cards: dict[str, list[str]] = {}
    for card, reason in refused:
        cards.setdefault(reason.replace(card, "this card"), []).append(card)
    return tuple(f"left out: {_some(named)}: {reason}" for reason, named in cards.items())


def _some(cards: Sequence[str]) -> str:
    """A few cards and how many more."""
    return (
        ", ".join(cards)
        if len(cards) <= SHOWN
        else f"{', '.join(cards[: SHOWN - 1])} and {len(cards) - SHOWN + 1} more"
    )
