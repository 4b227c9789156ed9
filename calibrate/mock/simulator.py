"""One stream of kernels on one simulated card and host: its true duration, without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.host import jitter, layer_entries, operator_seconds
from tunecast.calibrate.mock.kernels import work_of
from tunecast.calibrate.mock.physics import Physics
from tunecast.calibrate.mock.power import LASTING_S, Load, Operating, settle_clock
from tunecast.calibrate.mock.queues import Seconds, Timeline, run_queues
from tunecast.calibrate.mock.work import Work
from tunecast.model.operation import Operation, Phase


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream with equal operations found once: physics is computed per distinct operation."""

    distinct: tuple[Operation, ...]
    index: npt.NDArray[np.int64]
    """Which distinct operation each launch is."""
    entries: npt.NDArray[np.int64]
    """Launches at which Python enters a layer."""
    counts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)


def compile_stream(operations: Sequence[Operation]) -> Stream:
    """Group equal operations, the layer aside; a `count` beyond 1 repeats the operation in place."""
    seen: dict[tuple[object, ...], int] = {}
    distinct: list[Operation] = []
    index: list[int] = []
    for op in operations:
        key = (op.name, op.kind, op.phase, op.dtype, op.flops, op.bytes, op.launches, op.shape, op.layout)
        if key not in seen:
            seen[key] = len(distinct)
            distinct.append(op)
        index.extend([seen[key]] * round(op.count))
    array = np.asarray(index, dtype=np.int64)
    entries = np.asarray(_expanded_entries(operations), dtype=np.int64)
    counts = np.bincount(array, minlength=len(distinct)).astype(np.int64)
    return Stream(tuple(distinct), array, entries, counts)


def _expanded_entries(operations: Sequence[Operation]) -> list[int]:
    """`layer_entries`, shifted by operations that repeat."""
    firsts = np.cumsum([0] + [round(op.count) for op in operations])
    return [int(firsts[i]) for i in layer_entries(operations)]


@dataclass(frozen=True, slots=True)
class Costs:
    """`Work` of many operations, one array per field."""

    core_s: Seconds
    dram_s: Seconds
    fixed_s: Seconds
    tensor_s: Seconds
    kernels: Seconds
    exposed: Seconds

    @staticmethod
    def of(works: Sequence[Work]) -> Costs:
        """Columns of a list of works."""
        return Costs(
            *(np.asarray([getattr(w, name) for w in works], dtype=np.float64) for name in Costs.__dataclass_fields__)
        )

    def durations(self, clock: float, minimum_s: float, gap_s: float) -> Seconds:
        """Seconds on the device at a clock: the longer of core and DRAM, what they do not hide, gaps inside."""
        core = self.core_s / clock
        hidden = np.maximum(core, self.dram_s) + self.exposed * np.minimum(core, self.dram_s)
        shortest = np.maximum(self.fixed_s + hidden, minimum_s * self.kernels)
        total: Seconds = shortest + gap_s * (self.kernels - 1.0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Truth of one stream: its duration, when each clock was done, and where the card settled."""

    seconds: float
    timeline: Timeline
    operating: Operating
    device_busy_s: float


class Simulator:
    """A card with its physics. It keeps no state: the same stream and hotness give the same outcome."""

    def __init__(self, card: Card, physics: Physics) -> None:
        self.card = card
        self.physics = physics

    def step(self, stream: Stream, hotness: float = 1.0) -> Outcome:
        """Run a stream from idle to idle: choose the clock, then let the two clocks run."""
        p = self.physics
        costs = Costs.of([work_of(self.card, p, op) for op in stream.distinct])
        host = self._host_seconds(stream)
        operating = settle_clock(self.card, p.power, self._load(costs, stream.counts, float(host.sum())), hotness)
        durations = costs.durations(operating.clock, p.launch.minimum_s, p.launch.gap_s)[stream.index]
        timeline = run_queues(host, durations, p.launch.gap_s, p.launch.queue)
        return Outcome(
            seconds=timeline.total_s + p.host.sync_s,
            timeline=timeline,
            operating=operating,
            device_busy_s=float(durations.sum()),
        )

    def kernel(
        self, work: Work, hotness: float = 1.0, issue_s: float = 0.0, least_s: float = LASTING_S, calls: int = 1
    ) -> Outcome:
        """One operator repeated back to back, as a microbenchmark does: seconds of one execution.

        The host issues the next while the device works, so the slower of the two sets the pace. It goes on for
        `least_s`, or for so many `calls` where these take longer.
        """
        launch = self.physics.launch
        costs = Costs.of([work])
        one = np.ones(1, dtype=np.int64)
        load_at = self._load(costs, one, issue_s, least_s, calls)
        operating = settle_clock(self.card, self.physics.power, load_at, hotness)
        busy = float(costs.durations(operating.clock, launch.minimum_s, launch.gap_s)[0])
        seconds = max(busy + launch.gap_s, issue_s)
        timeline = Timeline(host_s=issue_s, device_s=busy + launch.gap_s)
        return Outcome(seconds=seconds, timeline=timeline, operating=operating, device_busy_s=busy)

    def _host_seconds(self, stream: Stream) -> Seconds:
        each = np.asarray([operator_seconds(self.physics, op) for op in stream.distinct])
        seconds: Seconds = each[stream.index] * jitter(self.physics, len(stream))
        again = np.asarray([op.phase is Phase.RECOMPUTE for op in stream.distinct])[stream.index[stream.entries]]
        seconds[stream.entries] += self.physics.host.layer_s + self.physics.host.checkpoint_s * again
        return seconds

    def _load(
        self,
        costs: Costs,
        counts: npt.NDArray[np.int64],
        host_s: float,
        least_s: float = LASTING_S,
        calls: int = 1,
    ) -> Callable[[float], Load]:
        launch = self.physics.launch
        tensor, dram = float(counts @ costs.tensor_s), float(counts @ costs.dram_s)

        def load_at(clock: float) -> Load:
            busy = float(counts @ costs.durations(clock, launch.minimum_s, launch.gap_s))
            wall = max(busy + launch.gap_s * float(counts.sum()), host_s)
            return Load(wall_s=wall, busy_s=busy, tensor_s=tensor, dram_s=dram, lasts_s=max(least_s, calls * wall))

        return load_at
