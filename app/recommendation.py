"""The answer of `recommend`: its plans with full forecasts, and its JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.market import Candidate, Limits, Rejected
    from tunecast.model.plans import GlobalBatch
    from tunecast.model.recommend import Relaxation
    from tunecast.model.value import Value

RECOMMENDATION_SCHEMA = "tunecast.recommendation/1"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Picked:
    """A plan of the front with its full forecast."""

    candidate: Candidate
    forecast: Forecast

    def __repr__(self) -> str:
        """What a Python shell shows: the cards, and what they take in time and money."""
        from tunecast.forecast_table import span, span_h
        from tunecast.tables import DASH, dollars, duration

        time, cost = self.forecast.total_time_h, self.forecast.cost_usd
        told = DASH if time is None else f"{duration(time.value)} ({span_h(time)})"
        money = DASH if cost is None else f"{dollars(cost.value)} ({span(cost)})"
        return f"{self.candidate.num_gpus} x {self.candidate.target.id}: {told}, {money}"

    def keeps_deadline(self, limits: Limits) -> float | None:
        """Probability of it by the interval of the time; None without a deadline."""
        return _chance(self.forecast.total_time_h, limits.deadline_h)

    def keeps_budget(self, limits: Limits) -> float | None:
        """Probability of it by the interval of the cost; None without a budget."""
        return _chance(self.forecast.cost_usd, limits.budget_usd)


def _chance(value: Value | None, limit: float | None) -> float | None:
    from tunecast.model.value import chance_below

    return None if value is None or limit is None else chance_below(value, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer: the front with its three named plans, and why everything else lost."""

    model: str
    batch: GlobalBatch
    steps: str
    """How many optimizer steps, and why."""
    limits: Limits
    front: tuple[Picked, ...]
    """Cheapest first; empty when nothing keeps the limits."""
    balance: Picked | None
    rejected: tuple[Rejected, ...]
    relaxations: tuple[Relaxation, ...]
    """What each limit keeps away, the hardest one first."""
    screened: int
    """Combinations of a plan and a card that were compared."""
    notes: tuple[str, ...] = ()
    amount_options: Mapping[str, Any] = field(default_factory=dict)
    """What says how much is trained, as asked."""
    weights: str = ""
    """The hub's name of what is trained, as asked for."""
    save_steps: int | None = None
    save_total_limit: int | None = None
    """Checkpoints that were asked for, which the plans' time and price count."""
    otherwise: Callable[[Picked, Mapping[str, Any]], Forecast] | None = field(default=None, repr=False, compare=False)
    """The forecast of a plan with some run options changed, on its card and from its offer."""

    @property
    def cheapest(self) -> Picked | None:
        """The plan of least money."""
        return self.front[0] if self.front else None

    @property
    def fastest(self) -> Picked | None:
        """The plan of least time."""
        return self.front[-1] if self.front else None

    def refusal(self) -> str:
        """Why there is no plan, and what would let one in."""
        if self.relaxations:
            return self._relaxed()
        best = [rejected.candidate for rejected in self.rejected if rejected.candidate is not None]
        if best:
            cheapest, fastest = min(best, key=lambda c: c.usd), min(best, key=lambda c: c.time_h)
            return (
                f"No plan keeps --budget and --deadline together, nor either alone: the cheapest is "
                f"${cheapest.usd:,.2f} in {cheapest.time_h:.1f} h, the fastest {fastest.time_h:.1f} h for "
                f"${fastest.usd:,.2f}; raise both."
            )
        counted = Counter(rejected.reason for rejected in self.rejected)
        words = ", ".join(f"{reason} {count}" for reason, count in counted.most_common())
        unbuilt = next((rejected for rejected in self.rejected if rejected.reason in ("not built", "not run")), None)
        if unbuilt is not None and len(counted) == 1:
            return unbuilt.detail
        unsold = [rejected for rejected in self.rejected if rejected.reason == "no price"]
        unknown = {"no price", "memory unknown", "not built", "not run"}
        if unsold and counted.keys() <= unknown:  # what else was left out is no question of the plan either
            others = "" if len(unsold) == 1 else f" and {len(unsold) - 1} more cards"
            return (
                f"Nobody is known to rent out {unsold[0].gpu}{others} as asked: {unsold[0].detail}. --purchase "
                "community (or marketplace, reserved, committed) and --spot take other kinds of offers, "
                "--usd-per-gpu-hour N a price of your own."
            )
        untimed = next((rejected for rejected in self.rejected if rejected.reason == "time unknown"), None)
        if untimed is not None:
            return f"No card is left ({words}); {untimed.gpu} has room, but its step cannot be timed: {untimed.detail}"
        smaller = "" if self.batch.samples == 1 else "a smaller --global-batch or "
        return (
            f"No card is left ({words}); allow more GPUs (--max-gpus) or larger ones (--gpu all), {smaller}another "
            "--method, a shorter --max-length, or other offers."
        )

    def _relaxed(self) -> str:
        """Which limits no plan keeps, each of which alone could let one in, the least effort first."""
        if len(self.relaxations) == 1:
            only = self.relaxations[0]
            return f"No plan keeps {only.limit} {only.now}; {only.needed} would allow {only.buys}."
        kept = " and ".join(f"{each.limit} {each.now}" for each in self.relaxations)
        ways = ", ".join(f"{each.limit} {each.needed} would allow {each.buys}" for each in self.relaxations)
        return f"No plan keeps {kept} together; {ways}."

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tunecast recommend --json``."""
        from tunecast.model.front import BALANCE

        return {
            "schema": RECOMMENDATION_SCHEMA,
            "model": self.model,
            "global_batch": {"samples": self.batch.samples, "how": self.batch.how},
            "steps": self.steps,
            "limits": limits_to_dict(self.limits),
            "cheapest": picked_to_dict(self.cheapest, self.limits, full=True),
            "fastest": picked_to_dict(self.fastest, self.limits, full=True),
            "balance": picked_to_dict(self.balance, self.limits, full=True),
            "balance_means": BALANCE,
            "pareto": [picked_to_dict(picked, self.limits, full=False) for picked in self.front],
            "binding": [relaxation_to_dict(relaxation) for relaxation in self.relaxations],
            "rejected": [rejected_to_dict(rejected) for rejected in self.rejected],
            "combinations_screened": self.screened,
            "notes": list(self.notes),
        }


def limits_to_dict(limits: Limits) -> dict[str, Any]:
    """What a plan had to keep."""
    return {
        "budget_usd": limits.budget_usd,
        "deadline_h": limits.deadline_h,
        "min_fit_confidence": limits.min_fit_confidence,
        "price_types": list(limits.price_types),
        "providers": None if limits.providers is None else list(limits.providers),
        "regions": None if limits.regions is None else list(limits.regions),
        "usd_per_gpu_hour": limits.usd_per_gpu_hour,
    }


def picked_to_dict(picked: Picked | None, limits: Limits, *, full: bool) -> dict[str, Any] | None:
    """One plan; with its whole forecast (``tunecast.forecast/1``) if `full`."""
    from tunecast.model.forecast_json import forecast_to_dict

    if picked is None:
        return None
    candidate, forecast = picked.candidate, picked.forecast
    assert forecast.total_time_h is not None
    assert forecast.cost_usd is not None
    summary = {
        **plan_to_dict(candidate),
        "fit_probability": forecast.fit_probability,
        "deadline_probability": picked.keeps_deadline(limits),
        "budget_probability": picked.keeps_budget(limits),
        "time_h": finite(forecast.total_time_h),
        "cost_usd": finite(forecast.cost_usd),
        "step_time_s": finite(forecast.step_time_s),
        "offer": forecast.offer,
    }
    return {**summary, "forecast": forecast_to_dict(forecast)} if full else summary


def finite(value: Value) -> dict[str, float | None]:
    """A value as JSON; an endless upper end is null."""
    return {name: number if math.isfinite(number) else None for name, number in value.as_dict().items()}


def plan_to_dict(candidate: Candidate) -> dict[str, Any]:
    """The card and how the job is laid out on it."""
    run = candidate.plan.run
    return {
        "gpu": candidate.target.id,
        "num_gpus": run.num_gpus,
        "method": run.method,
        "tp": run.tp,
        "pp": run.pp,
        "pp_interleave": run.pp_interleave,
        "cp": run.cp,
        "sharding": run.sharding,
        "dp_shard_size": run.dp_shard_size or None,
        "per_device_train_batch_size": run.per_device_train_batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "gradient_checkpointing": run.gradient_checkpointing,
        "fit_probability": candidate.fit_probability,
    }


def relaxation_to_dict(relaxation: Relaxation) -> dict[str, Any]:
    """A limit and what relaxing it buys."""
    candidate = relaxation.candidate
    return {
        "limit": relaxation.limit,
        "now": relaxation.now,
        "needed": relaxation.needed,
        "buys": relaxation.buys,
        **plan_to_dict(candidate),
        "time_h": candidate.time_h,
        "cost_usd": candidate.usd,
        "offer": candidate.price.offer,
    }


def rejected_to_dict(rejected: Rejected) -> dict[str, Any]:
    """A card that lost; its best plan where it has one."""
    said = {"gpu": rejected.gpu, "reason": rejected.reason, "detail": rejected.detail}
    candidate = rejected.candidate
    if candidate is None:
        return {**said, "num_gpus": None, "time_h": None, "cost_usd": None, "offer": None}
    own = {"time_h": candidate.time_h, "cost_usd": candidate.usd, "offer": candidate.price.offer}
    return {**plan_to_dict(candidate), **said, **own}
