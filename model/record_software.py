"""What a calibration cannot know of other software than it ran: how much that slows each kind of work.

A calibration runs transformers' models with PEFT. Published runs tell by how much other stacks are slower or faster
than these (`prior_effects`), and how unsure that is; a record of any card takes both over, with a note. One whose code
is the same (TRL, LLaMA-Factory, ...) is as it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.factors import FactorSet
from tunecast.model.memory_codes import effects_stack
from tunecast.model.prior_effects import STACK_KINDS, effect_of
from tunecast.model.run import Run
from tunecast.model.sharded_record import slowed_as_published, slower_words
from tunecast.model.stacks import PLAIN

MEASURED = PLAIN
"""The stack of a calibration's steps."""


def with_software(own: FactorSet, run: Run | None, priors: Mapping[str, Any]) -> FactorSet:
    """A record's factors for a run of other software; unchanged for one whose code the record ran."""
    if run is None or effects_stack(run.stack, priors) == MEASURED:
        return own
    factors, covariance = dict(own.factors), [list(row) for row in own.step_covariance]
    beside = 0.0
    told: list[str] = []
    for kind in STACK_KINDS:
        name = f"scale.{kind}"
        if name not in factors:
            continue
        slower, log_sd = against_measured(kind, run.stack, priors)
        factors[name] = slowed_as_published(factors[name], slower, run.stack)
        if name in own.step_params:
            place = own.step_params.index(name)
            covariance[place][place] += log_sd**2
        else:
            beside = math.hypot(beside, log_sd)
        told += slower_words(kind, slower)
    what = ", ".join(told) or "no kind of work takes more or less time, as far as they tell"
    note = f"not measured by this record, so as published runs say of {run.stack}: {what}; the interval allows for more"
    return replace(
        own,
        factors=factors,
        step_covariance=tuple(map(tuple, covariance)),
        step_log_sd=math.hypot(own.step_log_sd, beside),
        notes=(*own.notes, note),
    )


def against_measured(kind: str, stack: str, priors: Mapping[str, Any]) -> tuple[float, float]:
    """(log of time by which a kind of work is slower than in a calibration, its standard deviation): as published rows
    of both stacks say, together; of one that no row has, the spread of all."""
    names, values = priors["covariance"]["names"], priors["covariance"]["values"]
    other = effect_of(f"stack.{kind}", effects_stack(stack, priors), priors, (kind,), scaled=True)
    ours = effect_of(f"stack.{kind}", MEASURED, priors, (kind,), scaled=True)
    places = {effect.name: sign for effect, sign in ((other, 1.0), (ours, -1.0)) if effect.name is not None}
    variance = sum(
        one * two * values[names.index(left)][names.index(right)]
        for left, one in places.items()
        for right, two in places.items()
    )
    unknown = sum(effect.log_sd**2 for effect in (other, ours))
    return other.value - ours.value, float(priors["width"]) * math.sqrt(max(variance, 0.0) + unknown)
