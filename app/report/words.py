"""What page and Markdown say in words: the answer, each card's row, origins."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from tunecast.forecast_table import verdict
from tunecast.model.fits import LIKELY, chance_said
from tunecast.model.value import total
from tunecast.report.charts import plan_name, span, time_span
from tunecast.run_line import checkpointing_word, layout_words, run_line
from tunecast.tables import DASH, digits, dollars, duration, gib_text, seconds

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.report.gather import Report

SETS_BATCH = "; --global-batch N sets it"
SETS_BATCH_HERE = "; `tunecast recommend --global-batch N` sets it"
VERDICT_WORDS = {"fits": "It fits"}
ORIGIN_WORDS = {
    "measured": "measured on this device",
    "reference": "measured on another device",
    "published": "fitted to published runs",
    "datasheet": "datasheet",
    "assumed": "assumed",
}


def answer(report: Report) -> str:
    """The answer in one sentence."""
    found = report.recommendation
    if found is not None and found.cheapest is not None and found.fastest is not None:
        cheap, fast = found.cheapest.forecast, found.fastest.forecast
        said = f"Cheapest: {plan_words(cheap)}."
        return said if fast is cheap else f"{said[:-1]}; fastest: {plan_words(fast)}."
    best = report.best
    if best.verdict == "no":
        return f"It does not fit {plan_name(best)}: {need_words(best)}; time and cost below are as if it did."
    if best.verdict == "tight" and best.fit_probability is not None:
        likely = "It fits, but tightly" if best.fit_probability >= LIKELY else "It may not fit"
        return f"{likely} (probability {chance_said(best.fit_probability)}): {plan_words(best)}."
    return f"{VERDICT_WORDS.get(best.verdict or '', 'Perhaps it fits')}: {plan_words(best)}."


def need_words(forecast: Forecast) -> str:
    """What a GPU would need, of what it has."""
    needed = forecast.memory.process_bytes or forecast.memory.allocated_bytes
    return f"{gib_text(needed.value)} GiB needed a GPU, {gib_text(forecast.memory.usable_bytes)} usable"


def plan_words(forecast: Forecast) -> str:
    """A plan with its time and cost and their intervals."""
    time, cost, offer = forecast.total_time_h, forecast.cost_usd, forecast.offer
    words = plan_name(forecast)
    if offer is not None and offer.get("provider"):
        words += " at your price" if offer["provider"] == "user" else f" at {offer['provider']}"
    if time is not None:
        words += f", {duration(time.value)} (80%: {duration(time.low)} to {duration(time.high)})"
    if cost is not None:
        words += f", {dollars(cost.value)} ({dollars(cost.low)} to {dollars(cost.high)})"
    return words


def title(report: Report) -> str:
    """What the page is about."""
    rent = "" if report.best.offer is None and report.recommendation is None else "what to rent, "
    return f"Fine-tuning {report.best.model}: {rent}how long, how much"


def run_sentences(report: Report) -> list[str]:
    """What is trained and what was assumed: of the recommended run, and where that differs from what was asked."""
    found, plan = report.recommendation, report.recommended
    if found is None or plan is None:
        return [run_line(report.best)]
    how = found.batch.how.replace("as asked with --global-batch", "that of the run as asked")
    batch = f"Global batch {found.batch.samples}: {how}."
    said = [f"The recommended run: {run_line(plan)} {batch.replace(SETS_BATCH, SETS_BATCH_HERE)} {found.steps}."]
    asked = global_batch(report.best)
    if asked != found.batch.samples:
        said.append(
            f"Every card below is forecast as asked, in a global batch of {asked} "
            f"({layout(report.best)}), so its steps, time and cost are not those of the recommended run."
        )
    return said


def global_batch(forecast: Forecast) -> int:
    """Samples of one optimizer step of the whole job."""
    run = forecast.run
    return run.per_device_train_batch_size * run.gradient_accumulation_steps * run.dp


def layout(forecast: Forecast) -> str:
    """How a plan trains: ``qlora, micro-batch 4 x 2, zero2, checkpointing off``."""
    run = forecast.run
    spread = "" if run.num_gpus == 1 else f", {layout_words(run)}"
    on = checkpointing_word(run)
    batch = f"{run.per_device_train_batch_size} x {run.gradient_accumulation_steps}"
    return f"{run.method}, micro-batch {batch}{spread}, checkpointing {on}"


def plan_title(report: Report) -> str:
    """Which plan the pictures are of."""
    plan = report.plan
    if report.recommended is None:
        return f"{plan_name(plan)} as asked: {layout(plan)}"
    return f"the recommended plan, {plan_name(plan)}: {layout(plan)}"


BY_STEPS = ("train", "evaluate", "checkpoints", "interruptions")
"""Phases that a run of twice as many tokens has twice as much of; evaluations where they come every so many steps."""


def recomputed(forecast: Forecast) -> dict[str, str]:
    """What script needs to tell time and cost of another amount or price, with their intervals.

    Hours of the phases `BY_STEPS` follow the tokens, the other hours do not; how far they may be off adds up as squares
    (`model.value.total`). What is left of the whole's interval beside both is that of interruptions, whose number is
    random: it grows with the root of the time. Cost is each end of the time, times a rate.
    """
    time, cost, whole = forecast.total_time_h, forecast.cost_usd, forecast.whole_run
    once = {"evaluate"} if whole is None or whole.evaluates_every is None else set()
    follow = {name for name in BY_STEPS if name not in once}
    phases = () if whole is None else whole.phases
    train = total(p.hours for p in phases if p.name in follow)
    sure = total(p.hours for p in phases if p.name in follow and p.name != "interruptions")
    other = total(p.hours for p in phases if p.name not in follow)
    every = train if time is None else time
    off = {}
    for end, sign in (("low", "down"), ("high", "up")):
        whole_off, steps_off, other_off = (abs(getattr(h, end) - h.value) for h in (every, sure, other))
        steps_off = min(steps_off, whole_off)
        other_off = min(other_off, _beside(whole_off, steps_off))
        off[f"steps-h-{sign}"], off[f"other-h-{sign}"] = steps_off, other_off
        off[f"chance-h-{sign}"] = _beside(_beside(whole_off, steps_off), other_off)
    found = {"steps-h": train.value, "other-h": every.value - train.value, **off}
    for suffix, end in (("", "value"), ("-low", "low"), ("-high", "high")):
        hours = getattr(every, end)
        known = cost is not None and 0 < hours < math.inf
        found[f"usd-per-h{suffix}"] = getattr(cost, end) / hours if known else math.nan
    return {name: "" if math.isnan(number) else f"{number:.9g}" for name, number in found.items()}


def _beside(both: float, one: float) -> float:
    """The other side of a right triangle; an endless one stays endless."""
    return both if math.isinf(both) else math.sqrt(max(both**2 - one**2, 0.0))


def card_row(forecast: Forecast) -> dict[str, Any]:
    """One card of the table: what is shown, and the numbers that script sorts and recomputes."""
    time, cost = forecast.total_time_h, forecast.cost_usd
    memory = forecast.memory.process_bytes or forecast.memory.allocated_bytes
    return {
        "gpu": plan_name(forecast),
        "anchor": f"card-{forecast.gpu}",
        "verdict": forecast.verdict or DASH,
        "verdict_words": verdict(forecast),
        "memory": f"{gib_text(memory.value)} of {gib_text(forecast.memory.usable_bytes)}",
        "memory_value": memory.value,
        "step": seconds(forecast.step_time_s.value),
        "step_value": forecast.step_time_s.value,
        "step_span": span(forecast.step_time_s, " s"),
        "speed": digits(forecast.tokens_per_s.value),
        "speed_value": forecast.tokens_per_s.value,
        "time": DASH if time is None else duration(time.value),
        "time_value": None if time is None else time.value,
        "time_span": time_span(time),
        "cost": "no price" if cost is None else dollars(cost.value),
        "cost_value": None if cost is None else cost.value,
        "cost_span": "" if cost is None else f"{dollars(cost.low)} to {dollars(cost.high)}",
        "offer": offer_words(forecast),
        "date": offer_date(forecast),
        "numbers": recomputed(forecast),
        "gpus": forecast.run.num_gpus,
    }


def offer_date(forecast: Forecast) -> str:
    """Since when the price is known."""
    return "" if forecast.offer is None else str(forecast.offer.get("snapshot_date") or "")


def offer_words(forecast: Forecast) -> str:
    """Who sells it, and at what."""
    offer = forecast.offer
    if offer is None:
        return "no price" if forecast.cost_usd is None else "your own; electricity alone"
    kind = offer.get("price_type")
    words = [str(offer.get("provider") or ""), "" if kind in (None, "on-demand") else str(kind)]
    rate = offer.get("usd_per_gpu_hour")
    words.append(f"${rate:.2f} per GPU-hour" if rate else "")
    return ", ".join(word for word in words if word)


def tokens_of(report: Report) -> float | None:
    """Tokens of the whole run: as asked with --tokens, else as forecast (speed times training time)."""
    best = report.best
    if report.asked_tokens is not None:
        return report.asked_tokens
    if best.whole_run is None:
        return None
    return best.tokens_per_s.value * best.whole_run.train_time_h.value * 3600


def origin_rows(forecast: Forecast) -> list[tuple[str, str]]:
    """Every factor with where it came from."""
    return [(name, origin_words(origin)) for name, origin in sorted(forecast.origins.items())]


def origin_words(origin: str) -> str:
    """An origin in words, with its record."""
    kind, _, detail = origin.partition(":")
    words = ORIGIN_WORDS.get(kind, kind)
    return f"{words} ({detail})" if detail else words


def origin_counts(forecast: Forecast) -> str:
    """How many factors of each origin."""
    counted = Counter(ORIGIN_WORDS.get(origin.split(":")[0], origin) for origin in forecast.origins.values())
    return ", ".join(f"{count} {words}" for words, count in counted.most_common())


def phase_lines(forecast: Forecast) -> list[tuple[str, str, str]]:
    """(phase, time, what it does and where its rate came from)."""
    from tunecast.whole_run_table import phase_words

    whole = forecast.whole_run
    return [] if whole is None else [(p.name, duration(p.hours.value), phase_words(p)) for p in whole.phases]


def all_notes(report: Report) -> list[str]:
    """What every forecast says once, then what the recommendation says."""
    from tunecast.forecast_table import notes as notes_of_cards
    from tunecast.recommend_table import unproven_line

    found = report.recommendation
    notes = [*report.plan.notes, *(() if found is None else (*unproven_line(found), *found.notes))]
    asked = [note.removeprefix("- ") for note in notes_of_cards(report.forecasts)]
    several = "as asked, " if report.recommended is not None else ""
    notes += [f"{several}{note}" for note in asked if note not in notes]
    if report.why_no_recommendation:
        notes.append(f"no recommendation: {report.why_no_recommendation}")
    return list(dict.fromkeys(notes))
