"""Interruptible machines: the exact expectation of time and money under exponential failures.

While a machine is held it is taken away after a time that is exponentially distributed with rate
λ (per hour). Work since the last finished checkpoint is lost, a new machine restarts for R hours
(which may be cut off too), and the work goes on from that checkpoint. Of a stretch of L hours that
counts only when it is finished without a cut, the expected duration is

    E(L, R) = (e^{λL} - 1) / λ · e^{λR}

because each of the e^{λL} - 1 expected failed attempts lasts until its cut and is followed by a
restart, whose own expected duration with cuts is (e^{λR} - 1) / λ. Stretches are independent, so a job
is the sum over them. Daly's formula only proposes the interval between checkpoints; the expectation is
of the interval that is taken.

Source: J. T. Daly, Future Generation Computer Systems 22(3), 2006.
Left out: waiting for a machine when none is free (add it to the restart time), and that clouds may not
charge for the last minutes before they take a machine away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.read_numbers import number_that
from tunecast.model.units import MONTH_H

NEVER_H = 1e9
"""Expected hours are capped here, at a hundred thousand years, so that sums stay finite: the job never ends."""
BISECTIONS = 80
"""Halvings of a bracket of rates: past the 52 bits of a float's fraction none is left to halve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """A job on one interruptible machine, in hours."""

    startup_h: float
    """From the request to the first step; repeated from its beginning when cut."""
    work_h: float
    """Useful work, saves not counted."""
    save_h: float
    """One checkpoint: training stands still meanwhile."""
    tail_h: float
    """What follows the final save: merge, export, upload. What it starts from is safe."""
    restart_h: float
    """From a cut to the first step on a new machine, from the last checkpoint."""
    interval_h: float | None
    """Work between checkpoints; None: none is made before the end."""
    final_save_h: float = 0.0
    """The save that ends the work; until it is done the last segment can be lost."""

    @property
    def full_segments(self) -> int:
        """Segments that end in a checkpoint: all but the last, which may be shorter."""
        if self.interval_h is None or self.interval_h >= self.work_h:
            return 0
        return max(math.ceil(self.work_h / self.interval_h - 1e-9) - 1, 0)

    @property
    def last_h(self) -> float:
        """Work of the last segment."""
        return self.work_h - self.full_segments * (self.interval_h or 0.0)

    @property
    def uncut_h(self) -> float:
        """The job without an interruption, its checkpoints included."""
        saves_h = self.full_segments * self.save_h + self.final_save_h
        return self.startup_h + self.work_h + saves_h + self.tail_h


def rate_per_h(monthly: float) -> float:
    """Interruptions per hour of one machine from the share interrupted within a month: -ln(1-p)/730.

    Raises InputError for a share outside 0 (never) to below 1.
    """
    return -math.log1p(-checked_share("--interruption-rate-per-month", monthly)) / MONTH_H


def checked_share(flag: str, value: Any) -> float:
    """The share interrupted within a month as a number."""
    example = "0.15 for 15% interrupted within a month"
    return number_that(flag, value, lambda share: 0.0 <= share < 1.0, "a share from 0 to below 1", example)


def monthly_share(rate: float) -> float:
    """The share of machines interrupted within a month at `rate` per hour."""
    return -math.expm1(-rate * MONTH_H)


def stretch_h(length_h: float, restart_h: float, rate: float) -> float:
    """Expected hours of one stretch: (e^{λL} - 1)/λ · e^{λR}; L itself without interruptions."""
    if rate <= 0.0:
        return length_h
    if rate * (length_h + restart_h) > math.log(NEVER_H * max(rate, 1.0)):
        return NEVER_H
    return min(math.expm1(rate * length_h) / rate * math.exp(rate * restart_h), NEVER_H)


def expected_h(job: Stretches, rate: float) -> float:
    """Expected hours that a machine is held, from the request to the end of the job.

    The start-up restarts from its own beginning (R = 0 beyond itself), every other stretch by `restart_h`.
    """
    full = (job.interval_h or 0.0) + job.save_h
    return (
        stretch_h(job.startup_h, 0.0, rate)
        + job.full_segments * stretch_h(full, job.restart_h, rate)
        + stretch_h(job.last_h + job.final_save_h, job.restart_h, rate)
        + stretch_h(job.tail_h, job.restart_h, rate)
    )


def expected_interruptions(job: Stretches, rate: float) -> float:
    """Expected number of cuts: the rate times the hours held."""
    return rate * expected_h(job, rate)


def daly_h(save_h: float, rate: float) -> float:
    """Daly's interval, third order: sqrt(2δM)(1 + (δ/2M)^½/3 + (δ/2M)/9) - δ with M = 1/λ; M from δ = 2M on."""
    mean_h = 1.0 / rate
    if save_h >= 2.0 * mean_h:
        return mean_h
    ratio = save_h / (2.0 * mean_h)
    return math.sqrt(2.0 * save_h * mean_h) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_h


def proposed_interval_h(job: Stretches, rate: float) -> float | None:
    """Daly's interval, evened out over the work; None when one segment is best or nothing is interrupted."""
    if rate <= 0.0 or job.work_h <= 0.0:
        return None
    if job.save_h <= 0.0:
        raise InputError("--checkpoint-interval-min auto needs a save that takes time; give the interval in minutes.")
    segments = round(job.work_h / daly_h(job.save_h, rate))
    return job.work_h / segments if segments > 1 else None


def with_proposed(job: Stretches, rate: float) -> Stretches:
    """The job with the proposed interval between checkpoints."""
    return replace(job, interval_h=proposed_interval_h(job, rate))


def break_even_rate(job: Stretches, spot_usd_per_h: float, on_demand_usd: float, *, propose: bool) -> float | None:
    """Interruptions per hour from which the expected spot cost exceeds `on_demand_usd`; None when it always does.

    The expected cost rises with the rate, so the point is found by bisection; `propose` takes the proposed
    interval at every rate.
    """

    def costs_more(rate: float) -> bool:
        taken = with_proposed(job, rate) if propose else job
        return spot_usd_per_h * expected_h(taken, rate) > on_demand_usd

    if job.uncut_h <= 0.0 or costs_more(0.0):
        return None
    low, high = 0.0, 1.0 / MONTH_H
    while not costs_more(high):
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if costs_more(middle) else (middle, high)
    return low
