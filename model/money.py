"""What the whole run takes and costs, added to a forecast of its step."""

from __future__ import annotations

from dataclasses import replace

from tunecast.model.amount import Amount
from tunecast.model.cost import Price, cheapest_price, cost_per_million_tokens_usd, cost_usd, user_price
from tunecast.model.forecast import Forecast
from tunecast.model.question import Question
from tunecast.model.target import Target
from tunecast.model.units import HOUR_S
from tunecast.model.value import Value


def with_money(result: Forecast, question: Question, target: Target, amount: Amount | None) -> Forecast:
    """The forecast with its whole run, its price and what that costs."""
    price = _price(result, question, target)
    hours = None if amount is None else result.step_time_s.scaled(amount.steps / HOUR_S)
    per_million = None if price is None else cost_per_million_tokens_usd(result.tokens_per_s, price)
    return replace(
        result,
        phases_h={} if hours is None else {"train": hours.value},
        total_time_h=hours,
        cost_usd=None if hours is None or price is None else cost_usd(hours, price),
        cost_per_million_tokens_usd=per_million,
        offer=None if price is None else price.offer,
        notes=(*result.notes, *_offer_notes(price), *_phase_notes(hours)),
    )


def _offer_notes(price: Price | None) -> tuple[str, ...]:
    """What makes the job's price other than GPUs times the price of one."""
    notes = [] if price is None else price.offer.get("notes", [])
    told = ("whole instances", "lowest ask", "median ask", "separate machines", "the price is", "the whole term")
    return tuple(note for note in notes if any(words in note for words in told))


def _phase_notes(hours: Value | None) -> tuple[str, ...]:
    return () if hours is None else ("training only: start-up, download, evaluation and saves are not counted yet",)


def _price(result: Forecast, question: Question, target: Target) -> Price | None:
    if question.usd_per_gpu_hour is not None:
        return user_price(question.usd_per_gpu_hour, result.run.num_gpus)
    if target.gpu is None or target.is_mock:
        return None
    return cheapest_price(target.gpu.id, result.run.num_gpus, book=question.price_book)
