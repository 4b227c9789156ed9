"""Between adapters that are units of FSDP (`hooks`): what the device works on, and what the host has to do meanwhile.

A map's own product is issued before the host turns to the map's two units, and so is all that stands between them and
the units of the map before. Before a unit the host waits until the device is through with the unit before the last
(`stands_still`): a long product (of the MLP, of the queries) hides two visits and the launches, a short one (of a few
keys) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunecast.model.curves import Array
from tunecast.model.hooks import enters_module, is_adapters
from tunecast.model.host import attends
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD, SEGMENTS, segment_of
from tunecast.model.sharding_copies import copies_for_others

IN_ORDER = {Phase.FORWARD: 0, Phase.RECOMPUTE: 1, Phase.BACKWARD: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Work up to and with a map's adapters, since the map before."""

    rows: tuple[npt.NDArray[np.int64], ...]
    """For each gap the operations in it."""
    segment: npt.NDArray[np.int64]
    visits: Array
    """(gaps, variants) of units, per optimizer step."""
    launches: Array
    """(gaps, variants) of kernels, per optimizer step."""
    counts: tuple[Array, ...]
    """For each gap the (operations in it, variants) executions per optimizer step."""

    def visits_in(self) -> Array:
        """(variants, segments, gaps) visits per optimizer step, each in its gap's own segment."""
        return self._by_segment(self.visits.T)

    def launches_in(self) -> Array:
        """The same of launches."""
        return self._by_segment(self.launches.T)

    def work_s(self, seconds: Array) -> Array:
        """(..., variants, segments, gaps) device seconds per optimizer step; `seconds` (..., operations) are those of
        one execution."""
        each = [seconds[..., rows] @ counts for rows, counts in zip(self.rows, self.counts, strict=True)]
        none = np.zeros((*seconds.shape[:-1], self.visits.shape[1], 0))
        return self._by_segment(np.stack(each, axis=-1) if each else none)

    def _by_segment(self, values: Array) -> Array:
        return np.asarray(values[..., None, :] * (self.segment == np.arange(len(SEGMENTS))[:, None]))


def no_gaps() -> Array:
    """(segments, gaps) of a run whose adapters are no units."""
    return np.zeros((len(SEGMENTS), 0))


def side_by_side(each: Sequence[Array]) -> Array:
    """(runs, ..., gaps) of (..., gaps) of runs with unlike numbers of gaps; 0 where one has none."""
    most = max(found.shape[-1] for found in each)
    return np.array([np.pad(found, [(0, 0)] * (found.ndim - 1) + [(0, most - found.shape[-1])]) for found in each])


def gaps_of(operations: Sequence[Operation], counts: Array, run: Run) -> Gaps:
    """The gaps of a step; `counts` is (operations, variants), and operations of the first variant have none of the
    others' counts (`engine`)."""
    found: list[tuple[list[int], int, Array]] = []
    first = counts[:, 0] > 0.0
    for own in (first, ~first) if run.has_adapters else ():
        for segment in (FORWARD, BACKWARD):
            rows = [int(row) for row in np.flatnonzero(own) if _runs_in(operations[int(row)], segment)]
            rows.sort(key=lambda row: IN_ORDER[operations[row].phase])
            found += _in_segment(operations, counts, run, rows, segment)
    launched = np.array([operation.launches for operation in operations], dtype=float)
    visits = np.array([visited for _, _, visited in found]).reshape(len(found), counts.shape[1])
    return Gaps(
        rows=tuple(np.array(rows, dtype=np.int64) for rows, _, _ in found),
        segment=np.array([segment for _, segment, _ in found], dtype=np.int64),
        visits=visits,
        launches=np.array([launched[rows] @ counts[rows] for rows, _, _ in found]).reshape(visits.shape),
        counts=tuple(counts[rows] for rows, _, _ in found),
    )


VISITS_OF_A_MAP = 2
"""Of its two matrices."""
SETTLED = 4
"""Layers that are followed one by one; each further one takes as long as the last of them."""


def stands_still(work_s: Array, launches_s: Array, visits_s: Array, maps: Array) -> Array:
    """(...,) seconds in which the device waits for the host; all arguments are (..., gaps), of all layers together.

    `visits_s` are the host's for both units of a map, `maps` how often each gap is gone through. Every kernel of a map
    but its adapters' is taken as one, that begins when the host comes to it and ends no earlier than its last launch.
    """
    layers = maps.max(axis=-1, initial=0.0)
    once = np.divide(1.0, layers, out=np.zeros_like(layers), where=layers > 0.0)[..., None]
    work_s, launches_s, visit_s = work_s * once, launches_s * once, visits_s * once / VISITS_OF_A_MAP
    host = device = before = lasted = np.zeros(layers.shape)
    for _ in range(SETTLED):
        begun = device
        for gap in np.flatnonzero(maps.reshape(-1, maps.shape[-1]).any(axis=0)):
            launched = host + launches_s[..., gap]
            worked = np.maximum(np.maximum(device, host) + work_s[..., gap], launched)
            one = np.maximum(launched, before) + visit_s[..., gap]
            first = np.maximum(worked, one)
            two = np.maximum(one, device) + visit_s[..., gap]
            there = maps[..., gap] > 0.0
            before, device = np.where(there, first, before), np.where(there, np.maximum(first, two), device)
            host = np.where(there, two, host)
        lasted = device - begun
    return np.asarray(layers * np.maximum(lasted - work_s.sum(axis=-1), 0.0))


def _runs_in(operation: Operation, segment: int) -> bool:
    """Whether it is of the segment's own work, and no collective or copy around one."""
    moves = operation.kind is Kind.COMMUNICATION or copies_for_others(operation.name)
    return not moves and segment_of(operation) == segment


def _in_segment(
    operations: Sequence[Operation], counts: Array, run: Run, rows: Sequence[int], segment: int
) -> list[tuple[list[int], int, Array]]:
    """(operations, segment, visits by variant) of each gap, in order; what is behind the last is before the first."""
    found: list[tuple[list[int], int, Array]] = []
    since: list[int] = []
    visited = np.zeros(counts.shape[1])
    for row in rows:
        operation = operations[row]
        adapts = is_adapters(operation, run)
        if visited.any() and not adapts and _is_long(operation):
            found.append((since, segment, visited))
            since, visited = [], np.zeros(counts.shape[1])
        since.append(row)
        if adapts:  # in the backward each matrix has two products
            visited = visited + counts[row] * (0.5 if operation.phase is Phase.BACKWARD else 1.0)
    if visited.any():
        found.append((since, segment, visited))
    elif found:
        found[0] = (since + found[0][0], segment, found[0][2])
    return found


def _is_long(operation: Operation) -> bool:
    """Whether it is a map's own product, or attention."""
    return attends(operation) or enters_module(operation)
