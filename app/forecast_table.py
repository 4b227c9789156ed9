"""Forecasts and measurements for people: many GPUs as a table, one GPU in detail."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tunecast.model.fits import LIKELY, chance_said
from tunecast.model.parallel_offload import host_need_bytes
from tunecast.model.units import MILLISECOND_S, gib
from tunecast.model.value import Value
from tunecast.parallel_table import classic_notes, scaling_rows, totals_rows
from tunecast.run_line import counts, heading, some
from tunecast.tables import DASH, cuttable, digits, dollars, duration, gib_text, keep_whole, plain_table, seconds
from tunecast.whole_run_table import cost_rows, interruption_rows, phase_rows, train_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tunecast.model.forecast import Forecast

WIDE = 130
"""Columns from which intervals and offers have a column of their own; below, they go under their value."""
SLIM = 95
"""Columns below which tokens/s stands under the time, that of the training alone is left out, and names are folded."""
NAME_COLUMNS = 24
"""Of a name in the slim table."""
VERDICT_ORDER = {"fits": 0, "tight": 0, None: 1, "no": 2}
PRIOR_ORIGINS = {"reference", "published"}
"""Origins of factors that other devices gave."""
MEMORY_ORIGINS = {"usable_memory"}


SMALLEST_SHOWN_GIB = 0.05
"""Parts that would print as 0.0 are left to the JSON."""
WHOLE_PERCENT = 0.0995
"""Shares from here on are shown without decimals."""
SMALLEST_SHOWN_SHARE = 1e-4
"""Parts of a step below this share of it are left to the JSON."""


def best_first(forecasts: Iterable[Forecast]) -> list[Forecast]:
    """Those that fit first, then unknown, then those that do not; cheapest first, unpriced last, then fastest."""

    def order(forecast: Forecast) -> tuple[int, bool, float, float]:
        cost = forecast.cost_usd or forecast.cost_per_million_tokens_usd
        price = cost.value if cost else 0.0
        return VERDICT_ORDER[forecast.verdict], cost is None, price, forecast.step_time_s.value

    return sorted(forecasts, key=order)


def forecast_report(forecasts: Sequence[Forecast], width: int) -> list[RenderableType]:
    """What the commands print: the run, the answer, and what the reader must know about it."""
    body = [forecast_detail(forecasts[0])] if len(forecasts) == 1 else [forecast_table(forecasts, width)]
    return [heading(forecasts), *body, *notes(forecasts)]


def card(forecast: Forecast, rows: Sequence[Forecast]) -> str:
    """The GPU, with how many of it where rows differ."""
    return forecast.gpu if len(counts(rows)) == 1 else f"{forecast.run.num_gpus} x {forecast.gpu}"


def forecast_table(forecasts: Sequence[Forecast], width: int) -> Table:
    """One row per GPU, best first."""
    rows = best_first(forecasts)
    has_total = any(forecast.total_time_h for forecast in rows)
    if width >= WIDE:
        return wide_table(rows, has_total=has_total)
    return narrow_table(rows, has_total=has_total) if width >= SLIM else slim_table(rows, has_total=has_total)


def wide_table(rows: Sequence[Forecast], *, has_total: bool) -> Table:
    """Intervals and offers in columns of their own."""
    money = "cost" if has_total else "$/M tokens"
    numbers = ("GiB", "step", "step 80%", "tokens/s", *(("time", "train") if has_total else ()), money, f"{money} 80%")
    table = plain_table("GPU", "fits", *numbers, "offer", *origin_column(rows), right=numbers)
    for forecast in rows:
        cost = money_of(forecast)
        table.add_row(
            card(forecast, rows),
            verdict(forecast),
            memory(forecast),
            seconds(forecast.step_time_s.value),
            span_s(forecast.step_time_s),
            digits(forecast.tokens_per_s.value),
            *([total(forecast), train_time(forecast)] if has_total else []),
            dollars(cost.value) if cost else DASH,
            span(cost),
            cuttable(offer(forecast)),
            *([origin(forecast)] if origin_column(rows) else []),
        )
    return keep_whole(table)


def narrow_table(rows: Sequence[Forecast], *, has_total: bool) -> Table:
    """Intervals under their value, the offer under the GPU."""
    money = "cost" if has_total else "$/M tokens"
    numbers = ("GiB", "step", "tokens/s", *(("time",) if has_total else ()), money)
    table = plain_table("GPU", "fits", *numbers, *origin_column(rows), right=numbers)
    for forecast in rows:
        cost = money_of(forecast)
        table.add_row(
            f"{card(forecast, rows)}\n  {offer(forecast)}",
            verdict(forecast),
            memory(forecast),
            f"{seconds(forecast.step_time_s.value)}\n{span_s(forecast.step_time_s)}",
            digits(forecast.tokens_per_s.value),
            *([f"{total(forecast)}\n{train_line(forecast.whole_run)}"] if has_total else []),
            f"{dollars(cost.value)}\n{span(cost)}" if cost else DASH,
            *([origin(forecast)] if origin_column(rows) else []),
        )
    return keep_whole(table)


def slim_table(rows: Sequence[Forecast], *, has_total: bool) -> Table:
    """What 80 columns hold; the rest is in the JSON."""
    money = "cost" if has_total else "$/M tokens"
    numbers = ("GiB", "step", *(("time",) if has_total else ("tokens/s",)), money)
    table = plain_table("GPU", "fits", *numbers, right=numbers)
    for forecast in rows:
        cost, speed = money_of(forecast), digits(forecast.tokens_per_s.value)
        table.add_row(
            f"{folded(card(forecast, rows))}\n  {offer(forecast)}",
            verdict(forecast),
            memory(forecast),
            f"{seconds(forecast.step_time_s.value)}\n{span_s(forecast.step_time_s)}",
            f"{total(forecast)}\n{speed} tok/s" if has_total else speed,
            f"{dollars(cost.value)}\n{span(cost)}" if cost else DASH,
        )
    return keep_whole(table)


def folded(name: str) -> str:
    """A name on as many lines as it needs, broken at its hyphens."""
    lines = [""]
    for part in re.split(r"(?<=-)", name):
        if lines[-1] and len(lines[-1]) + len(part) > NAME_COLUMNS:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def origin_column(rows: Sequence[Forecast]) -> tuple[str, ...]:
    """A column for the origin of the factors, unless it is the same for all and a note says so."""
    return ("factors",) if len({origin(forecast) for forecast in rows}) > 1 else ()


def verdict(forecast: Forecast) -> str:
    """fits, no, or tight with its probability; a dash when the card's usable memory is unknown."""
    if forecast.verdict == "tight" and forecast.fit_probability is not None:
        return f"tight {chance_said(forecast.fit_probability)}"
    return forecast.verdict or DASH


def memory(forecast: Forecast) -> str:
    """Process memory over usable memory, in GiB."""
    used = forecast.memory.process_bytes or forecast.memory.allocated_bytes
    return f"{gib_text(used.value)}/{gib_text(forecast.memory.usable_bytes)}"


def span(value: Value | None) -> str:
    """The 80% interval in the value's own unit; nothing for what was counted."""
    if value is None:
        return DASH
    return "" if value.low == value.high else f"{digits(value.low)}–{digits(value.high)}"


def span_s(value: Value) -> str:
    """The 80% interval of a step time, in the unit that `seconds` chooses for its value."""
    return span(value if value.value >= 1 else value.scaled(1 / MILLISECOND_S))


def total(forecast: Forecast) -> str:
    """How long the whole run takes."""
    return duration(forecast.total_time_h.value) if forecast.total_time_h else DASH


def train_time(forecast: Forecast) -> str:
    """How long the training alone takes."""
    return DASH if forecast.whole_run is None else duration(forecast.whole_run.train_time_h.value)


def money_of(forecast: Forecast) -> Value | None:
    """The whole run's cost, or that of a million tokens when no amount of data was given."""
    return forecast.cost_usd if forecast.total_time_h else forecast.cost_per_million_tokens_usd


def offer(forecast: Forecast) -> str:
    """Who sells it at this price."""
    if forecast.offer is None:
        return "no price"
    kind = forecast.offer.get("price_type")
    words = (forecast.offer.get("provider"), None if kind == "on-demand" else kind)
    rate = forecast.offer.get("usd_per_gpu_hour")
    return " ".join(str(word) for word in words if word) + (f" ${rate:.2f}/h" if rate else "")


def origin(forecast: Forecast) -> str:
    """Where the factors of time come from, in a word: measured on this device, a prior, or given by the user."""
    if "achieved_tflops" in forecast.origins:
        return "given"
    kinds = {text.split(":")[0] for name, text in forecast.origins.items() if name not in MEMORY_ORIGINS}
    words = (["measured"] if "measured" in kinds else []) + (["prior"] if kinds & PRIOR_ORIGINS else [])
    return "+".join(words) or DASH


def forecast_detail(forecast: Forecast) -> Table:
    """One GPU: every view of memory, time by part, money and origins."""
    table = plain_table(
        "", "value", "80% interval", title=f"{forecast.gpu}: {verdict_words(forecast)}", right=("value",)
    )
    for name, value, interval in (*memory_rows(forecast), *time_rows(forecast), *money_rows(forecast)):
        table.add_row(name, value, interval)
    return table


Line = tuple[str, str, str]
CENTS = 0.1
"""Dollars below which cents are coarser than the interval."""


def verdict_words(forecast: Forecast) -> str:
    """The answer to "does it fit", with its probability."""
    chance = "" if forecast.fit_probability is None else f" (probability {chance_said(forecast.fit_probability)})"
    likely = forecast.fit_probability is None or forecast.fit_probability >= LIKELY
    tight = "fits, but tightly" if likely else "may not fit"
    words = {"fits": "fits", "tight": tight, "no": "does not fit"}
    unknown = "usable memory unknown" if forecast.memory.usable_bytes is None else "memory of the process unknown"
    return words.get(forecast.verdict or "", unknown) + chance


def memory_rows(forecast: Forecast) -> Iterable[Line]:
    """The four views and what the peak is made of, in GiB."""
    views = forecast.memory
    yield "memory allocated, GiB", digits(gib(views.allocated_bytes.value)), span(views.allocated_bytes.scaled(gib(1)))
    for part, n_bytes in sorted(views.parts_bytes.items(), key=lambda item: -item[1]):
        if gib(n_bytes) >= SMALLEST_SHOWN_GIB:
            yield f"  {part}", gib_text(n_bytes), ""
    for name, value in (("reserved", views.reserved_bytes), ("process", views.process_bytes)):
        if value is not None:
            yield f"memory {name}, GiB", digits(gib(value.value)), span(value.scaled(gib(1)))
    yield "memory usable, GiB", gib_text(views.usable_bytes), f"peak: {views.peak_moment}"
    on_host = host_need_bytes(forecast.architecture, forecast.run)
    if on_host:
        yield "host memory, GiB", gib_text(on_host), "of each machine"


def time_rows(forecast: Forecast) -> Iterable[Line]:
    """The step and its parts."""
    yield "optimizer step", seconds(forecast.step_time_s.value), span_s(forecast.step_time_s)
    for part, part_s in sorted(forecast.time_parts_s.items(), key=lambda item: -item[1]):
        if part_s > SMALLEST_SHOWN_SHARE * forecast.step_time_s.value and len(forecast.time_parts_s) > 1:
            yield f"  {part}", seconds(part_s), ""
    yield "tokens/s", digits(forecast.tokens_per_s.value), span(forecast.tokens_per_s)
    peak = "of the FP8 peak" if forecast.run.fp8 else ""
    bound = "" if forecast.bound_by == "unknown" else f"bound by {forecast.bound_by}"
    yield "MFU / HFU", f"{share(forecast.mfu)} / {share(forecast.hfu)}", ", ".join(filter(None, (peak, bound)))
    yield from scaling_rows(forecast)
    yield from totals_rows(forecast)
    if forecast.total_time_h:
        yield "whole run", duration(forecast.total_time_h.value), span_h(forecast.total_time_h)
    if forecast.whole_run:
        yield from phase_rows(forecast.whole_run)


def money_rows(forecast: Forecast) -> Iterable[Line]:
    """Cost and offer."""
    if forecast.cost_usd:
        cost = forecast.cost_usd
        yield "cost, $", dollars(cost.value) if cost.value >= CENTS else f"${digits(cost.value)}", span(cost)
    if forecast.whole_run:
        yield from (*cost_rows(forecast.whole_run), *interruption_rows(forecast.whole_run))
    if forecast.cost_per_million_tokens_usd:
        yield (
            "$ per million tokens" if forecast.whole_run is None else "$ per M tokens, train",
            f"${digits(forecast.cost_per_million_tokens_usd.value)}",
            span(forecast.cost_per_million_tokens_usd),
        )
    if forecast.offer:
        yield "offer", offer(forecast), str(forecast.offer.get("snapshot_date") or "")
    yield "factors", origin(forecast), ""


def share(value: float | None) -> str:
    """A fraction as a percentage, with a decimal below `WHOLE_PERCENT`."""
    return DASH if value is None else f"{value:.{0 if value >= WHOLE_PERCENT else 1}%}"


def span_h(value: Value) -> str:
    """An interval of hours in words."""
    return f"{duration(value.low)}–{duration(value.high)}"


def notes(forecasts: Sequence[Forecast]) -> list[str]:
    """Each note once, with the GPUs it holds for unless it holds for all."""
    from tunecast.catalogs.prices import AGE_NOTE

    holders: dict[str, list[str]] = {}
    for forecast in forecasts:
        for note in forecast.notes:
            if len(forecasts) == 1 or not note.startswith(AGE_NOTE):
                holders.setdefault(of_this(note, forecast.gpu), []).append(forecast.gpu)
    told = [f"- {note}{'' if len(gpus) == len(forecasts) else f' ({some(gpus)})'}" for note, gpus in holders.items()]
    classic = classic_notes(best_first(forecasts)) if len(forecasts) > 1 else []
    return legend(forecasts) + classic + told + price_ages(forecasts)


def of_this(note: str, gpu: str) -> str:
    """The note with the card's id in words, so that cards may share it; not inside another word (a file's name)."""
    return re.sub(rf"(?<![\w+-]){re.escape(gpu)}(?![\w-])", "this device" if gpu == "cpu" else "this GPU", note)


def price_ages(forecasts: Sequence[Forecast]) -> list[str]:
    """How old the old prices of a table are, in one line; a single forecast says it in a note of its own."""
    from tunecast.catalogs.prices import STALE_AFTER_DAYS

    ages = [forecast.offer.get("age_days", 0) for forecast in forecasts if forecast.offer]
    old = sorted(age for age in ages if age > STALE_AFTER_DAYS)
    if len(forecasts) == 1 or not old:
        return []
    span_days = f"{old[0]}" if old[0] == old[-1] else f"{old[0]} to {old[-1]}"
    return [f"- {len(old)} of {len(ages)} prices are {span_days} days old: tunecast catalog prices --refresh"]


def legend(forecasts: Sequence[Forecast]) -> list[str]:
    """What the columns of a table mean."""
    if len(forecasts) == 1:
        return []
    same = "" if origin_column(forecasts) else f"; factors of all: {origin(forecasts[0])}"
    return [f"- GiB: memory of the process / usable memory of the card; ranges: 80% intervals{same}"]
