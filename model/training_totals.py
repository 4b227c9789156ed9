"""The whole training as totals: FLOPs from the operations and by the classic 6ND, GPU-hours and days."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunecast.model.amount import Amount
from tunecast.model.units import HOUR_S
from tunecast.model.value import Value, product

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast

DAY_H = 24.0

CLASSIC_FLOPS_PER_PARAM_TOKEN = 6.0
"""Forward 2, backward 4 (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
CLASSIC_FLOPS_WITH_RECOMPUTE = 8.0
"""And 2 more when every forward is repeated for the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """What the training itself takes, start-up and saves left out."""

    tokens: float
    model_flops: float
    """Required work, from the operations."""
    executed_flops: float
    """What the kernels run, recomputation included."""
    classic_flops: float
    """6 N D: six per parameter that a token goes through, and token; knows neither attention nor frozen weights."""
    classic_flops_with_recompute: float
    gpu_hours: float
    gpu_hours_low: float
    gpu_hours_high: float
    """80% interval, by that of a step and of what is assumed of the data."""
    days: float


def training_totals(forecast: Forecast, amount: Amount | None, times: float = 1.0) -> TrainingTotals | None:
    """Totals of a forecast whose amount of data is known, trained so many `times` (trials and repeats)."""
    if amount is None:
        return None
    steps = amount.steps * amount.full_frac(forecast.run) * times
    tokens = steps * round(forecast.tokens_per_s.value * forecast.step_time_s.value)
    of_data = Value(value=1.0, low=amount.least, high=amount.most)
    hours = product(forecast.step_time_s.scaled(steps / HOUR_S), of_data)
    gpus = forecast.run.num_gpus
    classic = forecast.architecture.active_params * tokens
    return TrainingTotals(
        tokens=tokens,
        model_flops=steps * forecast.model_flops_per_step,
        executed_flops=steps * forecast.executed_flops_per_step,
        classic_flops=CLASSIC_FLOPS_PER_PARAM_TOKEN * classic,
        classic_flops_with_recompute=CLASSIC_FLOPS_WITH_RECOMPUTE * classic,
        gpu_hours=hours.value * gpus,
        gpu_hours_low=hours.low * gpus,
        gpu_hours_high=hours.high * gpus,
        days=hours.value / DAY_H,
    )
