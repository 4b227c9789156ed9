"""A recommendation for people: the front, what binds, and why the others lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tunecast.catalogs.prices import AGE_NOTE
from tunecast.forecast_table import of_this, price_ages, span
from tunecast.model.fits import chance_said
from tunecast.model.prior_effects import NO_VENDOR
from tunecast.model.recommend import budget_words, hours
from tunecast.recommendation import Picked
from tunecast.run_line import checkpointing_word, field_words, sharding_words
from tunecast.tables import dollars, duration, keep_whole, plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tunecast.model.market import Candidate, Rejected
    from tunecast.model.recommend import Relaxation
    from tunecast.model.value import Value
    from tunecast.recommendation import Recommendation

RUNNERS_UP = 8
"""Losing cards that get a line of their own; the rest are counted by reason."""
MINUTES, DAY_H, DAYS_FROM_H = 60.0, 24.0, 100.0
"""Minutes of an hour, hours of a day, and hours from which `tables.duration` says days."""
STAR = "*"
NAMED = 4
"""Cards that are named of those counted."""


def recommendation_report(found: Recommendation) -> list[RenderableType]:
    """What the command prints."""
    parts: list[RenderableType] = [*head(found)]
    if found.front:
        parts.append(front_table(found))
        parts.append(balance_line(found))
        parts += [*unproven_line(found), *chance_lines(found)]
        parts += [binding_line(relaxation) for relaxation in found.relaxations]
    losers = [rejected for rejected in found.rejected if rejected.candidate is not None]
    if losers:
        parts.append(runners_up(losers[:RUNNERS_UP]))
    parts += [f"- {line}" for line in left_out(found.rejected, shown=losers[:RUNNERS_UP])]
    parts += [f"- {note}" for note in found.notes]
    forecasts = [picked.forecast for picked in named_picks(found)]
    parts += [f"- {line}" for line in told(found)]
    parts += price_ages(forecasts)
    return parts


def unproven(picked: Picked) -> bool:
    """Whether no run on any card of the plan's vendor is among those that the priors were fitted to."""
    return any(NO_VENDOR.partition("{")[0] in note for note in picked.forecast.notes)


def unproven_line(found: Recommendation) -> Iterable[str]:
    """What a star in the table means."""
    gpus = dict.fromkeys(picked.forecast.gpu for picked in found.front if unproven(picked))
    if gpus:
        yield (
            f"{STAR} {', '.join(gpus)}: no run on any card of this maker is among those the priors were fitted to; its "
            "time is told from other makers' cards. Calibrate one before the money depends on it."
        )


def chance_lines(found: Recommendation) -> Iterable[str]:
    """How likely the named plans keep a deadline and a budget, which they are ranked for by their values alone."""
    for limit, keeps in (
        (f"the deadline of {hours(found.limits.deadline_h)}" if found.limits.deadline_h else "", Picked.keeps_deadline),
        (budget_words(found.limits) if found.limits.budget_usd else "", Picked.keeps_budget),
    ):
        chances = [(picked, keeps(picked, found.limits)) for picked in named_picks(found) if limit]
        names = ((marks(found, picked).replace("\n", " and "), chance) for picked, chance in chances)
        words = [f"{name} {chance:.0%}" for name, chance in names if chance is not None]
        if words:
            yield f"Chance to keep {limit} by its own interval: {', '.join(words)}."


def told(found: Recommendation) -> Iterable[str]:
    """The notes of the named plans, each once, with the cards it holds for unless it holds for all."""
    picks = named_picks(found)
    holders: dict[str, dict[str, None]] = {}
    for forecast in (picked.forecast for picked in picks):
        for note in forecast.notes:
            if found.steps not in note and not note.startswith(AGE_NOTE):
                holders.setdefault(of_this(note, forecast.gpu), {})[forecast.gpu] = None
    everyone = {picked.forecast.gpu for picked in picks}
    for note, gpus in holders.items():
        yield note if set(gpus) == everyone else f"{note} ({', '.join(gpus)})"
    if picks:
        yield "ranges are 80% intervals; ranking is by the values"


def head(found: Recommendation) -> Iterable[str]:
    """The job: method, amount, batch, and what of it nobody chose."""
    methods = " or ".join(dict.fromkeys(p.candidate.plan.run.method for p in found.front))
    yield f"{found.model}{': ' + methods if methods else ''}, {found.steps}."
    yield f"Global batch {found.batch.samples}: {found.batch.how}."
    assumed = assumed_words(found)
    yield f"{found.screened:,} combinations of plan and card compared.{assumed}"


def assumed_words(found: Recommendation) -> str:
    """Fields of the run that neither the user nor the search chose; a field that plans have differently, with all its
    values."""
    if found.cheapest is None:
        return ""
    forecasts = [picked.forecast for picked in found.front]
    names = [name for name, origin in found.cheapest.forecast.run_origins.items() if origin == "assumed"]
    values = {
        name: dict.fromkeys(field_words(each, name) for each in forecasts if getattr(each.run, name) is not None)
        for name in names
    }
    words = [
        " or ".join((first, *(text.removeprefix(f"{name} ") for text in others)))
        for name, (first, *others) in values.items()
    ]
    return f" Assumed: {', '.join(words)}." if words else ""


def named_picks(found: Recommendation) -> list[Picked]:
    """Cheapest, balance and fastest, each once."""
    picks = (found.cheapest, found.balance, found.fastest)
    return list({id(picked): picked for picked in picks if picked is not None}.values())


def marks(found: Recommendation, picked: Picked) -> str:
    """What a plan of the front is."""
    words = (
        ("cheapest", found.cheapest),
        ("balance", found.balance if len(found.front) > 1 else None),
        ("fastest", found.fastest),
    )
    return "\n".join(word for word, chosen in words if chosen is picked)


def front_table(found: Recommendation) -> Table:
    """The front, cheapest first; intervals under their value, the offer under the cards."""
    numbers = ("fits", "time", "cost")
    table = plain_table("", "rent", "train with", *numbers, right=numbers)
    several = len({picked.candidate.plan.run.method for picked in found.front}) > 1
    for picked in found.front:
        forecast = picked.forecast
        assert forecast.total_time_h is not None
        assert forecast.cost_usd is not None
        assert forecast.fit_probability is not None
        star = STAR if unproven(picked) else ""
        table.add_row(
            marks(found, picked),
            f"{picked.candidate.num_gpus} x {forecast.gpu}{star}\n{seller(picked.candidate)}",
            plan_words(picked.candidate, with_method=several),
            chance_said(forecast.fit_probability, found.limits.min_fit_confidence),
            f"{duration(forecast.total_time_h.value)}\n{duration_span(forecast.total_time_h)}",
            f"{dollars(forecast.cost_usd.value)}\n{span(forecast.cost_usd)}",
        )
    return keep_whole(table, shrinking="train with")


def duration_span(value_h: Value) -> str:
    """The interval of a length, in the unit that `duration` chooses for its value."""
    return span(value_h.scaled(MINUTES if value_h.value < 1 else 1.0 if value_h.value < DAYS_FROM_H else 1.0 / DAY_H))


def seller(candidate: Candidate) -> str:
    """Who sells it, how, and for how much an hour for the whole job."""
    offer = candidate.price.offer
    kind = offer.get("price_type")
    words = (offer.get("provider"), None if kind in (None, "on-demand") else kind)
    return " ".join(str(word) for word in words if word) + f", ${candidate.price.usd_per_h:.2f}/h"


def plan_words(candidate: Candidate, *, with_method: bool) -> str:
    """Micro-batch and accumulation, and how the job is laid out."""
    run = candidate.plan.run
    method = f"{run.method}, " if with_method else ""
    batch = f"{method}micro-batch {run.per_device_train_batch_size} x {run.gradient_accumulation_steps}"
    splits = [f"{name} {getattr(run, name)}" for name in ("tp", "pp", "cp") if getattr(run, name) > 1]
    splits += [f"{run.pp_interleave} chunks a stage"] if run.pp_interleave > 1 else []
    spread = "".join(f", {word}" for word in (*splits, *([sharding_words(run)] if run.sharding != "none" else [])))
    return f"{batch}{spread}\ncheckpointing {checkpointing_word(run)}"


def balance_line(found: Recommendation) -> str:
    """What balance means."""
    from tunecast.model.front import BALANCE

    best = "No other plan compared is both cheaper and faster than one of these (by 1% or more)."
    return f"{best} Balance: {BALANCE}." if len(found.front) > 1 else best


def binding_line(relaxation: Relaxation) -> str:
    """What one limit keeps away."""
    return f"{relaxation.limit} {relaxation.now} binds; {relaxation.needed} would allow {relaxation.buys}."


def runners_up(losers: Sequence[Rejected]) -> Table:
    """The best of the cards that lost, each by its own best plan."""
    table = plain_table("runners-up", "time", "cost", "why not", right=("time", "cost"))
    for rejected in losers:
        candidate = rejected.candidate
        assert candidate is not None
        table.add_row(
            f"{candidate.num_gpus} x {rejected.gpu}",
            duration(candidate.time_h),
            dollars(candidate.usd),
            reason_words(rejected),
        )
    table.columns[0].no_wrap = table.columns[1].no_wrap = table.columns[2].no_wrap = True
    return table


def reason_words(rejected: Rejected) -> str:
    """Why a card lost; a dominated one says by what."""
    return rejected.detail if rejected.reason == "dominated" else f"{rejected.reason}: {rejected.detail}"


def left_out(rejected: Sequence[Rejected], *, shown: Sequence[Rejected]) -> Iterable[str]:
    """The cards without a line of their own, counted by reason; of few, their names."""
    by_reason: dict[str, list[str]] = {}
    for each in rejected:
        if each not in shown:
            by_reason.setdefault(each.reason, []).append(each.gpu)
    for reason, gpus in by_reason.items():
        named = ", ".join(gpus[:NAMED])
        more = f" and {len(gpus) - NAMED} more" if len(gpus) > NAMED else ""
        yield f"{reason}: {named}{more}"
