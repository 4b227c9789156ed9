"""The answer to "what do I rent?": the cheapest, the fastest and the balanced plan, the front, and why others lost.

Definitions: of all candidates (`market.survey`) that keep the limits, the front holds those that no other beats in
both money and time; cheapest and fastest are its ends, the balance is its knee (`front.knee`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.price_book import book_of
from tunecast.model.cost import Price, cost_per_million_tokens_usd
from tunecast.model.estimate import forecast
from tunecast.model.fits import LIKELY
from tunecast.model.forecast import Forecast
from tunecast.model.front import beats, knee, pareto
from tunecast.model.largest import chance_to_fit
from tunecast.model.market import Candidate, Limits, Market, Rejected, Search, forward_frac, prices_for, whole_of
from tunecast.model.money import notes_of_offer, whole_notes
from tunecast.model.parallel_network import gpus_per_machine, part_of_network, without_bridge
from tunecast.model.question import Question
from tunecast.model.rows import held_run
from tunecast.model.units import HOUR_S, MINUTE_S

HALF_A_MINUTE_H = 0.5 * MINUTE_S / HOUR_S
"""What two plans may differ in and be told to be as fast."""
LEAST_IN_CENTS = 0.01
"""US dollars below which an amount needs more digits than cents."""
UNSURE_ASKED = 4
"""Plans that may not fit of which the surest is told."""
WORTH = 0.01
"""Share of time that a dearer plan has to save, and share of either that makes a relaxed limit worth telling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What one limit keeps away, and from which value on it would not."""

    limit: str
    """As typed."""
    now: str
    needed: str
    buys: str
    candidate: Candidate
    effort: float
    """How far the limit has to move, as a ratio above 1 (or by how much a probability)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is chosen from a market."""

    front: tuple[Candidate, ...]
    """Cheapest first; empty when nothing keeps the limits."""
    rejected: tuple[Rejected, ...]
    """One entry for every card that is not on the front."""
    relaxations: tuple[Relaxation, ...]
    """The least effort first: the first one binds hardest."""

    @property
    def cheapest(self) -> Candidate:
        """One end of the front."""
        return self.front[0]

    @property
    def fastest(self) -> Candidate:
        """The other end."""
        return self.front[-1]

    @property
    def balance(self) -> Candidate:
        """The knee."""
        return knee(self.front)


def choose(search: Search, market: Market, limits: Limits) -> Choice:
    """The front of what keeps the limits, and everything else with its reason."""
    kept = [c for c in market.candidates if in_budget(c, limits) and in_time(c, limits)]
    front = tuple(pareto(kept, worth=WORTH))
    return Choice(
        front=front,
        rejected=tuple(rejections(market, front, limits)),
        relaxations=tuple(sorted(relaxations(search, market, front, limits), key=lambda r: r.effort)),
    )


def in_budget(candidate: Candidate, limits: Limits) -> bool:
    """Whether the whole run costs no more than the budget."""
    return limits.budget_usd is None or candidate.usd <= limits.budget_usd


def in_time(candidate: Candidate, limits: Limits) -> bool:
    """Whether the whole run ends by the deadline."""
    return limits.deadline_h is None or candidate.time_h <= limits.deadline_h


def rejections(market: Market, front: Sequence[Candidate], limits: Limits) -> list[Rejected]:
    """Why each card is not on the front, by its own best plan; the nearest losers first."""
    chosen = {candidate.target.id for candidate in front}
    by_gpu: dict[str, list[Candidate]] = {}
    for candidate in market.candidates:
        if candidate.target.id not in chosen:
            by_gpu.setdefault(candidate.target.id, []).append(candidate)
    lost = [rejection(gpu, own, front, limits) for gpu, own in by_gpu.items()]
    lost.sort(key=lambda r: 0.0 if r.candidate is None else r.candidate.usd)
    return [*lost, *(market.without[gpu] for gpu in market.without if gpu not in chosen)]


def rejection(gpu: str, own: Sequence[Candidate], front: Sequence[Candidate], limits: Limits) -> Rejected:
    """Why one card lost: a limit that none of its plans keeps, else the plan of the front that beats its cheapest."""
    kept = [c for c in own if in_budget(c, limits) and in_time(c, limits)]
    cheapest, fastest = min(own, key=lambda c: (c.usd, c.time_h)), min(own, key=lambda c: (c.time_h, c.usd))
    if kept:
        best = min(kept, key=lambda c: (c.usd, c.time_h))
        winner = next(c for c in front if beats(c, best, worth=WORTH))
        saved, sooner = best.usd - winner.usd, best.time_h - winner.time_h
        detail = f"beaten by {named(winner)}: {margin(saved, sooner)}"
        return Rejected(gpu=gpu, reason="dominated", detail=detail, candidate=best)
    in_no_time = not any(in_time(c, limits) for c in own)
    past = f"{hours_over(fastest.time_h, limits.deadline_h or 0.0)} at best, past {hours(limits.deadline_h or 0.0)}"
    if not any(in_budget(c, limits) for c in own):
        quick = [c for c in own if in_time(c, limits)]
        told = min(quick, key=lambda c: (c.usd, c.time_h)) if quick else cheapest
        late = f", and {past}" if in_no_time else ""
        soon = " in time" if quick and limits.deadline_h is not None else ""
        detail = f"{dollars_over(told.usd, limits.budget_usd or 0.0)} at best{soon}, over {budget_words(limits)}{late}"
        return Rejected(gpu=gpu, reason="over budget", detail=detail, candidate=told)
    if in_no_time:
        return Rejected(gpu=gpu, reason="past deadline", detail=past, candidate=fastest)
    detail = f"${fastest.usd:,.2f} when fast enough, {hours(cheapest.time_h)} when cheap enough"
    return Rejected(gpu=gpu, reason="budget or deadline", detail=detail, candidate=cheapest)


def margin(saved_usd: float, sooner_h: float) -> str:
    """By how much a plan wins; what rounds to nothing is not told as a figure."""
    as_fast, as_dear = sooner_h < HALF_A_MINUTE_H, saved_usd < 0.005
    if as_fast and as_dear:
        return "as dear and as fast"
    if as_fast:
        return f"${saved_usd:,.2f} less, as fast"
    if as_dear:
        return f"{hours(sooner_h)} less, as dear"
    return f"${saved_usd:,.2f} and {hours(sooner_h)} less"


def relaxations(search: Search, market: Market, front: Sequence[Candidate], limits: Limits) -> list[Relaxation]:
    """For each limit alone: the least that it has to give for a plan that is cheaper or faster than any now."""
    unsure = _less_sure(search, market, front, limits)
    found = [_more_budget(market, front, limits), _more_time(market, front, limits), unsure]
    return [relaxation for relaxation in found if relaxation is not None]


def _more_budget(market: Market, front: Sequence[Candidate], limits: Limits) -> Relaxation | None:
    if limits.budget_usd is None:
        return None
    able = [c for c in market.candidates if in_time(c, limits) and not in_budget(c, limits) and _faster(c, front)]
    if not able:
        return None
    best = min(able, key=lambda c: (c.usd, c.time_h))
    return Relaxation(
        limit="--budget",
        now=budget_words(limits),
        needed=dollars_up(best.usd),
        buys=_gain(best, front),
        candidate=best,
        effort=best.usd / limits.budget_usd,
    )


def _more_time(market: Market, front: Sequence[Candidate], limits: Limits) -> Relaxation | None:
    if limits.deadline_h is None:
        return None
    able = [c for c in market.candidates if in_budget(c, limits) and not in_time(c, limits) and _cheaper(c, front)]
    if not able:
        return None
    best = min(able, key=lambda c: (c.time_h, c.usd))
    return Relaxation(
        limit="--deadline",
        now=hours(limits.deadline_h),
        needed=hours_over(best.time_h, limits.deadline_h),
        buys=_gain(best, front),
        candidate=best,
        effort=best.time_h / limits.deadline_h,
    )


def _less_sure(search: Search, market: Market, front: Sequence[Candidate], limits: Limits) -> Relaxation | None:
    """The surest of the fastest plans that are not sure enough, as sure as its own forecast says: the screen, which
    replays no allocations, can be less sure. Where other plans are left, none that rather fails than fits."""
    able = [
        c
        for c in market.unsure
        if in_budget(c, limits) and in_time(c, limits) and (_cheaper(c, front) or _faster(c, front))
    ]
    if not able:
        return None
    able.sort(key=lambda c: (-c.fit_probability, c.usd))
    asked = [(_own_chance(search, each, limits), -each.usd, each) for each in able[:UNSURE_ASKED]]
    chance, _, best = max(asked, key=lambda found: found[:2])
    if front and chance < LIKELY:
        return None
    return Relaxation(
        limit="--min-fit-confidence",
        now=f"{100.0 * limits.min_fit_confidence:g}%",
        needed=f"{math.floor(1000.0 * chance) / 10.0:g}%",
        buys=_gain(best, front),
        candidate=replace(best, fit_probability=chance),
        effort=1.0 + limits.min_fit_confidence - chance,
    )


def _own_chance(search: Search, candidate: Candidate, limits: Limits) -> float:
    """The probability that its forecast gives, where that still is not enough; else the screen's."""
    run = held_run(candidate.plan.run, search.job.options)
    chance = chance_to_fit(search.job.architecture, run, candidate.target)
    return chance if chance < limits.min_fit_confidence else candidate.fit_probability


def more_gpus(market: Market, front: Sequence[Candidate], limits: Limits, most: int) -> Relaxation | None:
    """What `market`, surveyed with more GPUs than `most`, has that is faster than the front and keeps the limits."""
    able = [c for c in market.candidates if in_budget(c, limits) and in_time(c, limits) and _faster(c, front)]
    if not able:
        return None
    best = min(able, key=lambda c: (c.time_h, c.usd))
    return Relaxation(
        limit="--max-gpus",
        now=str(most),
        needed=str(best.num_gpus),
        buys=_gain(best, front),
        candidate=best,
        effort=best.num_gpus / most,
    )


def _faster(candidate: Candidate, front: Sequence[Candidate]) -> bool:
    return not front or candidate.time_h < (1.0 - WORTH) * front[-1].time_h


def _cheaper(candidate: Candidate, front: Sequence[Candidate]) -> bool:
    return not front or candidate.usd < (1.0 - WORTH) * front[0].usd


def _gain(candidate: Candidate, front: Sequence[Candidate]) -> str:
    """What the candidate does better than the best of today, in words."""
    here = f"{named(candidate)}: {hours(candidate.time_h)} for ${candidate.usd:,.2f}"
    if not front:
        return here
    gains = []
    if _cheaper(candidate, front):
        gains.append(f"${front[0].usd - candidate.usd:,.2f} less than the cheapest")
    if _faster(candidate, front):
        gains.append(f"{hours(front[-1].time_h - candidate.time_h)} less than the fastest")
    return f"{here}, {' and '.join(gains)}"


def named(candidate: Candidate) -> str:
    """The card and its number, with the method where that is a choice."""
    return f"{candidate.num_gpus} x {candidate.target.id}"


def dollars_up(usd: float) -> str:
    """A limit that an amount keeps: rounded up, so that it still does."""
    return f"${math.ceil(round(100.0 * usd, 6)) / 100.0:,.2f}"


def budget_words(limits: Limits) -> str:
    """The budget in words, with as many digits as an amount below a cent needs."""
    usd = limits.budget_usd or 0.0
    return f"${usd:,.2f}" if usd >= LEAST_IN_CENTS else f"${usd:.2g}"


def dollars_over(usd: float, limit_usd: float) -> str:
    """An amount above a limit, rounded up where it would round to what the limit does."""
    said = f"${usd:,.2f}"
    return said if said != f"${limit_usd:,.2f}" else dollars_up(usd)


def hours_over(value_h: float, limit_h: float) -> str:
    """A length above a limit in words, that by which it is above where both have the same."""
    said = hours(value_h)
    return said if said != hours(limit_h) else f"{HOUR_S / MINUTE_S * (value_h - limit_h):.2g} min more"


def hours(value_h: float) -> str:
    """A length in words: seconds below a minute, minutes below an hour, days from four on."""
    if value_h < MINUTE_S / HOUR_S:
        return f"{HOUR_S * value_h:.0f} s"
    if value_h < 1.0:
        return f"{60.0 * value_h:.0f} min"
    return f"{value_h:.1f} h" if value_h < 96.0 else f"{value_h / 24.0:.1f} days"


def full_forecast(question: Question, search: Search, candidate: Candidate) -> Forecast:
    """The candidate with intervals, origins and its whole run from its own offer."""
    chosen = [name for name in candidate.plan.options if name not in question.options]
    origins = {**question.option_origins, **dict.fromkeys(chosen, "searched")}
    if len(search.job.methods) == 1:
        origins["method"] = question.option_origins.get("method", "cli")
    options = {
        **without_bridge(candidate.plan.over(question.options), candidate.target.gpu),
        **joined_by(candidate, question.options),
    }
    if candidate.num_gpus <= gpus_per_machine(options):
        options.pop("internode_gbps", None)  # for the plans over several machines
    asked = replace(
        question,
        options=options,
        option_origins=origins,
        price_book=book_of(()),
    )
    result = forecast(asked, candidate.target)
    whole = whole_of(
        search,
        result.run,
        candidate.target,
        result.step_time_s,
        candidate.price,
        _on_demand(search, candidate),
        forward_frac=forward_frac(search, result.run, candidate.target),
        alike_share=result.alike_share,
    )
    network_given = question.options.get("internode_gbps") is not None
    told = notes_of_offer(result, candidate.price.offer, network_given=network_given)
    return replace(
        result,
        phases_h=whole.phases_h,
        total_time_h=whole.total_time_h,
        cost_usd=whole.cost_usd,
        offer=candidate.price.offer,
        whole_run=whole,
        cost_per_million_tokens_usd=cost_per_million_tokens_usd(result.tokens_per_s, candidate.price),
        notes=tuple(dict.fromkeys((*result.notes, *told, *whole_notes(whole, search.around)))),
    )


def joined_by(candidate: Candidate, options: Mapping[str, Any]) -> dict[str, Any]:
    """The network of the rented machines, where the provider states it, the job needs it and the user said nothing;
    of machines taken as smaller than they are, their part of it (as of `catalog_network`)."""
    offer, per_node = candidate.price.offer, gpus_per_machine(options)
    whole = offer.get("network_gbps")
    if whole is None or options.get("internode_gbps") is not None or candidate.num_gpus <= per_node:
        return {}
    own = part_of_network(whole, per_node, offer["gpus_paid"] / offer["instances"])
    return {"internode_gbps": own, "internode_of": f"{offer['provider']} {offer['instance_or_sku']}"}


def _on_demand(search: Search, candidate: Candidate) -> Price | None:
    """The cheapest price without interruptions, to compare an interruptible one with."""
    if candidate.kind != "spot":
        return None
    lasting = replace(search.limits, price_types=("on-demand",))
    found = prices_for(search, candidate.target, candidate.num_gpus, lasting)
    return min(found, key=lambda price: price.usd_per_h, default=None)
