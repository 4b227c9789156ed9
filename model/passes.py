"""How long an optimizer step's passes take on two clocks: the host issues, the device works off what was issued.

All that a pass knows of the one before is by how much the host is ahead of the device. That lead starts at none and
grows from micro-step to micro-step by the same amount until a full queue stops it (forward and backward are
compositions of shifts and bounds), and with it the time of a micro-step stays the same until the queue is full, and
after. So the first `WRITTEN` micro-steps are gone through one by one and the rest are counted, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.segments import MICRO_ORDER, OPTIMIZER_SEGMENT, SEGMENTS

WRITTEN = 8
"""Micro-steps that are gone through one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one pass of each (run, segment)."""

    busy: Array
    """The device works or waits for links."""
    issue: Array
    """The host issues."""
    queue: Array
    """How far the host may run ahead: a full launch queue."""
    meets: Array
    """1 where the host waits for the device at the start, else 0."""
    micro_steps: Array
    """(runs,)"""
    synchronous: bool
    """The device is its own host: both times add."""

    def segment(self, segment: int, ahead: Array) -> tuple[Array, Array]:
        """(seconds by which the host is ahead after a segment, device seconds of it), from those before it."""
        if self.synchronous:
            return np.zeros_like(ahead), self.busy[:, segment] + self.issue[:, segment]
        before = np.where(self.meets[:, segment] > 0.0, 0.0, ahead)
        issued = self.issue[:, segment] - before
        spent = np.maximum(self.busy[:, segment], issued)
        return np.minimum(spent - issued, self.queue[:, segment]), spent

    def micro_step(self, ahead: Array) -> tuple[Array, Array]:
        """(seconds by which the host is ahead after forward and backward, (runs, segments) device seconds)."""
        spent = np.zeros((len(ahead), len(SEGMENTS)))
        for segment in MICRO_ORDER:
            ahead, spent[:, segment] = self.segment(segment, ahead)
        return ahead, spent

    def seconds(self) -> Array:
        """(runs, segments) device seconds between the ends of segments, all micro-steps of a segment together."""
        runs, most = len(self.micro_steps), int(self.micro_steps.max())
        ahead, gained = np.zeros(runs), np.zeros(runs)
        spent = last = np.zeros((runs, len(SEGMENTS)))
        for micro in range(min(most, WRITTEN)):
            active = self.micro_steps > micro
            after, last = self.micro_step(ahead)
            spent = spent + np.where(active[:, None], last, 0.0)
            gained, ahead = np.where(active, after - ahead, gained), np.where(active, after, ahead)
        if most > WRITTEN:
            later, ahead = self._later(ahead, gained, last)
            spent = spent + later
        spent[:, OPTIMIZER_SEGMENT] += self.segment(OPTIMIZER_SEGMENT, ahead)[1]
        return spent

    def _later(self, ahead: Array, gained: Array, last: Array) -> tuple[Array, Array]:
        """((runs, segments) device seconds of the micro-steps not gone through, host ahead after them)."""
        left = np.maximum(self.micro_steps - WRITTEN, 0.0)
        full, _ = self.micro_step(np.full_like(ahead, np.inf))
        _, behind_full = self.micro_step(full)
        growing = (gained > 0.0) & (ahead < full)
        missing = np.where(growing, full - ahead, 0.0) / np.where(growing, gained, 1.0)
        steps = np.where(growing, np.minimum(np.ceil(missing), left), 0.0)
        settled = np.where((growing | (ahead >= full))[:, None], behind_full, last)
        spent = steps[:, None] * last + (left - steps)[:, None] * settled
        grown = np.minimum(ahead + steps * gained, full)
        return spent, np.where(steps > 0.0, grown, ahead)
