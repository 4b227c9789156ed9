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
from tunecast.model.workspaces import workspace_bytes

TIGHT_BELOW = 0.9
"""A run that fits with less than this probability is called tight."""
LIKELY = 0.5
"""A way to share the work that is chosen for the user fits with at least this probability."""


def chance_said(chance: float, bar: float = TIGHT_BELOW) -> str:
    """A probability to fit in percent, rounded down where it would round up to a bar that it fails."""
    return f"{math.floor(100.0 * chance)}%" if chance < bar <= round(chance, 2) else f"{chance:.0%}"


def memory_view(
    architecture: Architecture, run: Run, target: Target, factors: FactorSet, source: StepSource | None = None
) -> MemoryView:
    """Peak memory of one GPU in the device's views."""
    overheads = overheads_from_factors(factors)
    timeline = timeline_of(
        architecture,
        run,
        overheads,
        platform=target.platform,
        source=source,
        workspace_bytes=workspace_bytes(target.compute_capability),
    )
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


def least_process_bytes(view: MemoryView) -> float | None:
    """The process without what the allocator only caches: it gives unused blocks back before it fails."""
    if view.process_bytes is None:
        return None
    cached = 0.0 if view.reserved_bytes is None else view.reserved_bytes.value - view.allocated_bytes.value
    return view.process_bytes.value - cached


def fit_probability(view: MemoryView) -> float | None:
    """Probability that what the run needs stays within the usable memory, its error taken as log-normal.

    Cached blocks that are in use in part cannot be given back, so the need lies between `least_process_bytes` and
    the forecast process. Assumed: its median is the geometric mean of both, and they are its 80% interval, beside
    that of the process itself.
    """
    process, least = view.process_bytes, least_process_bytes(view)
    if process is None or least is None or view.usable_bytes is None:
        return None
    elastic = math.log(process.value / least)
    room = math.log(view.usable_bytes / process.value) + elastic / 2.0
    log_sd = math.hypot(math.log(process.high / process.value), elastic / 2.0) / Z80
    if log_sd <= 0:
        return 1.0 if room >= 0 else 0.0
    return 0.5 * (1.0 + math.erf(room / log_sd / math.sqrt(2.0)))


def fit_verdict(view: MemoryView, probability: float | None) -> str | None:
    """``no`` when even without cached blocks the process exceeds the usable memory, ``tight`` when it may."""
    least = least_process_bytes(view)
    if probability is None or least is None or view.usable_bytes is None:
        return None
    if least > view.usable_bytes:
        return "no"
    return "fits" if probability >= TIGHT_BELOW else "tight"
