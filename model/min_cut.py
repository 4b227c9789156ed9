"""The minimum cut of a small graph with capacities, by shortest augmenting paths (Edmonds and Karp 1972)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from itertools import pairwise

INFINITE = 1 << 62
Edge = tuple[Hashable, Hashable, int]


def minimum_cut(edges: Iterable[Edge], source: Hashable, sink: Hashable) -> set[Hashable]:
    """Nodes on the source's side of the smallest cut."""
    left: dict[Hashable, dict[Hashable, int]] = {source: {}, sink: {}}
    for tail, head, capacity in edges:
        left.setdefault(tail, {})
        left.setdefault(head, {}).setdefault(tail, 0)
        left[tail][head] = left[tail].get(head, 0) + capacity
    while True:
        before = _search(left, source)
        if sink not in before:
            return set(before)
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = [(tail, head) for head, tail in pairwise(path)]
        room = min(left[tail][head] for tail, head in steps)
        for tail, head in steps:
            left[tail][head] -= room
            left[head][tail] += room


def _search(left: dict[Hashable, dict[Hashable, int]], source: Hashable) -> dict[Hashable, Hashable]:
    """Every node that flow can still reach, and the one before it."""
    before: dict[Hashable, Hashable] = {source: source}
    waiting = deque([source])
    while waiting:
        node = waiting.popleft()
        for head, capacity in left[node].items():
            if capacity > 0 and head not in before:
                before[head] = node
                waiting.append(head)
    return before
