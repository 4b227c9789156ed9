"""Whether a run fits a card: its memory in the card's views, the probability and the verdict."""

from __future__ import annotations

import math

from tunecast.model.architecture import Architecture
from tunecast.model.factors import FactorSet
from tunecast.model.forecast import MemoryView
from tunecast.model.overheads import overheads_from_factors
from tunecast.model.run import Run
from tunecast.model.step_source import StepSource, timeline_of
from tunecast.model.target import Target
from tunecast.model.value import Z80, Value, lognormal

TIGHT_BELOW = 0.9
"""A run that fits with less than this probability is called tight."""


def memory_view(
    architecture: Architecture, run: Run, target: Target, factors: FactorSet, source: StepSource | None = None
) -> MemoryView:
    """Peak memory of one GPU in the device's views."""
    overheads = overheads_from_factors(factors)
    timeline = timeline_of(architecture, run, overheads, platform=target.platform, source=source)
    log_sd = factors.memory_overhead_bytes.get("allocated_log_sd", 0.0)
    return MemoryView(
        allocated_bytes=lognormal(timeline.allocated_bytes, log_sd),
        reserved_bytes=None if target.platform == "cpu" else widened(timeline.reserved_bytes, log_sd),
        process_bytes=widened(timeline.process_bytes, log_sd),
        usable_bytes=target.usable_bytes,
        peak_moment=timeline.peak_moment,
        parts_bytes={name: float(n_bytes) for name, n_bytes in timeline.parts_bytes.items()},
    )


def widened(value: Value | None, log_sd: float) -> Value | None:
    """The interval joined with an independent log-normal error of `log_sd`."""
    if value is None:
        return None
    below, above = (Z80 * log_sd, math.log(value.value / value.low)), (Z80 * log_sd, math.log(value.high / value.value))
    return Value(
        value=value.value,
        low=value.value / math.exp(math.hypot(*below)),
        high=value.value * math.exp(math.hypot(*above)),
    )


def fit_probability(view: MemoryView) -> float | None:
    """Probability that the process stays within the usable memory, by its interval taken as log-normal."""
    process = view.process_bytes
    if process is None or view.usable_bytes is None:
        return None
    room = math.log(view.usable_bytes / process.value)
    log_sd = math.log(process.high / process.value) / Z80
    if log_sd <= 0:
        return 1.0 if room >= 0 else 0.0
    return 0.5 * (1.0 + math.erf(room / log_sd / math.sqrt(2.0)))


def fit_verdict(view: MemoryView, probability: float | None) -> str | None:
    """``no`` when the process's value exceeds the usable memory, ``tight`` when it may, else ``fits``."""
    if probability is None or view.process_bytes is None or view.usable_bytes is None:
        return None
    if view.process_bytes.value > view.usable_bytes:
        return "no"
    return "fits" if probability >= TIGHT_BELOW else "tight"
