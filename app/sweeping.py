"""One forecast under changed inputs: what every kind of sweep is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.model.units import TERA, gib
from tunecast.swept_inputs import SPECIAL

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a sweep looks at."""

    title: str
    unit: str
    of: Callable[[Forecast], float | None]


def _cost(forecast: Forecast) -> float | None:
    return None if forecast.cost_usd is None else forecast.cost_usd.value


def _time(forecast: Forecast) -> float | None:
    return None if forecast.total_time_h is None else forecast.total_time_h.value


def _memory(forecast: Forecast) -> float | None:
    view = forecast.memory.process_bytes or forecast.memory.allocated_bytes
    return gib(view.value)


def _per_million(forecast: Forecast) -> float | None:
    cost = forecast.cost_per_million_tokens_usd
    return None if cost is None else cost.value


METRICS = {
    "cost": Metric(title="cost", unit="$", of=_cost),
    "time": Metric(title="whole run", unit="h", of=_time),
    "train": Metric(title="training", unit="h", of=lambda f: f.phases_h.get("train")),
    "load": Metric(title="load", unit="h", of=lambda f: f.phases_h.get("load")),
    "step": Metric(title="optimizer step", unit="s", of=lambda f: f.step_time_s.value),
    "speed": Metric(title="speed", unit="tokens/s", of=lambda f: f.tokens_per_s.value),
    "memory": Metric(title="memory of the process", unit="GiB", of=_memory),
    "cost-per-million": Metric(title="cost per million tokens", unit="$", of=_per_million),
}
"""By the word that ``--metric`` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What was asked, before anything is changed."""

    model: str
    gpu: str
    options: Mapping[str, Any]
    """Of ``tunecast.estimate``: the run, its amount, prices, records and what is around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination: its forecast, or why there is none."""

    settings: Mapping[str, Any]
    forecast: Forecast | None
    why_not: str | None = None


def forecast_of(ask: Ask, settings: Mapping[str, Any], scales: Mapping[str, float] | None = None) -> Forecast:
    """The forecast with some inputs set and some factors multiplied; raises TunecastError where there is none."""
    from tunecast.asking import asked_question
    from tunecast.model.estimate import forecast

    plain = {name: value for name, value in settings.items() if name not in SPECIAL}
    options = {**ask.options, **plain, **_disk(ask, settings)}
    question, targets, _ = asked_question(settings.get("model", ask.model), gpu=ask.gpu, **options)
    if len(targets) != 1:
        raise InputError(f"A sweep looks at one GPU, but {ask.gpu} is {len(targets)}; name one with --gpu.")
    if "mfu" in settings:
        question = replace(question, achieved_tflops=_achieved(settings["mfu"], targets[0].peaks))
    if scales:
        question = replace(question, factor_scales=scales)
    return forecast(question, targets[0])


def point(ask: Ask, settings: Mapping[str, Any], scales: Mapping[str, float] | None = None) -> Point:
    """The same, where a combination that is refused is an answer too."""
    try:
        return Point(settings=settings, forecast=forecast_of(ask, settings, scales))
    except TunecastError as error:
        return Point(settings=settings, forecast=None, why_not=str(error))


def _disk(ask: Ask, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Disk rate times efficiency as the rate that the load phase reads."""
    from tunecast.model.whole_run_options import READERS

    if not {"disk_mb_per_s", "load_efficiency"} & set(settings):
        return {}
    rate = settings.get("disk_mb_per_s")
    if rate is None:
        raise InputError("A sweep over load_efficiency needs a disk rate; add --over disk_mb_per_s=500,1000,2000.")
    share = settings.get("load_efficiency", 1.0)
    if not 0.0 < share <= 1.0:
        raise InputError(f"load_efficiency is {share:g}, but it is a share of the disk's rate, from above 0 to 1.")
    given = READERS["phase_rate"]("phase_rate", ask.options.get("phase_rate") or ())
    return {"phase_rate": {**given, "disk_read_mb_per_s": rate * share}}


def _achieved(mfu: float, peaks: Mapping[str, float]) -> float:
    """TFLOP/s of this share of the card's dense 16-bit peak."""
    peak = peaks.get("bf16") or peaks.get("fp16")
    if peak is None:
        raise InputError("The peak of this GPU is not known, so a sweep over mfu means nothing; name another --gpu.")
    if not 0 < mfu <= 1:
        raise InputError(f"mfu is {mfu:g}, but it is a share of the peak: above 0, at most 1.")
    return mfu * peak / TERA
