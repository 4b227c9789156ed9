"""What a calibration has not measured of a run: attention written out in plain products."""

from __future__ import annotations

import math
from dataclasses import replace

from tunecast.model.factors import FactorSet
from tunecast.model.run import Run

EAGER = "eager"
EAGER_LOG_SD = 0.15
"""Doubt of a step whose attention is written out: its softmaxes over rows, and heads moved and repeated, are timed as
plain traffic, which no trial of a calibration proves. Assumed: on simulated cards such steps of gpt-oss, Gemma 2 and
Qwen2.5 took 6 to 32% longer than their records let expect."""
EAGER_NOTE = (
    "eager attention (softmaxes of rows, heads moved and repeated) is timed as plain memory traffic, which no trial of "
    "the calibration measures: the step may take longer than forecast, and the interval is wider for it"
)


def with_unmeasured(factors: FactorSet, run: Run | None) -> FactorSet:
    """A record's factors, wider and with a note for a run with work that it has not measured."""
    if run is None or run.attn_implementation != EAGER:
        return factors
    wider = math.hypot(factors.step_log_sd, EAGER_LOG_SD)
    return replace(factors, step_log_sd=wider, notes=(*factors.notes, EAGER_NOTE))
