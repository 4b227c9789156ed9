"""What a calibration of one GPU at a time cannot know of a job of several: how much its sharding slows the work.

Published runs tell it, as effects of a sharding on all work and as the launches that a module's visit by ZeRO-3's hooks
costs (`priors`); they are the software's, so a record of any card takes them over, each with a note. Nor has it
measured links: equal collectives take unlike times from source to source, and its intervals allow for that; what of
them a step is longer for, beside its work, published runs say, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.exposed import SHARES
from tunecast.model.factors import Factor, FactorSet, with_doubt
from tunecast.model.hooks import has_hooks, wraps_adapters
from tunecast.model.prior_effects import sharding_effects
from tunecast.model.priors import HOOKS, UNITS
from tunecast.model.run import Run
from tunecast.model.value import Z80

SLOWED = ("gemm", "attention", "memory", "dequant", "loss", "optimizer")
"""Kinds of work whose measured seconds a sharding's effect multiplies; kernels in the cache follow memory's."""
LINK = "scale.link"
TOLD_FROM = 0.005
"""Share of time below which an effect is not told."""


def with_sharding(own: FactorSet, prior: FactorSet, run: Run | None, priors: Mapping[str, Any]) -> FactorSet:
    """A record's factors for a job of several GPUs: work slowed as published runs of its sharding are, with the spread
    that they leave, and the hooks of ZeRO-3, whose cost in launches may differ by as much as hosts do; unchanged for
    one GPU."""
    if run is None or run.num_gpus == 1:
        return own
    slower, log_sd = sharding_effect(run.sharding, priors)
    factors = dict(own.factors)
    for name in (f"scale.{kind}" for kind in SLOWED):
        if name in factors:
            factors[name] = slowed_as_published(factors[name], slower, run.sharding)
    told = [f"{words} under {run.sharding}" for words in slower_words("work", slower)]
    visited = {HOOKS: (has_hooks(run), "hooks around its modules"), UNITS: (wraps_adapters(run), "its adapters' units")}
    for name, (visits, words) in visited.items():
        if visits and name in prior.factors:
            wide = math.exp(Z80 * float(priors["spreads"]["host"]))
            cost = prior.factors[name]
            factors[name] = replace(cost, low=cost.low / wide, high=cost.high * wide)
            told.append(f"{words} cost the host time")
    notes = (f"not measured by this record, so as published runs say: {', and '.join(told)}",) if told else ()
    sharded = replace(own, factors=factors, step_log_sd=math.hypot(own.step_log_sd, log_sd), notes=(*own.notes, *notes))
    return with_exposed(with_doubtful_links(sharded, priors), prior)


def slowed_as_published(measured: Factor, slower: float, of: str) -> Factor:
    """A record's factor for what published runs of another sharding or software say, by a log of time."""
    return measured.times(math.exp(slower), origin=f"{measured.origin}, {of} as published")


def slower_words(what: str, slower: float) -> list[str]:
    """That something takes more or less time, by a log of it, where that is worth telling; else nothing."""
    if abs(math.expm1(slower)) < TOLD_FROM:
        return []
    return [f"{what} takes {abs(math.expm1(slower)):.0%} {'more' if slower > 0.0 else 'less'} time"]


def with_doubtful_links(own: FactorSet, priors: Mapping[str, Any]) -> FactorSet:
    """A record's factors with what sources of published runs differ by in the time of equal collectives, where it has
    measured none."""
    if LINK in own.step_params or "link_bytes_per_s" in own.factors:
        return own
    return with_doubt(own, LINK, (float(priors["width"]) * float(priors["spreads"]["source.link"])) ** 2)


def with_exposed(own: FactorSet, prior: FactorSet) -> FactorSet:
    """A record's factors with the shares of communication that a step is longer for (`exposed`), as published runs say
    and as unsure."""
    for name in SHARES:
        if name in own.factors or name not in prior.factors:
            continue
        place = prior.step_params.index(name)
        added = replace(own, factors={**own.factors, name: prior.factors[name]})
        own = with_doubt(added, name, prior.step_covariance[place][place])
    return own


def sharding_effect(sharding: str, priors: Mapping[str, Any]) -> tuple[float, float]:
    """Log of time by which a sharding slows work, and the spread of that; 0 and the spread of all for one without
    published runs."""
    found, names = sharding_effects(sharding, priors), priors["covariance"]["names"]
    places = [names.index(effect.name) for effect in found if effect.name is not None]
    known = sum(priors["covariance"]["values"][place][place] for place in places) * float(priors["width"]) ** 2
    return sum(effect.value for effect in found), math.sqrt(known + sum(effect.log_sd**2 for effect in found))
