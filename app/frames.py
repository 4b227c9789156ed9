"""Forecasts as a pandas table, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunecast.model.units import gib

if TYPE_CHECKING:
    import pandas as pd

    from tunecast.model.forecast import Forecast
    from tunecast.model.value import Value


def frame(forecasts: Iterable[Forecast]) -> pd.DataFrame:
    """One row per forecast, in the order given; units in the column names, intervals as ``_low`` and ``_high``."""
    import pandas as pd

    from tunecast.catalogs.errors import InputError
    from tunecast.model.forecast import Forecast

    forecasts = list(forecasts) if isinstance(forecasts, Iterable) else [forecasts]
    if not all(isinstance(forecast, Forecast) for forecast in forecasts):
        raise InputError("frame takes forecasts, as tunecast.estimate returns them.")
    return pd.DataFrame([row(forecast) for forecast in forecasts])


def row(forecast: Forecast) -> dict[str, Any]:
    """One forecast, flat; unknown is None."""
    process, usable = forecast.memory.process_bytes, forecast.memory.usable_bytes
    return {
        "model": forecast.model,
        "gpu": forecast.gpu,
        "num_gpus": forecast.run.num_gpus,
        "method": forecast.run.method,
        "verdict": forecast.verdict,
        "fit_probability": forecast.fit_probability,
        **spread("allocated_gib", forecast.memory.allocated_bytes.scaled(gib(1))),
        **spread("process_gib", None if process is None else process.scaled(gib(1))),
        "usable_gib": None if usable is None else gib(usable),
        **spread("step_time_s", forecast.step_time_s),
        **spread("tokens_per_s", forecast.tokens_per_s),
        "mfu": forecast.mfu,
        "bound_by": forecast.bound_by,
        **spread("total_time_h", forecast.total_time_h),
        **spread("train_time_h", None if forecast.whole_run is None else forecast.whole_run.train_time_h),
        **spread("cost_usd", forecast.cost_usd),
        **spread("cost_per_million_tokens_usd", forecast.cost_per_million_tokens_usd),
        "provider": (forecast.offer or {}).get("provider"),
    }


def spread(name: str, value: Value | None) -> dict[str, float | None]:
    """A value and the ends of its 80% interval as three columns."""
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
