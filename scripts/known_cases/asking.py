"""One forecast, and the small text that figures of the pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tunecast.model.forecast import Forecast
from tunecast.model.units import HOUR_S, gib
from tunecast.sweeping import Ask, forecast_of

Figures = dict[str, str]
"""What ``{{name}}`` in a template stands for."""


def told(model: str, gpu: str, **options: Any) -> Forecast:
    """The forecast, without the search for ways to make it fit."""
    return forecast_of(Ask(model=model, gpu=gpu, options=options), {})


def memory_gib(forecast: Forecast) -> float:
    """Memory of the process, GiB."""
    found = forecast.memory.process_bytes
    assert found is not None
    return gib(found.value)


def tokens_in(forecast: Forecast, hours: float) -> float:
    """Tokens that the training sees in so many hours."""
    return forecast.tokens_per_s.value * hours * HOUR_S


def hours_for(forecast: Forecast, tokens: float) -> float:
    """Hours of training for so many tokens."""
    return tokens / forecast.tokens_per_s.value / HOUR_S


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; no newline at the end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def change(after: float, before: float) -> str:
    """A relative change."""
    return f"{after / before - 1:+.0%}"


def times(ratio: float) -> str:
    """How many times as much."""
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def verdict(forecast: Forecast) -> str:
    """Whether it fits, as a word of a table."""
    return forecast.verdict or "–"


def holds(found: bool) -> str:
    """As a word of a table."""
    return "yes" if found else "no"
