"""What the whole run takes and costs, added to a forecast of its step.

Of all offers that may be ranked, the one is taken whose whole run is cheapest: an hour that is billed in
full, a disk or an upload can make the lowest price per hour the dearer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.price_book import PriceBook, shipped_book
from tunecast.catalogs.prices import PRICE_TYPES, SEPARATE
from tunecast.model.amount import Amount
from tunecast.model.cost import Price, candidate_prices, cost_per_million_tokens_usd, has_room, user_price, why_no_price
from tunecast.model.factors import FactorSet
from tunecast.model.forecast import Forecast
from tunecast.model.interruptions import NEVER_H
from tunecast.model.parallel_offload import host_need_bytes
from tunecast.model.phase import Work
from tunecast.model.phase_rates import Rates, phase_rates
from tunecast.model.power import measured_power_w
from tunecast.model.question import STORED_AS, Question
from tunecast.model.rows import own_run, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.run_work import forward_share, work_of
from tunecast.model.target import Target
from tunecast.model.terms import Terms, owned, rented
from tunecast.model.time import StepTime
from tunecast.model.units import GIGA, KILO, memory_text
from tunecast.model.value import Value
from tunecast.model.whole_run import WholeRun, whole_run
from tunecast.model.whole_run_options import OF_PRICES, WholeRunOptions, flag, given_names

ON_DEMAND = ("on-demand",)
SPOT = ("spot",)
UNCOUNTED_FLAGS = {"storage": "--storage-usd-per-gb-month", "egress": "--egress-usd-per-gb"}


def with_money(
    result: Forecast,
    question: Question,
    target: Target,
    amount: Amount | None,
    *,
    factors: FactorSet | None = None,
    timing: StepTime | None = None,
) -> Forecast:
    """The forecast with its whole run, its price and what that costs."""
    options = question.whole_run
    prices = prices_of(result, question, target)
    rates = phase_rates(target.gpu, factors, options.phase_rate)
    per_million = None if not prices else cost_per_million_tokens_usd(result.tokens_per_s, prices[0])
    result = replace(result, cost_per_million_tokens_usd=per_million, offer=prices[0].offer if prices else None)
    if not prices and (why := _unpriced(result, question, target)) is not None:
        result = replace(result, notes=(*result.notes, why))

    def told(offer: Mapping[str, Any] | None) -> tuple[str, ...]:
        return notes_of_offer(result, offer, network_given=question.options.get("internode_gbps") is not None)

    if amount is None:
        return replace(result, notes=(*result.notes, *told(result.offer), *idle_notes(options)))
    run = own_run(result.run, unpacked_rows(result.run, question.options))
    work = work_of(
        result.architecture,
        run,
        amount,
        forward_frac=forward_share(result.architecture, run, timing, options, question.source),
        platform=target.platform,
        source=question.source,
        stored_as=question.options.get(STORED_AS),
    )
    price, whole = cheapest_run(work, result, question, target, rates, prices)
    return replace(
        result,
        phases_h=whole.phases_h,
        total_time_h=whole.total_time_h,
        cost_usd=whole.cost_usd,
        offer=None if price is None else price.offer,
        cost_per_million_tokens_usd=_per_million(result, price, whole),
        whole_run=whole,
        notes=(
            *result.notes,
            *told(None if price is None else price.offer),
            *whole_notes(whole, options),
            *data_notes(work, options),
        ),
    )


def notes_of_offer(result: Forecast, offer: Mapping[str, Any] | None, *, network_given: bool) -> tuple[str, ...]:
    """What is to be said of an offer: that its machines or their network may be others than those that are timed, and
    that nobody says whether its machine has room for what goes to the host."""
    run, notes = result.run, offer_notes(offer)
    timed = run.machines
    if offer is not None and offer["provider"] != "user" and timed > offer.get("instances", timed):
        rented = f"{offer['instances']} machine{'s' if offer['instances'] > 1 else ''}"
        notes = tuple(note for note in notes if SEPARATE not in note)
        notes += (f"timed as {timed} machines of {run.gpus_per_node} GPUs, though the offer is {rented}",)
    unstated = offer is not None and offer["provider"] != "user" and offer.get("network_gbps") is None
    if unstated and timed > 1 and not network_given:
        notes += ("the offer's own network is not stated: ask whether it is the one that is timed",)
    need = host_need_bytes(result.architecture, run)
    if need and offer is not None and offer["provider"] != "user" and offer.get("ram_gib") is None:
        told = f"the offer's host memory is not stated, and {_way(run)} puts {memory_text(need)} there: ask for it"
        return (*notes, told)
    return notes


def _way(run: Run) -> str:
    """The option by which something of a run is in host memory."""
    return "--offload" if run.offload != "none" else f"--optim {run.optim}"


def _per_million(result: Forecast, price: Price | None, whole: WholeRun) -> Value | None:
    """Rent, or electricity while training, for a million tokens."""
    if price is not None:
        return cost_per_million_tokens_usd(result.tokens_per_s, price)
    if whole.power is None or whole.power.usd_per_kwh <= 0.0:
        return None
    hourly = whole.power.training_w / KILO * whole.power.usd_per_kwh
    return cost_per_million_tokens_usd(result.tokens_per_s, Price(usd_per_h=hourly, offer={}))


def _unpriced(result: Forecast, question: Question, target: Target) -> str | None:
    """Why no offer is this forecast's: none of the card is like it, or there is none of its kind."""
    if question.whole_run.owned or target.gpu is None or target.is_mock:
        return None
    kinds = SPOT if question.whole_run.spot else ON_DEMAND
    book, num_gpus = question.price_book or shipped_book(), result.run.num_gpus
    if not book.by_gpu:
        return None  # who asks has a price already
    need = host_need_bytes(result.architecture, result.run)
    if need and candidate_prices(target.gpu.id, num_gpus, kinds, book=book, options=question.options):
        return f"no price: no machine on offer has the {memory_text(need)} of host memory that {_way(result.run)} needs"
    offers = book.offers_for(target.gpu.id, num_gpus, kinds)
    return why_no_price(offers, question.options) if offers else _other_kinds(book, target.gpu.id, num_gpus, kinds[0])


def _other_kinds(book: PriceBook, gpu_id: str, num_gpus: int, kind: str) -> str:
    """What is said of a card without an offer of this kind: the cheapest of another, where there are any."""
    others = book.offers_for(gpu_id, num_gpus, PRICE_TYPES)
    if not others:
        return "no price: nobody is known to rent this GPU; --usd-per-gpu-hour N counts a price of your own"
    other = min((job.offer for job in others), key=lambda offer: offer.usd_per_gpu_hour)
    way = "--spot" if other.price_type == "spot" else f"recommend --purchase {other.price_type}"
    return (
        f"no price: nobody is known to rent this GPU {kind.replace('-', ' ')}; {other.provider} has it "
        f"{other.price_type} (--usd-per-gpu-hour {other.usd_per_gpu_hour:g}, or {way})"
    )


def prices_of(result: Forecast, question: Question, target: Target) -> tuple[Price, ...]:
    """What may be paid, cheapest per hour first; empty where nobody sells it, or it is the user's own."""
    if question.whole_run.owned and question.usd_per_gpu_hour is not None:
        raise InputError("--usd-per-gpu-hour is a rent, --owned pays for electricity alone; leave one of them out.")
    if question.whole_run.owned:
        return ()
    if question.usd_per_gpu_hour is not None:
        return (user_price(question.usd_per_gpu_hour, result.run.num_gpus),)
    if target.gpu is None or target.is_mock:
        return ()
    kinds = SPOT if question.whole_run.spot else ON_DEMAND
    found = candidate_prices(
        target.gpu.id, result.run.num_gpus, kinds, book=question.price_book, options=question.options
    )
    need = host_need_bytes(result.architecture, result.run)
    return tuple(price for price in found if has_room(price.offer, need))


def cheapest_run(
    work: Work, result: Forecast, question: Question, target: Target, rates: Rates, prices: tuple[Price, ...]
) -> tuple[Price | None, WholeRun]:
    """The price whose whole run costs least, and that run; without a price only the time is known."""
    options, num_gpus = question.whole_run, result.run.num_gpus

    def run_on(terms: Terms | None) -> WholeRun:
        return whole_run(work, result.step_time_s, options=options, rates=rates, terms=terms)

    if options.owned:
        measured_w = None if target.record is None else measured_power_w(target.record)
        return None, run_on(owned(target.gpu, num_gpus, options, rates, measured_w, machines=result.run.machines))
    if not prices:
        return None, run_on(None)
    on_demand = _on_demand(question, target, num_gpus) if options.spot else None
    machines = result.run.machines
    tried = [(p, run_on(rented(p, options, rates, on_demand=on_demand, machines=machines))) for p in prices]
    return min(tried, key=lambda pair: pair[1].cost_usd.value if pair[1].cost_usd else 0.0)


def _on_demand(question: Question, target: Target, num_gpus: int) -> Price | None:
    """The cheapest price of the same job without interruptions."""
    if target.gpu is None or target.is_mock:
        return None
    found = candidate_prices(target.gpu.id, num_gpus, ON_DEMAND, book=question.price_book, options=question.options)
    return found[0] if found else None


TOLD = (
    "whole instances", "lowest ask", "median ask", SEPARATE, "NVLink rack", "the price is", "the whole term",
    "one-GPU listing", "machine size is not stated", "spot equal to", "half of that day", "of on-demand in this file",
    "resale listing",
)  # fmt: skip
"""Words of an offer's notes that concern whoever pays."""


def offer_notes(offer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What makes the job's price other than GPUs times the price of one, or doubtful."""
    notes = [] if offer is None else offer.get("notes", [])
    return tuple(note for note in notes if any(words in note for words in TOLD))


def idle_notes(options: WholeRunOptions) -> tuple[str, ...]:
    """Options of the whole run that were given where nothing says how long it is."""
    asked = [flag(name) for name in given_names(options) if name not in OF_PRICES]
    if not asked:
        return ()
    change = "changes" if len(asked) == 1 else "change"
    return (f"{', '.join(asked)} {change} nothing without an amount of data: add --tokens 10M or --num-samples 5000",)


PLAIN_TEXT_BYTES = (1.0, 20.0)
"""Bytes of text that a token may come from: scripts and formats around it beyond the 3 to 5 of plain English."""


def data_notes(work: Work, options: WholeRunOptions) -> tuple[str, ...]:
    """That the raw data and the tokens of an epoch are not of one data set, and a price of traffic without any."""
    notes = []
    if options.dataset_gb is not None and work.dataset_tokens > 0.0:
        each = options.dataset_gb * GIGA / work.dataset_tokens
        if not PLAIN_TEXT_BYTES[0] <= each <= PLAIN_TEXT_BYTES[1]:
            digits = f"{each:,.0f}" if each >= 10.0 else f"{each:.2g}"
            notes.append(
                f"--dataset-gb {options.dataset_gb:g} is {digits} bytes for each of the {work.dataset_tokens:,.0f} "
                "tokens of an epoch, and text has 3 to 5: it holds much else, or one of the two is of other data"
            )
    if options.egress_usd_per_gb is not None and not options.upload and options.data_location is None:
        notes.append("--egress-usd-per-gb changes nothing: nothing leaves a provider (--upload, --data-location)")
    return tuple(notes)


def whole_notes(whole: WholeRun, options: WholeRunOptions) -> tuple[str, ...]:
    """What the total counts, what of it is assumed, and what it leaves out."""
    if options.train_only:
        return ("training only, as asked: start-up, download, evaluation and saves are not counted",)
    guessed = [phase for phase in whole.phases if phase.origin == "assumed" and phase.name != "interruptions"]
    assumed = [phase.name for phase in guessed if phase.hours.value > 0.0]
    notes = [f"assumed, not measured: {', '.join(assumed)} (--phase-min, --phase-rate)"] if assumed else []
    if options.seed and not options.spot:
        notes.append(f"--seed {options.seed} changes nothing: only interruptions are drawn, with --spot")
    if whole.guessed_storage_usd_per_gb_month is not None:
        notes.append(
            f"storage at ${whole.guessed_storage_usd_per_gb_month:.2f} per GB and month is assumed, the dearest price "
            "that is known of any provider (--storage-usd-per-gb-month)"
        )
    if whole.uncounted:
        flags = ", ".join(UNCOUNTED_FLAGS[name] for name in whole.uncounted)
        notes.append(f"not in the cost, no price is known: {', '.join(whole.uncounted)} ({flags})")
    found = whole.interruptions
    if found is not None:
        notes.append(f"interruptions: {found.cuts.monthly.value:.0%} of machines a month ({found.cuts.source})")
        if found.expected_h.value >= NEVER_H:
            notes.append("without shorter checkpoint intervals this run practically never ends")
    elif options.spot and whole.cost_usd is None:
        notes.append("no interruptible offer of this GPU is known: time is without interruptions")
    return tuple(notes)
