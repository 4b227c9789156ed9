"""Tables for people: the shapes and the words that all commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunecast.model.units import GIGA, HOUR_S, KILO, MEGA, MILLISECOND_S, TERA, gib

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

DASH = "–"
"""Unknown, or does not apply."""


def plain_table(*columns: str, title: str = "", right: tuple[str, ...] = ()) -> Table:
    """A table without vertical rules, so that it survives copying; `right` names number columns."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def keep_whole(table: Table, *, shrinking: str = "") -> Table:
    """On a narrow terminal fold the column `shrinking`, one of `cuttable` cells, or the first; no number is cut."""
    from rich.text import Text

    named = [column for column in table.columns if column.header == shrinking]
    shrinks = [c for c in table.columns if any(isinstance(cell, Text) for cell in c.cells)]
    shrinking_columns = named or shrinks or table.columns[:1]
    for column in table.columns:
        column.no_wrap = column not in shrinking_columns
    table.columns[0].overflow = "fold"
    return table


def cuttable(text: str) -> Text:
    """A cell that may lose its end on a narrow terminal."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def dash(value: object) -> str:
    """A value as text; unknown is a dash."""
    return DASH if value is None or value == "" else str(value)


def digits(value: float) -> str:
    """Three significant digits, in plain notation: 0.0123, 1.23, 12.3, 123, 1,230."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    places = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:.{places}f}"


def seconds(value_s: float) -> str:
    """A step time with its unit."""
    return f"{digits(value_s / MILLISECOND_S)} ms" if value_s < 1 else f"{digits(value_s)} s"


def duration(value_h: float) -> str:
    """A run's length: seconds, minutes, hours or days."""
    if 0 < value_h * 60 < 1:
        return seconds(value_h * HOUR_S)
    if value_h < 1:
        return f"{digits(value_h * 60)} min"
    return f"{digits(value_h)} h" if value_h < 100 else f"{digits(value_h / 24)} d"


def dollars(value_usd: float) -> str:
    """An amount of money."""
    return f"${value_usd:,.2f}" if value_usd < 100 else f"${value_usd:,.0f}"


def count(value: float) -> str:
    """A count with a suffix: 12.3k, 4.56M, 7.89B, 1.23T."""
    for size, suffix in ((TERA, "T"), (GIGA, "B"), (MEGA, "M"), (KILO, "k")):
        if abs(value) >= size:
            return f"{digits(value / size)}{suffix}"
    return digits(value)


def gib_text(n_bytes: float | None) -> str:
    """Bytes as GiB with one decimal."""
    return DASH if n_bytes is None else f"{gib(n_bytes):.1f}"


def above_bar(error: float, bar: float, sign: str = "", between: str = "") -> str:
    """An error and the bar that it is above, in percent: the bar as it was typed, the error to as many decimals as tell
    the two apart."""
    decimals = next((n for n in range(1, 12) if round(100.0 * abs(error), n) > 100.0 * bar), 12)
    return f"{error:{sign}.{decimals}%}{between}, above {100.0 * bar:.12g}%"
