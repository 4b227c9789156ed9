"""Every plan of a job on every card and offer, screened: the candidates for an answer, and why a card has none.

Step times and memory come from `engine.screen`; the whole run's time and money from `whole_run`, for the fastest
plan of each method and number of GPUs, from the cheapest offers of each purchase kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, pairwise

import numpy as np

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.price_book import PriceBook
from tunecast.catalogs.prices import PRICE_TYPES, JobOffer
from tunecast.model.amount import Amount, padded_by, resolve_amount
from tunecast.model.cost import Price, as_forecast, has_room, job_price, user_price, why_no_price
from tunecast.model.curves import Array
from tunecast.model.engine import Screen, screen
from tunecast.model.engine_memory import Flags
from tunecast.model.estimate import forecast
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.fits import TIGHT_BELOW, chance_said
from tunecast.model.grouped import check_experts
from tunecast.model.largest import chance_to_fit
from tunecast.model.on_device import check_kernels, job_factors, target_factors
from tunecast.model.parallel_network import without_bridge
from tunecast.model.parallel_offload import host_need_bytes
from tunecast.model.phase import Work
from tunecast.model.phase_rates import Rates, phase_rates
from tunecast.model.plans import Job, Plan, best_plans, plans_that_may_fit
from tunecast.model.question import STORED_AS, Question
from tunecast.model.replay import is_replayed
from tunecast.model.rows import held_run, own_run, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.run_work import forward_share, work_of
from tunecast.model.slowest_stage import timed_operations
from tunecast.model.target import Target
from tunecast.model.terms import rented
from tunecast.model.timing import linked_step
from tunecast.model.units import gib
from tunecast.model.value import Value, exact
from tunecast.model.whole_run import WholeRun, whole_run
from tunecast.model.whole_run_options import WholeRunOptions

ROOMY = 1.3
"""Usable memory over a screened process from which on a plan surely fits where the allocator is replayed: that process
was 9% short of the forecast at most (`engine_memory`), and 80% intervals end 16% above a forecast."""
MOST_ASKED = 6
"""Plans of one method on one card that the screen doubts and whose own forecast of memory is asked for, a tenth of a
second each."""
UNSURE_BANDS = (0.5, 0.8)
"""Probabilities to fit between which plans that are not sure enough are priced apart: the fastest of them all may be
the least sure, and a surer one be nearly as good."""
OFFERS_TRIED = 3
"""Offers of one card, purchase kind and number of GPUs whose whole run is computed, cheapest per hour first, where they
differ in little else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan has to keep."""

    budget_usd: float | None = None
    deadline_h: float | None = None
    min_fit_confidence: float = TIGHT_BELOW
    """Least probability that the run fits the card."""
    price_types: tuple[str, ...] = ("on-demand",)
    providers: tuple[str, ...] | None = None
    regions: tuple[str, ...] | None = None
    usd_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan on one card from one offer, screened."""

    plan: Plan
    target: Target
    price: Price
    time_h: float
    """The whole run, expected."""
    usd: float
    """The whole run, expected."""
    process_bytes: float
    fit_probability: float

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.plan.run.num_gpus

    @property
    def kind(self) -> str:
        """How it is bought."""
        return str(self.price.offer.get("price_type") or "on-demand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A card that is not in the answer, and why its best plan lost."""

    gpu: str
    reason: str
    detail: str
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is asked of every card."""

    job: Job
    limits: Limits
    book: PriceBook
    around: WholeRunOptions
    amount: Amount
    """Of every plan: all keep the batch. How sure the length of rows is
    differs with the micro-batch (`work_for`)."""
    gpus_fixed: bool = False
    """Whether the user said how many GPUs, and no other number is tried."""


@dataclass(slots=True, kw_only=True)
class Market:
    """Everything that was screened."""

    candidates: list[Candidate] = field(default_factory=list)
    unsure: list[Candidate] = field(default_factory=list)
    """Those that fit by value, but not with the confidence asked for."""
    without: dict[str, Rejected] = field(default_factory=dict)
    """Cards without any candidate."""
    plans: int = 0
    """Combinations of a plan and a card that were screened."""


def survey(search: Search, targets: Sequence[Target]) -> Market:
    """Screen every plan on every card that is sold; cards of different kinds (with and without bf16) run different
    plans."""
    market = Market()
    sold: dict[tuple[bool, bool], list[Target]] = {}
    for target in targets:
        if target.usable_bytes is None:
            market.without[target.id] = too_small(target, None, search)
        elif not any(prices_for(search, target, count) for count in search.job.counts):
            market.without[target.id] = not_sold(target, search.job.counts, search)
        elif (refused := not_built(target, search)) is not None:
            market.without[target.id] = refused
        else:
            sold.setdefault(search.job.kind_of_card(target), []).append(target)
    for _, alike in sorted(sold.items(), reverse=True):
        _survey_alike(market, search, alike)
    return market


def _survey_alike(market: Market, search: Search, targets: Sequence[Target]) -> None:
    known = [target.usable_bytes for target in targets if target.usable_bytes is not None]
    try:
        plans = plans_that_may_fit(search.job, targets[0], roomiest_bytes=max(known, default=0.0))
    except NotSupportedError as error:
        if targets[0].has_bf16:
            raise
        refused = {target.id: Rejected(gpu=target.id, reason="not built", detail=str(error)) for target in targets}
        market.without |= refused
        return
    if not plans:
        market.without |= {target.id: too_small(target, None, search) for target in targets}
        return
    runs = [plan.run for plan in plans]
    refused = {target.id: why for target in targets if (why := not_run(target, runs[0])) is not None}
    market.without |= refused
    targets = [target for target in targets if target.id not in refused]
    if not targets:
        return
    screened = screen(search.job.architecture, runs, targets, search.job.options)
    market.plans += len(plans) * len(targets)
    for device, target in enumerate(targets):
        _survey_card(market, search, plans, screened, device, target)


def _survey_card(
    market: Market, search: Search, plans: list[Plan], screened: Screen, device: int, target: Target
) -> None:
    fit = refined_fit(search, plans, screened, device, target)
    timed = ~np.isnan(screened.step_s[device])
    roomy = ~screened.too_large[device] & ~np.isnan(fit)
    if not roomy.any():
        market.without[target.id] = too_small(target, float(np.nanmin(screened.process_bytes[device])), search)
        return
    sure = roomy & timed & (fit >= search.limits.min_fit_confidence)
    found = list(priced(search, plans, screened, device, target, sure, fit))
    market.candidates += found
    for least, most in pairwise((0.0, *UNSURE_BANDS, search.limits.min_fit_confidence)):
        unsure = roomy & timed & ~sure & (fit >= least) & (fit < most)
        market.unsure += priced(search, plans, screened, device, target, unsure, fit)
    untimed = roomy & ~timed & (fit >= search.limits.min_fit_confidence)
    if untimed.any() and not sure.any():
        market.without[target.id] = not_timed(target, plans[int(np.flatnonzero(untimed)[0])], search)
    elif not found:
        counts = sorted({plans[row].run.num_gpus for row in map(int, np.flatnonzero(sure))})
        market.without[target.id] = not_bought(target, counts, float(fit[roomy].max()), search)


def refined_fit(search: Search, plans: list[Plan], screened: Screen, device: int, target: Target) -> Array:
    """(plans,) probabilities to fit: the screen's, but their own of plans for one GPU that would win and may be
    misjudged.

    The screen takes a share for what the allocator caches, where a forecast may replay it and know better, for or
    against the plan. Of each method the fastest plans are asked first, until one fits or has room for any error.
    """
    least, step_s = search.limits.min_fit_confidence, screened.step_s[device]
    fit = np.array(screened.fit_probability[device], dtype=float)
    terms = target_factors(target, plans[0].run).memory_overhead_bytes
    if target.usable_bytes is None or "replayed_frac" not in terms:
        return fit
    roomy = target.usable_bytes >= ROOMY * screened.process_bytes[device]
    may_fit = ~screened.too_large[device] & (screened.fit_probability_uncached[device] >= least)
    replayed = np.array([is_replayed(search.job.architecture, plan.run, target.platform) for plan in plans])
    replayed &= ~np.isnan(step_s) & ~np.isnan(fit)
    for method in dict.fromkeys(plan.run.method for plan in plans):
        own = replayed & np.array([plan.run.method == method for plan in plans])
        rows, doubted = np.flatnonzero(own & (may_fit | (fit >= least))), 0
        for row in rows[np.argsort(step_s[rows])]:
            sure = fit[row] >= least
            if sure and roomy[row]:
                break
            doubted += not sure
            if sure or doubted <= MOST_ASKED:
                fit[row] = chance_to_fit(search.job.architecture, held_run(plans[row].run, search.job.options), target)
                if fit[row] >= least:
                    break
    return fit


def priced(
    search: Search, plans: list[Plan], screened: Screen, device: int, target: Target, allowed: Flags, fit: Array
) -> Iterator[Candidate]:
    """The fastest allowed plan of each method and number of GPUs, from each of the offers that are tried."""
    for row in best_plans(plans, screened.step_s[device], allowed).values():
        step_s, share = exact(float(screened.step_s[device, row])), forward_frac(search, plans[row].run, target)
        host_bytes = host_need_bytes(search.job.architecture, plans[row].run)
        for price in prices_for(search, target, plans[row].run.num_gpus, host_bytes=host_bytes):
            whole = whole_of(search, plans[row].run, target, step_s, price, forward_frac=share)
            assert whole.cost_usd is not None
            if not math.isfinite(whole.total_time_h.value * whole.cost_usd.value):
                continue  # interrupted more often than it gets anywhere
            yield Candidate(
                plan=plans[row],
                target=target,
                price=price,
                time_h=whole.total_time_h.value,
                usd=whole.cost_usd.value,
                process_bytes=float(screened.process_bytes[device, row]),
                fit_probability=float(fit[row]),
            )


def offers_within(search: Search, target: Target, num_gpus: int, limits: Limits) -> tuple[JobOffer, ...]:
    """Offers of so many of these GPUs within the limits; none of a device that nobody rents out."""
    if target.gpu is None or target.is_mock:
        return ()
    return search.book.offers_for(target.gpu.id, num_gpus, limits.price_types, limits.providers, limits.regions)


BY_PROVIDER = ("data_location", "keep_days", "upload", "dataset_gb", "egress_usd_per_gb")
"""Parts of the whole run whose price is the provider's own, beside the hours: then all offers are computed."""


def prices_for(
    search: Search, target: Target, num_gpus: int, limits: Limits | None = None, host_bytes: float = 0.0
) -> list[Price]:
    """The cheapest offers of each purchase kind for so many of these GPUs, of those that are as forecast and whose
    machine has room for so much in host memory."""
    limits = search.limits if limits is None else limits
    if limits.usd_per_gpu_hour is not None:
        return [user_price(limits.usd_per_gpu_hour, num_gpus)]
    if target.gpu is None:
        return []
    kinds: dict[str, list[JobOffer]] = {}
    for job in as_forecast(offers_within(search, target, num_gpus, limits), target.gpu.id, search.job.options):
        kinds.setdefault(job.offer.price_type, []).append(job)
    most = None if any(getattr(search.around, name) for name in BY_PROVIDER) else OFFERS_TRIED

    def roomy(jobs: list[JobOffer]) -> Iterator[Price]:
        prices = (job_price(job, search.job.options) for job in jobs)
        return (price for price in prices if has_room(price.offer, host_bytes))

    return [price for jobs in kinds.values() for price in islice(roomy(jobs), most)]


def whole_of(
    search: Search,
    run: Run,
    target: Target,
    step_s: Value,
    price: Price,
    on_demand: Price | None = None,
    *,
    forward_frac: float,
    alike_share: float = 1.0,
) -> WholeRun:
    """Time and money of the whole run on one offer; an interruptible one with its interruptions. `forward_frac` is the
    forward pass over the whole step, in time, `alike_share` a step of samples all alike over it."""
    options = replace(search.around, spot=price.offer.get("price_type") == "spot")
    rates = rates_of(target, tuple(options.phase_rate.items()))
    terms = rented(price, options, rates, on_demand=on_demand, machines=run.machines)
    work = work_for(search, run, target.platform, forward_frac)
    work = replace(work, least=work.least * alike_share)
    return whole_run(work, step_s, options=options, rates=rates, terms=terms)


def rates_of(target: Target, given: tuple[tuple[str, float], ...]) -> Rates:
    """Rates of the phases around training on this card."""
    measured = None if target.record is None else factor_set_from_record(target.record)
    return phase_rates(target.gpu, measured, dict(given))


def work_for(search: Search, run: Run, platform: str, forward_frac: float) -> Work:
    """What the whole run has to move and do."""
    rows = unpacked_rows(run, search.job.options)
    amount = search.amount
    if rows is None and amount.most > 1.0:
        amount = padded_by(amount, run, search.job.options)
    elif rows is not None:
        found = resolve_amount(run, dict(search.job.options))
        assert found is not None
        amount = found
    run = own_run(run, rows)
    stored = search.job.options.get(STORED_AS)
    return _work_of(
        search.job.architecture, run, amount, forward_frac=forward_frac, platform=platform, stored_as=stored
    )


_work_of = lru_cache(maxsize=1024)(work_of)


def forward_frac(search: Search, run: Run, target: Target) -> float:
    """Forward pass over the whole step, in time; 0 where nothing asks for it."""
    if search.around.eval_samples is None:
        return 0.0
    architecture = search.job.architecture
    factors = job_factors(target, architecture, run, search.job.options)
    timed = linked_step(
        architecture, run, timed_operations(architecture, run, factors, platform=target.platform), factors
    )
    return forward_share(architecture, run, timed, search.around)


def too_small(target: Target, smallest_bytes: float | None, search: Search) -> Rejected:
    """A card on which no plan fits, or nobody knows."""
    if target.usable_bytes is None:
        detail = "its usable memory is unknown, so whether the run fits is not said"
        return Rejected(gpu=target.id, reason="memory unknown", detail=detail)
    room = f"{gib(target.usable_bytes):.1f} GiB are usable"
    gpus = search.job.counts[-1]
    spread = f"on up to {gpus} GPUs" if gpus > 1 else "on one GPU"
    need = "far more" if smallest_bytes is None else f"{gib(smallest_bytes):.1f} GiB a GPU at least"
    return Rejected(gpu=target.id, reason="does not fit", detail=f"needs {need} {spread}; {room}")


def not_built(target: Target, search: Search) -> Rejected | None:
    """A card on which the model's code is not built; None for others."""
    try:
        packed = bool(search.job.options.get("quantize_moe_experts"))
        check_experts(search.job.architecture, target.id, target.compute_capability, packed=packed)
    except NotSupportedError as error:
        return Rejected(gpu=target.id, reason="not built", detail=str(error))
    return None


def not_run(target: Target, run: Run) -> Rejected | None:
    """A card that kernels asked for do not run on; None for others."""
    try:
        check_kernels(run, target)
    except InputError as error:
        return Rejected(gpu=target.id, reason="not run", detail=str(error))
    return None


def not_bought(target: Target, counts: Sequence[int], surest: float, search: Search) -> Rejected:
    """A card that fits, but not surely enough, or that nobody offers in the number it takes."""
    limits = search.limits
    if not counts:
        least = limits.min_fit_confidence
        detail = f"fits with probability {chance_said(surest, least)}, below {100.0 * least:g}%"
        return Rejected(gpu=target.id, reason="fit not sure", detail=detail)
    return not_sold(target, counts, search)


def not_timed(target: Target, plan: Plan, search: Search) -> Rejected:
    """A card that fits, but whose time nobody can say: why, in the words of an estimate of the same plan."""
    job = search.job
    options = without_bridge(plan.over(job.options), target.gpu)
    asked = Question(architecture=job.architecture, options=options, option_origins=job.option_origins)
    detail = "no rate of it is known."
    try:
        forecast(asked, target)
    except InputError as error:
        detail = str(error)
    return Rejected(gpu=target.id, reason="time unknown", detail=detail)


def not_sold(target: Target, counts: Sequence[int], search: Search) -> Rejected:
    """A card that nobody offers in these numbers, of the kinds and in the places asked for."""
    elsewhere = _elsewhere(target, counts, search)
    words = " or ".join(str(count) for count in counts)
    instead = why_no_price(offers_within(search, target, min(counts), search.limits), search.job.options)
    remedy = "" if instead is None else f"; {instead.partition(': ')[2]}"
    room = " with the host memory that --offload needs" if search.job.options.get("offload") else ""
    detail = f"no offer of {words} in one machine{room}{elsewhere}{remedy}"
    return Rejected(gpu=target.id, reason="no price", detail=detail)


def _elsewhere(target: Target, counts: Sequence[int], search: Search) -> str:
    """What other offers of the card there are, beyond the kinds and places asked for."""
    anywhere = replace(search.limits, price_types=PRICE_TYPES, providers=None, regions=None)
    found = [price for count in counts for price in prices_for(search, target, count, anywhere)]
    if not found:
        return ""
    best = min(found, key=lambda price: price.usd_per_h)
    offer = best.offer
    return f"; {offer['provider']} has it {offer['price_type']} at ${best.usd_per_h:.2f}/h"
