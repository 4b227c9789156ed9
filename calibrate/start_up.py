"""Published speeds over few steps that include the start of the training.

The first step compiles kernels, loads libraries and fills the allocator, and processes meet: seconds that a mean over
100 steps still shows. Only where a row's notes say so are they added to its forecast, as a part of every step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.factors import FactorSet
from tunecast.model.priors import exact_factor
from tunecast.model.time import StepTime
from tunecast.model.value import Z80

START_UP = "start_up_s"
"""Name of the seconds among the priors."""
STATED = re.compile(r"\b([1-9]\d*) steps,? includ(?:ing|es?|ed) (?:the )?(?:start-?up|warm-?up|first step)", re.I)
OVERHEAD = "step_overhead_s"


def start_up_share(notes: str) -> float:
    """The part of a start that is in every step of a mean; 0 where the notes speak of none."""
    stated = STATED.search(notes)
    return 1.0 / int(stated[1]) if stated else 0.0


def with_start_up(factors: FactorSet, share: float, priors: Mapping[str, Any]) -> FactorSet:
    """The factors with a part of the start in every step."""
    if not share:
        return factors
    stored = priors[START_UP]
    part = exact_factor(share * float(stored["value"]), "s", str(stored["origin"]))
    return replace(factors, factors={**factors.factors, OVERHEAD: part})


def as_sure(step: StepTime, share: float, priors: Mapping[str, Any]) -> StepTime:
    """The step as unsure as its part of the start makes it."""
    if not share:
        return step
    stored = priors[START_UP]
    spread = math.log(stored["high"] / stored["low"]) / (2.0 * Z80)
    part = share * float(stored["value"]) / step.step_time_s.value
    return step.spread_to(math.hypot(step.log_sd, part * spread))
