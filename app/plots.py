"""Pictures, drawn with matplotlib (extra ``report``), which is imported only when one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, TunecastError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
WIDTH_IN, HEIGHT_IN = 9.0, 5.0
PNG_DPI = 150
MISSING = "A picture needs matplotlib, which is not installed; run `pip install 'tunecast[report]'`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: what it is called and its points; `x` may be numbers or days."""

    label: str
    x: Sequence[Any]
    y: Sequence[float]


def check_plot_path(path: Path) -> None:
    """Raises, before any work is done: InputError unless it is .svg or .png, TunecastError without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path} is neither .svg nor .png; type for example --plot {path.stem or 'plot'}.svg.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path} cannot be written: there is no folder {path.absolute().parent}; name another.")
    if importlib.util.find_spec("matplotlib") is None:
        raise TunecastError(MISSING)


def new_figure(*, height_in: float = HEIGHT_IN) -> Figure:
    """An empty figure; raises TunecastError that names the extra when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TunecastError(MISSING) from error
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG or PNG by its suffix; the same figure gives the same SVG, byte for byte."""
    from matplotlib import rc_context

    check_plot_path(path)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    with rc_context({"svg.hashsalt": "tunecast", "svg.fonttype": "none"}):
        try:
            figure.savefig(path, dpi=PNG_DPI, metadata=metadata)
        except OSError as error:
            raise InputError(f"The picture {path} cannot be written ({error.strerror}); name another file.") from error
    return path


def line_plot(path: Path, series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> Path:
    """Lines with a mark at each point and a legend beside them; y starts at 0, so that changes keep their size."""
    check_plot_path(path)
    figure = new_figure()
    axes = figure.subplots()
    for line in series:
        axes.plot(list(line.x), list(line.y), marker="o", label=line.label)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.tick_params(axis="x", rotation=30)
    figure.legend(loc="outside right upper", fontsize="small")
    return save_figure(figure, path)
