"""Measured against catalog as a picture: shares of the datasheet, device by device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunecast.catalogs.errors import InputError
from tunecast.plots import new_figure, save_figure
from tunecast.tables import digits

if TYPE_CHECKING:
    from tunecast.against_catalog import CatalogComparison

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#718096")
ROW_IN = 0.3
BAR = 0.8
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def plot_shares(comparisons: Sequence[CatalogComparison], path: Path) -> Path:
    """One group of bars per quantity that the catalog knows; raises InputError where it knows none (a CPU)."""
    names = list(dict.fromkeys(q.name for c in comparisons for q in c.quantities if q.share is not None))
    if not names:
        raise InputError("The catalog says nothing about these devices, so there is nothing to draw; leave --plot out.")
    figure = new_figure(height_in=1.5 + ROW_IN * len(names) * max(len(comparisons), 1.5))
    axes = figure.subplots()
    height = BAR / len(comparisons)
    for index, comparison in enumerate(comparisons):
        known = {q.name: q for q in comparison.quantities if q.share is not None}
        rows = [(len(names) - 1 - names.index(name) - index * height, q) for name, q in known.items()]
        colour = COLOURS[index % len(COLOURS)]
        axes.barh([y for y, _ in rows], [q.share or 0.0 for _, q in rows], height=height * 0.9, color=colour,
                  label=f"{comparison.device} ({Path(comparison.record).name})")  # fmt: skip
        for y, q in rows:
            words = f"{q.share:.0%}, {digits(q.measured)} {q.unit}"
            axes.text((q.share or 0.0) + 0.01, y, words, va="center", fontsize=7, bbox=WHITE)
    axes.axvline(1.0, color="black", linewidth=1)
    middle = BAR / 2 - height / 2
    axes.set_yticks([len(names) - 1 - i - middle for i in range(len(names))], names, fontsize=8)
    axes.margins(x=0.25)
    axes.set(title="Measured against the datasheet", xlabel="share of the catalog's figure")
    figure.legend(loc="outside lower center", fontsize="small")
    return save_figure(figure, path)
