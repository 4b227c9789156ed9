"""Pictures of sweeps: a tornado, a heat map, lines of one input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.model.counts import parse_count
from tunecast.plots import HEIGHT_IN, Series, check_plot_path, line_plot, new_figure, save_figure
from tunecast.sweep_table import change, grid_mark, memory_gib, shown, starred

if TYPE_CHECKING:
    from tunecast.sweep_result import Sweep

CHOICE, UNCERTAIN, MUTED = "#2b6cb0", "#c05621", "#718096"
"""Blue for what one chooses, orange for what nobody knows: told apart by the colour-blind too."""
ROW_IN = 0.32
MOST_BARS = 20


def plot_sweep(found: Sweep, path: Path) -> Path:
    """Draw it as its kind is drawn; raises TunecastError without matplotlib."""
    check_plot_path(path)
    if found.kind == "tornado":
        return _tornado(found, path)
    if found.kind == "what-if":
        return _techniques(found, path)
    return _heat_map(found, path) if len(found.dimensions) == 2 else _line(found, path)


def _title(found: Sweep) -> str:
    return (
        f"{found.metric.title} ({found.metric.unit}) on {found.base.gpu}: {found.base.model}, {found.base.run.method}"
    )


def _tornado(found: Sweep, path: Path) -> Path:
    bars = [bar for bar in found.bars if bar.swing > 0][:MOST_BARS][::-1]
    figure = new_figure(height_in=1.5 + ROW_IN * len(bars))
    axes = figure.subplots()
    for row, bar in enumerate(bars):
        ends = [bar.base if end is None else end for end in (bar.low, bar.high)]
        colour = CHOICE if bar.kind == "choice" else UNCERTAIN
        axes.barh(row, ends[1] - ends[0], left=ends[0], color=colour, height=0.7)
    asked = found.metric.of(found.base)
    if asked is not None:
        axes.axvline(asked, color="black", linewidth=1)
    axes.use_sticky_edges = False  # else the longest bar ends in the frame
    axes.margins(x=0.03)
    axes.set_yticks(
        range(len(bars)), [_plain(f"{bar.name}: {bar.low_setting} to {bar.high_setting}") for bar in bars], fontsize=8
    )
    axes.set(
        title=_title(found),
        xlabel="blue: yours to choose\norange: an 80% interval with all else as it is, or the median offer",
    )
    return save_figure(figure, path)


def _plain(text: str) -> str:
    """Two dollar signs would make a formula of what stands between them."""
    return text.replace("$", r"\$")


def _heat_map(found: Sweep, path: Path) -> Path:
    """Cells by the logarithm of the metric where it spans more than a factor of ten, with the figure in each."""
    from matplotlib.colors import LogNorm, Normalize

    (down, rows), (across, columns) = found.dimensions
    values = [found.value(at) for at in found.points]
    known = [value for value in values if value is not None]
    wide = min(known) > 0 and max(known) > 10 * min(known)
    norm = (LogNorm if wide else Normalize)(min(known), max(known))
    figure = new_figure(height_in=max(HEIGHT_IN * 0.5, 1.5 + 0.6 * len(rows)))
    axes = figure.subplots()
    width = len(columns)
    table: list[list[Any]] = [
        [float("nan") if v is None else v for v in values[i * width : (i + 1) * width]] for i in range(len(rows))
    ]
    image = axes.imshow(table, aspect="auto", cmap="viridis", norm=norm)
    for i, at in enumerate(found.points):
        value = values[i]
        dark = value is not None and norm(value) < 0.6
        axes.text(i % width, i // width, shown(found, value) + grid_mark(at), ha="center", va="center", fontsize=8,
                  color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(width), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    marks = "; ".join(starred(found))
    axes.set(title=_title(found), xlabel=across + (f"   ({marks})" if marks else ""), ylabel=down)
    figure.colorbar(image, ax=axes, label=found.metric.unit)
    return save_figure(figure, path)


def _line(found: Sweep, path: Path) -> Path:
    ((name, values),) = found.dimensions
    pairs = [(x, found.value(at)) for x, at in zip(values, found.points, strict=True)]
    known = [(_place(x), y) for x, y in pairs if y is not None]
    if all(isinstance(x, int | float) for x, _ in known):
        known.sort()
    series = Series(label=found.metric.title, x=[x for x, _ in known], y=[y for _, y in known])
    label = f"{found.metric.title}, {found.metric.unit}"
    return line_plot(path, [series], title=_title(found), x_label=name, y_label=label)


def _place(x: Any) -> float | str:
    """Where a value stands on the axis: at its number, ``10M`` at ten million, words by themselves."""
    if isinstance(x, int | float):
        return x
    try:
        return parse_count(x, name="over")
    except InputError:
        return str(x)


def _techniques(found: Sweep, path: Path) -> Path:
    """Memory and speed beside each other."""
    known = [(at, at.forecast) for at in found.points if at.forecast is not None][::-1]
    figure = new_figure(height_in=1.5 + ROW_IN * len(known))
    memory, speed = figure.subplots(1, 2, sharey=True)
    base = found.base
    for row, (_, told) in enumerate(known):
        own, asked = memory_gib(told), memory_gib(base)
        memory.barh(row, own, color=UNCERTAIN if told.fits is False else CHOICE, height=0.7)
        memory.text(own, row, f" {change(own, asked)}", va="center", fontsize=7)
        tokens = told.tokens_per_s.value
        speed.barh(row, tokens, color=MUTED, height=0.7)
        speed.text(tokens, row, f" {change(tokens, base.tokens_per_s.value)}", va="center", fontsize=7)
    for axes in (memory, speed):
        axes.margins(x=0.15)
    if base.memory.usable_bytes is not None:
        from tunecast.model.units import gib

        memory.axvline(gib(base.memory.usable_bytes), color="black", linewidth=1)
    memory.set_yticks(range(len(known)), [str(at.settings["what if"]) for at, _ in known], fontsize=8)
    memory.set(xlabel="GiB per GPU (line: the card; orange: does not fit)")
    speed.set(xlabel="tokens/s of the job")
    figure.suptitle(f"{base.model}, {base.run.method}, on {base.gpu}")
    return save_figure(figure, path)
