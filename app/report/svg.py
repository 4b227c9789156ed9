"""Charts as inline SVG text: no library, no script, colours from the page's own variables, readable aloud."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
NARROW_WIDTH = 340
"""Of a chart as it is drawn for a phone: about the pixels that its page has."""
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 16, 44
ROW = 26
NARROW_ROW = 38
"""With the names above the bars."""
LABEL_WIDTH = 210
MANY_TICKS_BELOW = 3000.0
"""Span of an axis below which 2 and 5 are marked beside the powers of ten."""
CHARACTER = 6.6
"""Width of a character at the charts' font size, about."""
NAME_CHARACTER = 7.2
"""The same of the bold names in a scatter."""


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def at_both_widths(draw: Callable[[float, str], str], name: str) -> str:
    """A chart for a wide page and for a narrow one; the page's style shows one of them."""
    return (
        f'<div class="at-wide">{draw(WIDTH, name)}</div><div class="at-narrow">{draw(NARROW_WIDTH, name + "-n")}</div>'
    )


def figure(inner: str, *, width: float, height: float, title: str, description: str, name: str) -> str:
    """An SVG element that says what it shows to those who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>{inner}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    """A line of text."""
    cls = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{cls}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A stroke of a named kind."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    """A filled box; `told` is what a pointer resting on it says."""
    inner = f"<title>{escape(told)}</title>" if told else ""
    size = f'width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}">{inner}</rect>'


@dataclass(frozen=True, slots=True, kw_only=True)
class LogScale:
    """Positive values on a logarithmic axis."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Position of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten within the axis; only the powers where these are many."""
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if self.high / self.low < MANY_TICKS_BELOW else (1,)
        found = [step * 10.0**exponent for exponent in exponents for step in steps]
        return [value for value in found if self.low <= value <= self.high]


def log_scale(values: Sequence[float], start: float, end: float) -> LogScale:
    """An axis with a little room beyond the values."""
    return LogScale(low=min(values) / 1.25, high=max(values) * 1.25, start=start, end=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One plan of money against time."""

    name: str
    x: float
    y: float
    told: str
    front: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    mark: str = ""
    """What it is of the front: cheapest, balance, fastest; these are always named."""


def scatter(dots: Sequence[Dot], *, width: float, x_label: str, y_label: str, title: str, name: str) -> str:
    """Points on two logarithmic axes; those of the front are joined, named and carry their intervals."""
    height = 420.0
    spans_x = [v for d in dots for v in (d.x, *(d.x_range or ()))]
    spans_y = [v for d in dots for v in (d.y, *(d.y_range or ()))]
    xs, ys = log_scale(spans_x, LEFT, width - RIGHT), log_scale(spans_y, height - BOTTOM, TOP)
    parts = [_axes(xs, ys, height, x_label, y_label)]
    front = sorted((dot for dot in dots if dot.front), key=lambda dot: dot.x)
    path = " ".join(f"{xs.at(dot.x):.1f},{ys.at(dot.y):.1f}" for dot in front)
    parts.append(f'<polyline points="{path}" class="front"/>')
    for dot in sorted(dots, key=lambda dot: dot.front):
        parts += _dot(dot, xs, ys)
    parts += _names(front, xs, ys)
    best = ", ".join(f"{dot.name} {dot.told}" for dot in front)
    told = f"Best plans: {best}"
    return figure("".join(parts), width=width, height=height, title=title, description=told, name=name)


def _axes(xs: LogScale, ys: LogScale, height: float, x_label: str, y_label: str) -> str:
    parts = []
    for tick in xs.ticks():
        parts.append(line(xs.at(tick), TOP, xs.at(tick), height - BOTTOM, "grid"))
        parts.append(text(xs.at(tick), height - BOTTOM + 16, f"{tick:g}", anchor="middle", kind="tick"))
    for tick in ys.ticks():
        parts.append(line(LEFT, ys.at(tick), xs.end, ys.at(tick), "grid"))
        parts.append(text(LEFT - 6, ys.at(tick) + 4, f"{tick:g}", anchor="end", kind="tick"))
    parts.append(text((LEFT + xs.end) / 2, height - 6, x_label, anchor="middle"))
    parts.append(
        f'<text transform="translate(14 {height / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(parts)


def _dot(dot: Dot, xs: LogScale, ys: LogScale) -> list[str]:
    x, y = xs.at(dot.x), ys.at(dot.y)
    parts = []
    if dot.x_range:
        parts.append(line(xs.at(dot.x_range[0]), y, xs.at(dot.x_range[1]), y, "whisker"))
    if dot.y_range:
        parts.append(line(x, ys.at(dot.y_range[0]), x, ys.at(dot.y_range[1]), "whisker"))
    kind, radius = ("dot best", 6) if dot.front else ("dot", 4)
    told = f"<title>{escape(dot.name)}: {escape(dot.told)}</title>"
    return [*parts, f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{told}</circle>']


def _names(front: Sequence[Dot], xs: LogScale, ys: LogScale) -> list[str]:
    """Names beside the points of the front; the cheapest, the balance and the fastest have theirs in any case."""
    parts: list[str] = []
    taken: list[Box] = [_around(xs.at(dot.x), ys.at(dot.y)) for dot in front]
    for dot in sorted(front, key=lambda dot: not dot.mark):
        words = f"{dot.mark}: {dot.name}" if dot.mark else dot.name
        places = list(_places(xs.at(dot.x), ys.at(dot.y), words, xs.end, far=bool(dot.mark)))
        free = [box for box in places if not any(_overlap(box, other) for other in taken)]
        if free or dot.mark:
            box = (free or places)[0]
            taken.append(box)
            parts.append(text(box[0], box[3] - 3, words, kind="name"))
    return parts


def _around(x: float, y: float) -> Box:
    return x - 6, y - 6, x + 6, y + 6


def _places(x: float, y: float, words: str, end: float, *, far: bool) -> Iterator[Box]:
    """Where a name may stand: beside its point, above or below it, nearest first, always inside the axes."""
    width = len(words) * NAME_CHARACTER
    for rise in (-20, 8, *((-34, 22, -48, 36, -62, 50) if far else ())):
        for left in (x + 9, x - 9 - width, x - width / 2):
            left = min(max(left, LEFT + 2), end - 2 - width)
            yield left, y + rise, left + width, y + rise + 13


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a stacked bar."""

    name: str
    value: float
    told: str


def stacked(parts: Sequence[Part], *, width: float, limit: float | None, limit_name: str, title: str, name: str) -> str:
    """One horizontal bar of parts with a legend, and a mark where the limit is."""
    total = sum(part.value for part in parts)
    end = max(total, limit or 0.0) * 1.04
    scale = (width - RIGHT - 8) / end
    shapes, x = [], 8.0
    for index, part in enumerate(parts):
        shapes.append(rect(x, 20, part.value * scale, 34, f"p{index % 10}", f"{part.name}: {part.told}"))
        x += part.value * scale
    if limit is not None:
        shapes.append(line(8 + limit * scale, 10, 8 + limit * scale, 64, "limit"))
        anchor = "end" if limit * scale > width / 2 else "start"
        shapes.append(
            text(8 + limit * scale + (-5 if anchor == "end" else 5), 12, limit_name, anchor=anchor, kind="tick")
        )
    legend, y = _legend(parts, 84.0, width)
    told = ", ".join(f"{part.name} {part.told}" for part in parts)
    return figure("".join(shapes) + legend, width=width, height=y, title=title, description=told, name=name)


def _legend(parts: Sequence[Part], y: float, room: float) -> tuple[str, float]:
    """Coloured names, wrapped; (shapes, height used)."""
    shapes, x = [], 8.0
    for index, part in enumerate(parts):
        words = f"{part.name} {part.told}"
        width = 22 + len(words) * CHARACTER
        if x + width > room and x > 8:
            x, y = 8.0, y + 20
        shapes.append(rect(x, y - 10, 12, 12, f"p{index % 10}"))
        shapes.append(text(x + 17, y, words, kind="tick"))
        x += width + 8
    return "".join(shapes), y + 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar of a list of bars, from one value to another."""

    label: str
    low: float
    high: float
    told: str
    kind: str = "p0"


def bars(rows: Sequence[Row], *, width: float, base: float | None, title: str, name: str) -> str:
    """Horizontal bars, one under the other; from zero, or around a base that is marked.

    Names stand beside their bars, and above them where there is no room for that.
    """
    values = [v for row in rows for v in (row.low, row.high)]
    low, high = (0.0 if base is None else min(*values, base)), max(*values, base or 0.0)
    above = width < WIDTH
    row_height, left = (NARROW_ROW, 4.0) if above else (ROW, float(LABEL_WIDTH))
    scale = (width - left - (4 if above else 110)) / ((high - low) or 1.0)
    shapes = []
    for index, row in enumerate(rows):
        y = 8 + index * row_height
        start, end = sorted((row.low, row.high))
        at, top = left + (start - low) * scale, y + (row_height - ROW + 2 if above else 0)
        shapes += _beside_bar(row, y, width if above else None, left + (end - low) * scale)
        shapes.append(rect(at, top, (end - start) * scale, ROW - (14 if above else 8), row.kind, row.told))
    height = 16 + len(rows) * row_height
    if base is not None:
        x = left + (base - low) * scale
        marks = [(8 + i * NARROW_ROW + 13, 6 + (i + 1) * NARROW_ROW) for i in range(len(rows))]  # not over the names
        shapes += [line(x, y, x, end, "limit") for y, end in (marks if above else [(2, height - 6)])]
    told = "; ".join(f"{row.label}: {row.told}" for row in rows)
    return figure("".join(shapes), width=width, height=height, title=title, description=told, name=name)


def _beside_bar(row: Row, y: float, width: float | None, end: float) -> list[str]:
    """A bar's name and figure: left and right of it, or over it where a width of the chart is given."""
    if width is None:
        return [
            text(LABEL_WIDTH - 8, y + 14, row.label, anchor="end", kind="tick"),
            text(end + 6, y + 14, row.told, kind="tick"),
        ]
    return [text(4, y + 10, row.label, kind="tick"), text(width - 4, y + 10, row.told, anchor="end", kind="tick")]
