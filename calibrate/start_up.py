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
START_PART = "start_up"
"""Name of the part of a step."""
_NUMBER = r"(?<![\w.,/–-])(?P<steps>[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d*) (?:(?:optimi[sz]er|training) )?steps?"
_START = r"(?:start[ -]?up|warm[ -]?up|first step|compilation|compiling)"
STATED = re.compile(
    rf"{_NUMBER}(?:,? (?:includ(?:ing|es?|ed)|incl\.?) (?:(?:the|its|their) )?{_START}"
    rf"| \((?:the )?first step includes? {_START})",
    re.I,
)
WITHOUT = re.compile(r"\b(?:last|final|median|steady|exclud\w*|discard\w*|skip\w*)\b", re.I)
"""A word that says that a mean, though of many steps that were run, is not over the first."""
SCHEDULE = re.compile(r"\b(?:lr|learning|schedul\w*|cosine|linear|constant)\b", re.I)
"""A word that makes of a warm-up the learning rate's."""
OVERHEAD = "step_overhead_s"


def start_up_share(notes: str) -> float:
    """The part of a start that is in every step of a mean; 0 where the notes speak of none."""
    for sentence in re.split(r"(?<!incl)[.;]\s", notes):
        stated = STATED.search(sentence)
        if stated and not WITHOUT.search(notes) and not SCHEDULE.search(sentence):
            return 1.0 / int(stated["steps"].replace(",", ""))
    return 0.0


def with_start_up(factors: FactorSet, share: float, priors: Mapping[str, Any]) -> FactorSet:
    """The factors with a part of the start in every step, beside what a step has of its own."""
    if not share:
        return factors
    stored = priors[START_UP]
    own = factors.factors.get(OVERHEAD)
    part = share * float(stored["value"]) + (own.value if own else 0.0)
    return replace(factors, factors={**factors.factors, OVERHEAD: exact_factor(part, "s", str(stored["origin"]))})


def as_sure(step: StepTime, share: float, priors: Mapping[str, Any]) -> StepTime:
    """The step with its part of the start named, and as unsure as that makes it.

    Seconds that rows of some sources told are those of their machines and programs: others' starts spread about them
    as starts are believed to.
    """
    if not share:
        return step
    stored = priors[START_UP]
    spread = math.log(stored["high"] / stored["low"]) / (2.0 * Z80)
    if stored["origin"] != "assumed":
        spread = math.hypot(spread, float(priors["beliefs"][START_UP]["log_sd"]))
    part_s = share * float(stored["value"])
    parts_s = {**step.parts_s, "overhead": max(step.parts_s["overhead"] - part_s, 0.0), START_PART: part_s}
    unsure = step.spread_to(math.hypot(step.log_sd, part_s / step.step_time_s.value * spread))
    return replace(unsure, parts_s=parts_s)
