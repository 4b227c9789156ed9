"""The front and its knee, against brute force and hand arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tunecast.model.front import beats, knee, pareto, share


@dataclass(frozen=True, slots=True)
class Dot:
    time_h: float
    usd: float


dots = st.lists(st.builds(Dot, st.integers(1, 40).map(float), st.integers(1, 40).map(float)), min_size=1, max_size=30)


@given(dots)
def test_the_front_is_what_brute_force_leaves(points: list[Dot]) -> None:
    left = {p for p in points if not any(q.time_h <= p.time_h and q.usd <= p.usd and q != p for q in points)}
    front = pareto(points)
    assert set(front) == left
    assert [p.usd for p in front] == sorted(p.usd for p in front)


@given(dots)
def test_what_is_left_out_is_beaten_by_the_front(points: list[Dot]) -> None:
    front = pareto(points, worth=0.05)
    assert all(p in front or any(beats(q, p, worth=0.05) for q in front) or p in front for p in set(points))


def test_a_dearer_point_has_to_be_worth_its_line() -> None:
    points = [Dot(10.0, 1.0), Dot(9.95, 2.0), Dot(5.0, 3.0)]
    assert pareto(points) == points
    assert pareto(points, worth=0.01) == [points[0], points[2]]


def test_the_knee_is_nearest_to_the_corner_in_ratios() -> None:
    # ends: 1 USD in 16 h and 16 USD in 1 h; the middle at 2 USD in 2 h is a quarter of the way in both ratios
    front = [Dot(16.0, 1.0), Dot(2.0, 2.0), Dot(1.0, 16.0)]
    assert share(2.0, 1.0, 16.0) == 0.25
    assert knee(front) == front[1]
    assert knee(front[:1]) == front[0]
    assert knee([front[0], front[2]]) == front[0]  # of two, the cheaper
