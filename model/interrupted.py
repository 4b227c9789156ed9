"""A whole run on an interruptible machine: its stretches, the interval between checkpoints, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunecast.model.interruptions import (
    Stretches,
    break_even_rate,
    expected_h,
    monthly_share,
    rate_per_h,
    with_proposed,
)
from tunecast.model.phase import Phase, Work
from tunecast.model.phase_rates import Rates
from tunecast.model.phases import full_runs, one_save_h, saves_asked
from tunecast.model.terms import Cuts, Terms
from tunecast.model.units import HOUR_S, MINUTE_S
from tunecast.model.value import Value, total
from tunecast.model.whole_run_options import AUTO, WholeRunOptions

PER_START = ("load", "compile")
"""Phases that every trial and repeat begins with, a restart with one of."""
BEFORE = ("start", "setup", "download", "prepare", "load", "compile")
USEFUL = ("train", "evaluate", "checkpoints")
FINAL_SAVE = "save"
DRAWS = 10_000
"""Draws of the simulation that a forecast shows."""
NO_RATE_PER_H = 1e-9
"""A break-even below this is none: both prices are the same."""
MOST_CUTS = 1000.0
"""Expected cuts above which a distribution is not simulated: the answer is not to run it so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """What interruptions make of a run."""

    cuts: Cuts
    machines: int
    rate_per_h: float
    """Of the whole job: an interruption of any machine stops it."""
    job: Stretches
    proposed: bool
    """Whether Daly's formula chose the interval."""
    expected_h: Value
    """Expected hours held; ends are at the ends of the phases and of the rate."""
    bare_h: Value
    """The same phases without interruptions and without checkpoints against them."""
    asked_saves_h: float
    """The checkpoints that ``save_steps`` asks for, which on demand are made as well; none where minutes say how often
    they are written, since both prices are of the same run."""
    usd_per_h: float
    on_demand_usd_per_h: float | None

    @property
    def added_h(self) -> Value:
        """What cuts, repeated work and checkpoints add to the phases."""
        held, bare = self.expected_h, self.bare_h
        low, more, high = held.low - bare.low, held.value - bare.value, held.high - bare.high
        return Value(value=more, low=min(low, more), high=max(high, more))

    @property
    def expected_interruptions(self) -> float:
        """Expected number of cuts."""
        return self.rate_per_h * self.expected_h.value

    @property
    def interval_min(self) -> float | None:
        """Minutes of work between checkpoints."""
        return None if self.job.interval_h is None else self.job.interval_h * HOUR_S / MINUTE_S

    @property
    def how(self) -> str:
        """The interval and the expected cuts, in words."""
        every = "no checkpoints" if self.interval_min is None else f"a checkpoint every {self.interval_min:.3g} min"
        return f"{every}, {self.expected_interruptions:.2g} interruptions expected"

    @property
    def on_demand_usd(self) -> float | None:
        """The same run on demand, without checkpoints but those asked for by steps."""
        rate = self.on_demand_usd_per_h
        return None if rate is None else rate * (self.bare_h.value + self.asked_saves_h)

    def break_even_per_h(self) -> float | None:
        """Interruptions of one machine per hour from which on-demand is cheaper; None: it always is, or is unknown."""
        if self.on_demand_usd is None or self.usd_per_h <= 0.0:
            return None
        job_rate = break_even_rate(self.job, self.usd_per_h, self.on_demand_usd, propose=self.proposed)
        return None if job_rate is None or job_rate < NO_RATE_PER_H else job_rate / self.machines

    def break_even_usd_per_h(self) -> float | None:
        """Spot price of the whole job per hour from which on-demand is cheaper at this rate."""
        return None if self.on_demand_usd is None else self.on_demand_usd / self.expected_h.value

    def percentiles_h(self, seed: int) -> tuple[float, float, float] | None:
        """10th, 50th and 90th percentile of the hours held, by simulation; None when it would practically never end."""
        from tunecast.model.interruption_simulation import simulate

        if not self.expected_interruptions < MOST_CUTS:
            return None
        job = self.job
        played = simulate(
            startup_h=job.startup_h,
            work_h=job.work_h,
            save_h=job.save_h,
            final_save_h=job.final_save_h,
            tail_h=job.tail_h,
            restart_h=job.restart_h,
            interval_h=job.interval_h,
            cuts_per_h=self.rate_per_h,
            draws=DRAWS,
            seed=seed,
        )
        return played.percentiles_h()


def interrupted(here: Sequence[Phase], work: Work, rates: Rates, options: WholeRunOptions, terms: Terms) -> Interrupted:
    """The expectation for the phases on the interruptible machine."""
    cuts = terms.cuts
    assert cuts is not None
    save = one_save_h(work, rates)
    sums = {name: total(p.hours for p in here if p.name in names) for name, names in (("b", BEFORE), ("w", USEFUL))}
    sums["r"] = total(
        p.hours.scaled(1.0 / options.starts if p.name in PER_START and p.name not in options.phase_min else 1.0)
        for p in here
        if p.name in BEFORE
    )
    sums["s"] = total(p.hours for p in here if p.name == FINAL_SAVE)
    sums["t"] = total(p.hours for p in here if p.name not in (*BEFORE, *USEFUL, FINAL_SAVE))
    rate = rate_per_h(cuts.monthly.value) * terms.machines
    job = _stretches("value", sums, save, options)
    interval_h, proposed = _interval(job, rate, work, options, sums["w"].value)
    job = replace(job, interval_h=interval_h)
    jobs = {end: replace(_stretches(end, sums, save, options), interval_h=interval_h) for end in ("low", "high")}
    low, high = (expected_h(jobs[end], rate_per_h(getattr(cuts.monthly, end)) * terms.machines) for end in jobs)
    bare = {end: _bare_h(found) for end, found in {**jobs, "value": job}.items()}
    return Interrupted(
        cuts=cuts,
        machines=terms.machines,
        rate_per_h=rate,
        job=job,
        proposed=proposed,
        expected_h=Value(value=expected_h(job, rate), low=low, high=high),
        bare_h=Value(**bare),
        asked_saves_h=saves_asked(work, options) * save.value if options.checkpoint_interval_min is None else 0.0,
        usd_per_h=terms.usd_per_h,
        on_demand_usd_per_h=terms.on_demand_usd_per_h,
    )


def _bare_h(job: Stretches) -> float:
    return job.startup_h + job.work_h + job.final_save_h + job.tail_h


def _stretches(end: str, sums: dict[str, Value], save: Value, options: WholeRunOptions) -> Stretches:
    startup = getattr(sums["b"], end)
    restart = getattr(sums["r"], end) if options.restart_min is None else options.restart_min * MINUTE_S / HOUR_S
    return Stretches(
        startup_h=startup,
        work_h=getattr(sums["w"], end),
        save_h=getattr(save, end),
        final_save_h=getattr(sums["s"], end),
        tail_h=getattr(sums["t"], end),
        restart_h=restart,
        interval_h=None,
    )


def _interval(
    job: Stretches, rate: float, work: Work, options: WholeRunOptions, useful_h: float
) -> tuple[float | None, bool]:
    """(hours of work between checkpoints, whether they were proposed): the user's, ``save_steps``, else proposed."""
    asked = options.checkpoint_interval_min
    if asked == "none":
        return None, False
    if asked is not None and asked != AUTO:
        return float(asked) * MINUTE_S / HOUR_S, False
    if asked is None and options.save_steps is not None:
        return useful_h / (work.steps * full_runs(options)) * options.save_steps, False
    return with_proposed(job, rate).interval_h, True


def interrupted_to_dict(found: Interrupted, *, seed: int) -> dict[str, Any]:
    """The JSON of a forecast's interruptions; a share beyond floating point is null."""
    percentiles = found.percentiles_h(seed)
    return {
        "monthly": found.cuts.monthly.as_dict(),
        "origin": found.cuts.origin,
        "source": found.cuts.source,
        "machines": found.machines,
        "rate_per_h": found.rate_per_h,
        "checkpoint_interval_min": found.interval_min,
        "checkpoint_interval_proposed": found.proposed,
        "save_s": found.job.save_h * HOUR_S,
        "restart_min": found.job.restart_h * HOUR_S / MINUTE_S,
        "expected_time_h": _finite(found.expected_h.value),
        "expected_interruptions": _finite(found.expected_interruptions),
        "uninterrupted_time_h": found.job.uncut_h,
        "percentiles_h": None if percentiles is None else dict(zip(("p10", "p50", "p90"), percentiles, strict=True)),
        "seed": seed,
        "on_demand_usd": found.on_demand_usd,
        "break_even_rate_per_h": found.break_even_per_h(),
        "break_even_per_month": _monthly(found.break_even_per_h()),
        "break_even_usd_per_h": _finite(found.break_even_usd_per_h()),
    }


def _monthly(rate: float | None) -> float | None:
    return None if rate is None else monthly_share(rate)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
