"""Money against time as a picture: the front with its intervals, and the cards that lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.plots import check_plot_path, new_figure, save_figure

if TYPE_CHECKING:
    from tunecast.model.value import Value
    from tunecast.recommendation import Recommendation


NAMES_TURN_AT = 0.7
"""Share of the picture's width from which a name has no room to its right."""


def money_against_time(path: Path, found: Recommendation) -> Path:
    """Draw it; both axes are logarithmic, since ratios are what the balance is made of."""
    from matplotlib.ticker import LogLocator, NullFormatter

    check_plot_path(path)
    figure = new_figure()
    axes = figure.subplots()
    draw_losers(axes, found)
    draw_front(axes, found)
    axes.set(xscale="log", yscale="log", xlabel="whole run, hours", ylabel="whole run, USD")
    axes.set_title(f"{found.model}: what to rent")
    draw_names(axes, found)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # more labels than these overlap
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", labelsize="small")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="upper right", fontsize="small")
    return save_figure(figure, path)


def arms(value: Value) -> tuple[float, float]:
    """Lengths of an error bar below and above."""
    return value.value - value.low, value.high - value.value


def draw_front(axes: Any, found: Recommendation) -> None:
    """The front as a line of points with 80% intervals."""
    if not found.front:
        return
    times = [picked.forecast.total_time_h for picked in found.front]
    costs = [picked.forecast.cost_usd for picked in found.front]
    known = [(time, cost) for time, cost in zip(times, costs, strict=True) if time is not None and cost is not None]
    x, y = [time.value for time, _ in known], [cost.value for _, cost in known]
    x_arms = list(zip(*(arms(time) for time, _ in known), strict=True))
    y_arms = list(zip(*(arms(cost) for _, cost in known), strict=True))
    axes.errorbar(
        x, y, xerr=x_arms, yerr=y_arms, fmt="o-", elinewidth=0.8, capsize=2, label="not beaten, with 80% intervals"
    )


def draw_names(axes: Any, found: Recommendation) -> None:
    """The three named plans; where a name would run through the frame it stands left of its point, below the front."""
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}
    for at, words in labels(found).items():
        share = axes.transAxes.inverted().transform(axes.transData.transform(at))[0]
        offset, side = ((6, 6), "left") if share < NAMES_TURN_AT else ((-6, -14), "right")
        axes.annotate(words, at, textcoords="offset points", xytext=offset, ha=side, fontsize="small", bbox=ground)


def labels(found: Recommendation) -> dict[tuple[float, float], str]:
    """What stands beside (hours, USD): the names of the plan there, which may be two or all three."""
    names: dict[tuple[float, float], list[str]] = {}
    plans: dict[tuple[float, float], str] = {}
    for name, picked in (("cheapest", found.cheapest), ("balance", found.balance), ("fastest", found.fastest)):
        if picked is None or picked.forecast.total_time_h is None or picked.forecast.cost_usd is None:
            continue
        at = (picked.forecast.total_time_h.value, picked.forecast.cost_usd.value)
        names.setdefault(at, []).append(name)
        plans[at] = f"{picked.candidate.num_gpus} x {picked.forecast.gpu}"
    return {at: f"{' and '.join(found_names)}: {plans[at]}" for at, found_names in names.items()}


def draw_losers(axes: Any, found: Recommendation) -> None:
    """Every card that lost, by its best plan."""
    lost = [rejected.candidate for rejected in found.rejected if rejected.candidate is not None]
    if lost:
        axes.plot(
            [c.time_h for c in lost], [c.usd for c in lost], ".", color="0.6", label="other cards, best plan each"
        )
