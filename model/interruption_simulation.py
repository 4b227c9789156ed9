"""Interruptible machines played event by event: the distribution behind the expectation.

Coded apart from `interruptions.py` on purpose: nothing here knows a formula. Each draw is a clock that
runs from one cut to the next. A machine starts (the first time) or restarts (after), then alternates
work and saves; at a cut everything after the last finished save is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PERCENTILES = (10.0, 50.0, 90.0)
MOST_ROUNDS = 100_000
"""Cuts per draw after which a job counts as never ending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Hours and cuts of many draws of one job."""

    hours: Any
    """One number per draw."""
    cuts: Any

    @property
    def mean_h(self) -> float:
        """Mean hours."""
        return float(self.hours.mean())

    def percentiles_h(self) -> tuple[float, float, float]:
        """10th, 50th and 90th percentile of the hours."""
        import numpy as np

        low, middle, high = (float(x) for x in np.percentile(self.hours, PERCENTILES))
        return low, middle, high


def milestones(
    work_h: float, save_h: float, final_save_h: float, tail_h: float, interval_h: float | None
) -> list[float]:
    """Hours of machine time from each safe point to the next: work with its save, the last work, what follows."""
    left, parts = work_h, []
    while interval_h is not None and left > interval_h * (1.0 + 1e-9):
        parts.append(interval_h + save_h)
        left -= interval_h
    return [part for part in (*parts, left + final_save_h, tail_h) if part > 0.0]


def simulate(
    *,
    startup_h: float,
    work_h: float,
    save_h: float,
    tail_h: float,
    restart_h: float,
    interval_h: float | None,
    cuts_per_h: float,
    draws: int,
    seed: int,
    final_save_h: float = 0.0,
) -> Played:
    """Play the job `draws` times; the same seed gives the same draws."""
    import numpy as np

    random = np.random.default_rng(seed)
    ends = np.concatenate([[0.0], np.cumsum(milestones(work_h, save_h, final_save_h, tail_h, interval_h))])
    clock, cuts = np.zeros(draws), np.zeros(draws, dtype=int)
    safe = np.full(draws, -1)
    """Index of the last safe point reached; -1 before the machine has started for the first time."""
    running = np.arange(draws)
    for _ in range(MOST_ROUNDS):
        if not running.size:
            return Played(hours=clock, cuts=cuts)
        at = safe[running]
        before = np.where(at < 0, startup_h, restart_h)
        needed = before + ends[-1] - ends[np.maximum(at, 0)]
        life = random.exponential(1.0 / cuts_per_h, running.size) if cuts_per_h > 0 else np.full(running.size, np.inf)
        finished = life >= needed
        clock[running] += np.where(finished, needed, life)
        cuts[running] += ~finished
        reached = np.searchsorted(ends, ends[np.maximum(at, 0)] + life - before, side="right") - 1
        safe[running] = np.where(life < before, at, np.maximum(reached, at))
        running = running[~finished]
    raise OverflowError(f"a draw was interrupted {MOST_ROUNDS} times without an end")
