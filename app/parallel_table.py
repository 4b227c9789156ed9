"""Lines of a forecast in detail: how the job scales, and the whole training as totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tunecast.tables import DASH, digits, duration, seconds

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast

Line = tuple[str, str, str]
CLASSIC_CARDS = 8
"""Cards whose classic estimate stands under a table; of more, in the JSON."""


def scaling_rows(forecast: Forecast) -> Iterable[Line]:
    """How much of several GPUs works, what bounds it, and Amdahl's estimate if it was asked for."""
    from tunecast.model.parallel_scaling import NOTHING

    scaling = forecast.scaling
    if scaling is None:
        return
    bound = "nothing is lost" if scaling.bound_by == "nothing" else scaling.bound_by
    if scaling.efficiency > 1.0 + NOTHING:  # which no loss explains, but `scaling_notes`
        bound = "why it is more than all, a note says"
    yield (
        "scaling efficiency",
        f"{scaling.efficiency:.0%}",
        f"{scaling.speedup:,.1f} of {forecast.run.num_gpus:,} GPUs; {bound}",
    )
    if scaling.serial_fraction is None:
        yield "  serial fraction", DASH, "slower than one GPU"
    else:
        yield "  serial fraction", f"{scaling.serial_fraction:.2g}", "Amdahl's, as a result"
    if scaling.amdahl:
        amdahl = scaling.amdahl
        yield (
            f"  classic at {amdahl.serial_fraction:g}",
            seconds(amdahl.step_time_s),
            f"{amdahl.speedup:,.1f} of {forecast.run.num_gpus:,} GPUs",
        )


def classic_notes(rows: Sequence[Forecast]) -> list[str]:
    """Amdahl's estimates of a table's cards, where they were asked for: a line for each number of GPUs."""
    cards: dict[tuple[int, float, float], list[str]] = {}
    for one in rows:
        if one.scaling is not None and one.scaling.amdahl is not None:
            amdahl = one.scaling.amdahl
            key = (one.run.num_gpus, amdahl.serial_fraction, amdahl.speedup)
            cards.setdefault(key, []).append(f"{one.gpu} {seconds(amdahl.step_time_s)}")
    return [
        f"- Amdahl's classic step at {fraction:g}, {speedup:,.1f} of {gpus:,} GPUs: {', '.join(named[:CLASSIC_CARDS])}"
        + (f" and {len(named) - CLASSIC_CARDS} more (--json)" if len(named) > CLASSIC_CARDS else "")
        for (gpus, fraction, speedup), named in cards.items()
    ]


def totals_rows(forecast: Forecast) -> Iterable[Line]:
    """FLOPs beside the classic 6ND, and GPU-hours, of jobs that are full trainings or on several GPUs."""
    totals, run = forecast.totals, forecast.run
    if totals is None or (run.has_adapters and run.num_gpus == 1):
        return
    active = ", N active" if forecast.architecture.active_params < forecast.total_params else ""
    yield "training FLOPs", f"{totals.model_flops:.3g}", f"6ND: {totals.classic_flops:.3g}{active}"
    with_recompute = f"8ND: {totals.classic_flops_with_recompute:.3g}" if run.gradient_checkpointing else ""
    yield "  executed", f"{totals.executed_flops:.3g}", with_recompute
    length = f"{digits(totals.days)} days" if totals.days >= 1 else duration(totals.gpu_hours / run.num_gpus)
    low, high = totals.gpu_hours_low, totals.gpu_hours_high
    interval = "" if low == high else f"{digits(low)}–{digits(high)}; "
    yield "GPU-hours", digits(totals.gpu_hours), interval + length
