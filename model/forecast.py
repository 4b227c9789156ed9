"""The answer: one type behind the Python API, the command line and ``--json``.

A `Measurement` is a `Forecast` whose origins say ``measured``, so the two subtract. Memory is per
GPU; step time and tokens per second are of the whole job; tokens count padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tunecast.model.architecture import Architecture
from tunecast.model.parallel_scaling import Scaling
from tunecast.model.run import Run
from tunecast.model.training_totals import TrainingTotals
from tunecast.model.value import Value
from tunecast.model.whole_run import WholeRun

FORECAST_SCHEMA = "tunecast.forecast/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Peak memory of one GPU in bytes, by view; None where the device has no such view."""

    allocated_bytes: Value
    reserved_bytes: Value | None
    process_bytes: Value | None
    usable_bytes: float | None
    """What the card exposes to the process; None when unknown, and then `fits` is None."""
    peak_moment: str
    parts_bytes: dict[str, float]
    """Parts of `allocated_bytes` at the peak; they sum to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One run on one kind of GPU."""

    model: str
    gpu: str
    architecture: Architecture
    run: Run
    run_origins: dict[str, str]
    """Origin of every run field: ``cli``, ``file``, ``stack-default``, ``assumed`` or ``searched``."""
    fits: bool | None
    fit_probability: float | None
    verdict: str | None
    """``fits``, ``tight`` or ``no``; None when the card's usable memory is unknown."""
    model_flops_per_step: float
    executed_flops_per_step: float
    trainable_params: int
    total_params: int
    memory: MemoryView
    step_time_s: Value
    tokens_per_s: Value
    mfu: float | None
    """Required work over the dense peak; None when the peak is unknown."""
    hfu: float | None
    bound_by: str
    time_parts_s: dict[str, float]
    phases_h: dict[str, float] = field(default_factory=dict)
    total_time_h: Value | None = None
    """None when no amount of data was given."""
    cost_usd: Value | None = None
    cost_per_million_tokens_usd: Value | None = None
    offer: dict[str, Any] | None = None
    origins: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alike_share: float = 1.0
    """Time of a step over this one if samples that may be all alike are (`timing.share_without_padding`)."""
    amount_assumed: tuple[str, ...] = ()
    """What nobody said of the data, in words."""
    scaling: Scaling | None = None
    """How well several GPUs scale; None for one, or when the user gave the speed."""
    totals: TrainingTotals | None = None
    """FLOPs, GPU-hours and days of the training; None when no amount of data was given."""
    whole_run: WholeRun | None = None
    """Every phase with rate and origin, and what the cost is made of; None when no amount of data was given."""
