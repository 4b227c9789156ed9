"""One-way sensitivity: every input moved alone, choices and what nobody knows, widest swing first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunecast.model.units import KILO
from tunecast.model.value import Z80
from tunecast.sweep_result import Bar, Sweep, Told, chosen_metric, reported
from tunecast.sweeping import METRICS, Ask, forecast_of, point
from tunecast.tables import count
from tunecast.unlike_lengths import LENGTHS, length_ends

if TYPE_CHECKING:
    from tunecast.model.factors import FactorSet
    from tunecast.model.forecast import Forecast
    from tunecast.model.operation import Operation
    from tunecast.model.question import Question
    from tunecast.model.target import Target

HALVED_AND_DOUBLED = (
    "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "lora_r", "num_gpus",
)  # fmt: skip
AMOUNTS = ("tokens", "num_samples", "mean_tokens", "num_train_epochs", "max_steps")
OTHER_VALUES = {
    "gradient_checkpointing": (True, False),
    "optim": ("adamw_torch", "adamw_8bit"),
    "attn_implementation": ("sdpa", "eager"),
    "loss_type": ("nll", "chunked_nll"),
    "precision": ("bf16-autocast", "fp32"),
    "double_quant": (True, False),
}
"""Switches with the two values between which they are moved."""
LINK = "link"
KINDS = ("gemm", "attention", "memory", "dequant", "loss", "optimizer")
Change = tuple[Mapping[str, Any] | None, Mapping[str, float]]
"""(inputs set, factors multiplied); None where this end does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both ends of one input."""

    name: str
    kind: str
    labels: tuple[str, str]
    low: Change
    high: Change


def tornado(ask: Ask, metric: str | None, told: Told | None = None) -> Sweep:
    """Every input moved alone: choices to half and double or their other value, the rest over its interval."""
    base = forecast_of(ask, {})
    name = chosen_metric(metric, base)
    of = METRICS[name].of
    at_base = of(base)
    assert at_base is not None
    ends = [*choice_ends(ask, base), *uncertain_ends(ask, base, name)]
    bars = []
    for end in reported(told, len(ends), iter(ends)):
        low, high = (
            (None, None) if settings is None else _metric_at(ask, settings, scales, of)
            for settings, scales in (end.low, end.high)
        )
        bars.append(
            Bar(
                name=end.name,
                kind=end.kind,
                low_setting=end.labels[0],
                high_setting=end.labels[1],
                low=low[0],
                high=high[0],
                base=at_base,
                low_verdict=low[1],
                high_verdict=high[1],
            )
        )
    bars.sort(key=lambda bar: -bar.swing)
    return Sweep(kind="tornado", metric_name=name, base=base, bars=tuple(bars))


def _metric_at(
    ask: Ask, settings: Mapping[str, Any], scales: Mapping[str, float], of: Callable[[Forecast], float | None]
) -> tuple[float | None, str | None]:
    """The metric, and the verdict on memory."""
    found = point(ask, settings, scales).forecast
    return (None, None) if found is None else (of(found), found.verdict)


def choice_ends(ask: Ask, base: Forecast) -> list[Ends]:
    """What the user decides."""
    ends = []
    for name in HALVED_AND_DOUBLED:
        value = getattr(base.run, name)
        if value and (name != "num_gpus" or base.gpu != "cpu"):
            halved = value // 2 if value % 2 == 0 else None
            ends.append(_numbers(name, halved, value * 2))
    for name in AMOUNTS:
        value = ask.options.get(name)
        if value is not None:
            from tunecast.model.amount import parse_count

            number = parse_count(value, name=f"--{name.replace('_', '-')}")
            whole = name in ("max_steps",)
            halved, doubled = (int(n) if whole else n for n in (number / 2, number * 2))
            ends.append(_numbers(name, halved, doubled))
    for name, values in OTHER_VALUES.items():
        applies = {
            "double_quant": base.run.method == "qlora",
            "gradient_checkpointing": not base.run.recompute_attention,
        }.get(name, True)
        if applies and getattr(base.run, name) in values:
            low, high = ({name: value} for value in values)
            labels = (str(values[0]), str(values[1]))
            ends.append(Ends(name=name, kind="choice", labels=labels, low=(low, {}), high=(high, {})))
    return ends


def _numbers(name: str, halved: float | None, doubled: float) -> Ends:
    low: Change = (None if halved is None else {name: halved}, {})
    labels = ("–" if halved is None else _shown(halved), _shown(doubled))
    return Ends(name=name, kind="choice", labels=labels, low=low, high=({name: doubled}, {}))


def _shown(number: float) -> str:
    """A number as it stands, or a large one as people write it."""
    return f"{number:g}" if number < 100 * KILO else count(number)


def uncertain_ends(ask: Ask, base: Forecast, metric: str) -> list[Ends]:
    """What nobody decides: rates of the device, phases, lengths of samples, and which offer one gets."""
    from tunecast.asking import asked_question

    question, (target,), _ = asked_question(ask.model, gpu=ask.gpu, **ask.options)
    ends = [*_rate_ends(question, target, base), *_phase_ends(question, base)]
    if (lengths := length_ends(question, base.run, metric)) is not None:
        labels, low, high = lengths
        ends.append(Ends(name=LENGTHS, kind="uncertain", labels=labels, low=(low, {}), high=(high, {})))
    price = _price_end(ask, question, base)
    return [*ends, *([price] if price else [])]


def _longer_or_shorter(name: str, log_sd: float, factors: Sequence[str]) -> Ends:
    """Times of some operations over their 80% interval, all alike."""
    spread = math.exp(Z80 * log_sd)
    labels = (f"{1 / spread:.2f} x its time", f"{spread:.2f} x its time")
    low, high = (dict.fromkeys(factors, multiple) for multiple in (1 / spread, spread))
    return Ends(name=name, kind="uncertain", labels=labels, low=({}, low), high=({}, high))


def _rate_ends(question: Question, target: Target, base: Forecast) -> list[Ends]:
    """Every kind of operation that takes time, over the 80% interval of its rate; then the scalar factors."""
    from tunecast.model.cached_copies import SCALE_CACHED
    from tunecast.model.columns import CACHED
    from tunecast.model.on_device import job_factors
    from tunecast.model.priors import load_priors
    from tunecast.model.slowest_stage import timed_operations

    factors = job_factors(target, base.architecture, base.run, question.options)
    operations = timed_operations(
        base.architecture, base.run, factors, platform=target.platform, source=question.source
    )
    ends = []
    for kind in KINDS:
        log_sd = math.hypot(curves_log_sd(factors, operations, kind), fitted_log_sd(factors, f"scale.{kind}"))
        if log_sd > 0 and base.time_parts_s.get(kind):
            ends.append(_longer_or_shorter(f"time of {kind}", log_sd, (kind,)))
    if (log_sd := fitted_log_sd(factors, SCALE_CACHED)) > 0:
        ends.append(_longer_or_shorter("time in the cache", log_sd, (CACHED,)))
    if factors.step_log_sd > 0:
        ends.append(_longer_or_shorter("time model, by runs left out", factors.step_log_sd, (*KINDS, "floor")))
    if (log_sd := fitted_log_sd(factors, f"scale.{LINK}")) > 0 and base.run.num_gpus > 1:
        spread = math.exp(Z80 * log_sd)
        least = max(1 / spread, float(load_priors()["efficiency"][LINK]["value"]))  # no link beyond its stated rate
        labels = (f"{least:.2f} x its time", f"{spread:.2f} x its time")
        low, high = ({LINK: least}, {LINK: spread})
        ends.append(Ends(name="time on links", kind="uncertain", labels=labels, low=({}, low), high=({}, high)))
    for name, factor in factors.factors.items():
        if factor.low < factor.value < factor.high and "." not in name:
            unit = "" if factor.unit.startswith("fraction") else f" {factor.unit}"  # the name says of what
            labels = (f"{factor.low:.3g}{unit}", f"{factor.high:.3g}{unit}")
            low, high = ({name: end / factor.value} for end in (factor.low, factor.high))
            ends.append(Ends(name=name, kind="uncertain", labels=labels, low=({}, low), high=({}, high)))
    return ends


def curves_log_sd(factors: FactorSet, operations: Sequence[Operation], kind: str) -> float:
    """How unsure the time of the run's own operations of a kind is by the curves that they follow, as a standard
    deviation of its logarithm; 0 where there are none."""
    import numpy as np

    from tunecast.model.curve_names import curve_key, find_curve, kind_of
    from tunecast.model.curves import columns, seconds

    by_curve: dict[str, list[Operation]] = {}
    for operation in operations:
        if kind_of(key := curve_key(operation)) == kind:
            by_curve.setdefault(key, []).append(operation)
    total_s = variance = 0.0
    for key, alike in by_curve.items():
        timed = seconds(find_curve(key, factors), columns(alike))
        each_s = timed.seconds * np.array([operation.count for operation in alike])
        total_s += float(each_s.sum())
        variance += timed.sum_variance(each_s)
    return math.sqrt(variance) / total_s if total_s else 0.0


def fitted_log_sd(factors: FactorSet, param: str) -> float:
    """How unsure a fitted parameter of the step is while the others stay as they are: 1 / sqrt of its place on the
    diagonal of the inverse covariance, and no more than it is by itself, since some parameters are one and the same.

    What a record's whole steps could not tell apart (products that are slower, traffic that is faster) moves together,
    not one by one.
    """
    import numpy as np

    if param not in factors.step_params:
        return 0.0
    place, covariance = factors.step_params.index(param), np.array(factors.step_covariance)
    alone = math.sqrt(max(float(covariance[place, place]), 0.0))
    precision = float(np.linalg.pinv(covariance, hermitian=True)[place, place])
    return min(alone, 1.0 / math.sqrt(precision)) if precision > 0.0 else alone


def _phase_ends(question: Question, base: Forecast) -> list[Ends]:
    """Phases around the training, over the interval of their time; the user's own minutes of others stay."""
    ends = []
    for phase in () if base.whole_run is None else base.whole_run.phases:
        if phase.name in ("train", "interruptions") or not phase.hours.low < phase.hours.high:
            continue
        minutes = [hours * 60 for hours in (phase.hours.low, phase.hours.high)]
        low, high = ({"phase_min": {**question.whole_run.phase_min, phase.name: value}} for value in minutes)
        labels = (f"{minutes[0]:.3g} min", f"{minutes[1]:.3g} min")
        ends.append(Ends(name=f"phase {phase.name}", kind="uncertain", labels=labels, low=(low, {}), high=(high, {})))
    return ends


def _price_end(ask: Ask, question: Question, base: Forecast) -> Ends | None:
    """From the offer that was taken to the median one of the same kind, among those that leave fewest GPUs idle: a
    machine of eight for one GPU is a machine of another size, not a dearer offer."""
    from tunecast.catalogs.price_book import price_book
    from tunecast.model.cost import candidate_prices

    if base.offer is None or ask.options.get("usd_per_gpu_hour") is not None or base.offer.get("usd_per_hour") is None:
        return None
    taken = base.offer["usd_per_hour"]
    kinds = (str(base.offer["price_type"]),)
    book = price_book(tuple(ask.options.get("prices") or ()))
    offers = candidate_prices(base.gpu, base.run.num_gpus, kinds, book=book, options=question.options)
    fewest = min((price.offer["gpus_paid"] for price in offers), default=0)
    rents = sorted(price.usd_per_h for price in offers if price.offer["gpus_paid"] == fewest)
    usual = rents[len(rents) // 2] if rents else taken
    if usual <= taken:
        return None
    labels = (f"${taken:.2f}/h", f"${usual:.2f}/h, the median offer")
    high = {"usd_per_gpu_hour": usual / base.run.num_gpus}
    return Ends(name="offer", kind="uncertain", labels=labels, low=({}, {}), high=(high, {}))
