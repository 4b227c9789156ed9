"""Money against time: which plans no other plan beats, and which of those is the balance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

BALANCE = "on the front, the plan nearest to the corner of least time and least money, both as ratios between the ends"
"""What ``balance`` means, in words."""


class Point(Protocol):
    """Anything with a time and a cost."""

    @property
    def time_h(self) -> float:
        """Hours."""
        ...

    @property
    def usd(self) -> float:
        """US dollars."""
        ...


P = TypeVar("P", bound=Point)


def beats(one: Point, other: Point, *, worth: float = 0.0) -> bool:
    """Whether `one` is no dearer than `other` and no slower, but for a share `worth` of time; two equals do not."""
    no_worse = one.usd <= other.usd and one.time_h * (1.0 - worth) <= other.time_h
    return no_worse and (one.time_h, one.usd) != (other.time_h, other.usd)


def pareto(points: Sequence[P], *, worth: float = 0.0) -> list[P]:
    """The points that none beats, cheapest first; of equal ones the first.

    With `worth`, a dearer point has to be faster by more than that share of time.
    """
    front: list[P] = []
    for point in sorted(points, key=lambda p: (p.usd, p.time_h)):
        if not front or point.time_h < (1.0 - worth) * front[-1].time_h:
            front.append(point)
    return front


def share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, in ratios: 0 at `low`, 1 at `high`."""
    return 0.0 if high <= low else math.log(value / low) / math.log(high / low)


def knee(front: Sequence[P]) -> P:
    """The balance of a front (cheapest first): see `BALANCE`. Of two it is the cheaper."""
    cheapest, fastest = front[0], front[-1]

    def distance(point: P) -> float:
        return math.hypot(
            share(point.usd, cheapest.usd, fastest.usd), share(point.time_h, fastest.time_h, cheapest.time_h)
        )

    return min(front, key=lambda point: (distance(point), point.usd))
