"""Prices for people and for programs: the current offers, the history of one card's, and what a refresh brought."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.tables import DASH, dollars, keep_whole, plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunecast.catalogs.price_book import PriceBook
    from tunecast.catalogs.price_refresh import Refresh
    from tunecast.catalogs.prices import Offer

NOWHERE = ("global", "all")
"""Regions that say nothing."""
OFFER_COLUMNS = 64
"""Widest column of offers: longer names and reasons wrap, so that prices stay near."""
MOST_LEFT_OUT = 5
"""Reasons of left-out listings that are told."""


def offers_of(book: PriceBook, gpu_ids: Sequence[str] = ()) -> list[Offer]:
    """Current offers, of these cards only if any are named (with the families that may mean them), cheapest first."""
    from tunecast.catalogs.prices import gpu_families

    families = [family for family, members in gpu_families().items() if set(members) & set(gpu_ids)]
    wanted = {*gpu_ids, *families}
    chosen = (offer for offer in book.current if not wanted or offer.gpu_id in wanted)
    return sorted(chosen, key=lambda o: (o.gpu_id, not o.rankable, o.usd_per_gpu_hour, o.provider, o.sku))


def offer_name(offer: Offer) -> str:
    """Who sells what, and where."""
    region = "" if offer.region in NOWHERE else offer.region
    sku = "" if offer.sku == f"{offer.gpu_count}x" else offer.sku
    words = (offer.provider, sku, offer.tier if offer.tier.startswith("via ") else "", region)
    own = " (yours)" if offer.layer == "user" else ""
    return " ".join(dict.fromkeys(word for word in words if word)) + own


def price_table(book: PriceBook, gpu_ids: Sequence[str] = ()) -> list[RenderableType]:
    """The current offers under their GPU, cheapest first; what may not be ranked is shown for named GPUs only."""
    from rich.text import Text

    offers = [offer for offer in offers_of(book, gpu_ids) if gpu_ids or offer.rankable]
    title = f"{len(offers)} current offers of {len(book.offers)} rows: {', then '.join(book.sources)}"
    numbers = ("x", "$/GPU-h", "days old")
    table = plain_table("GPU, then its offers", *numbers, "kind", "seen", title=title, right=numbers)
    table.columns[0].max_width = OFFER_COLUMNS
    previous = ""
    for offer in offers:
        if offer.gpu_id != previous:
            table.add_row(Text(offer.gpu_id, style="bold"))
        previous = offer.gpu_id
        table.add_row(*_offer_cells(offer))
    return [keep_whole(table), *_unpriced(book, gpu_ids)]


def _offer_cells(offer: Offer) -> tuple[RenderableType, ...]:
    from rich.padding import Padding
    from rich.text import Text

    why = f"; not ranked: {offer.why_not_rankable}" if not offer.rankable else ""
    return (
        Padding(Text(f"{offer_name(offer)}{why}"), (0, 0, 0, 2)),
        str(offer.gpu_count),
        dollars(offer.usd_per_gpu_hour),
        str(max(offer.age_days(), 0)),
        offer.price_type,
        offer.snapshot_date,
    )


def _unpriced(book: PriceBook, gpu_ids: Sequence[str]) -> list[str]:
    """The cards that nobody is known to sell: no price, never an invented one."""
    from tunecast.catalogs.gpus import load_gpus

    ranked = {offer.gpu_id for offer in book.current if offer.rankable}
    missing = [gpu_id for gpu_id in gpu_ids or load_gpus() if gpu_id not in ranked]
    return [f"No price that may be ranked: {', '.join(missing)}"] if missing else []


# --- history ------------------------------------------------------------------------------------


def price_trend(book: PriceBook, gpu_ids: Sequence[str]) -> list[tuple[Offer, tuple[Offer, ...]]]:
    """Each current offer of these cards that was seen on two days or more, with its rows, oldest first."""
    found = []
    for offer in offers_of(book, gpu_ids):
        if offer.rankable and offer.gpu_id in gpu_ids:
            rows = tuple(row for row in book.history(offer) if row.rankable)
            if len({row.snapshot_date for row in rows}) > 1:
                found.append((offer, rows))
    return found


def trend_to_dict(book: PriceBook, gpu_ids: Sequence[str]) -> dict[str, Any]:
    """The history for programs, schema ``tunecast.trend/1``."""
    return {
        "schema": "tunecast.trend/1",
        "gpus": list(gpu_ids),
        "offers": [
            {
                "provider": offer.provider,
                "tier": offer.tier or None,
                "instance_or_sku": offer.sku or None,
                "gpu_canonical_id": offer.gpu_id,
                "gpu_count": offer.gpu_count,
                "region": offer.region,
                "price_type": offer.price_type,
                "statistic": offer.statistic,
                "change": change(rows),
                "points": [
                    {"snapshot_date": r.snapshot_date, "usd_per_gpu_hour": r.usd_per_gpu_hour, "source": r.source}
                    for r in rows
                ],
            }
            for offer, rows in price_trend(book, gpu_ids)
        ],
    }


def change(rows: Sequence[Offer]) -> float:
    """Newest price over oldest, less 1."""
    return rows[-1].usd_per_gpu_hour / rows[0].usd_per_gpu_hour - 1.0


def trend_table(book: PriceBook, gpu_ids: Sequence[str]) -> list[RenderableType]:
    """One line per price that was seen, newest last, with its change against the one before."""
    from rich.text import Text

    found = price_trend(book, gpu_ids)
    title = f"{', '.join(gpu_ids)}: {len(found)} offers seen on two days or more"
    numbers = ("$/GPU-h", "change")
    table = plain_table("offer", "kind", "seen", *numbers, title=title, right=numbers)
    for offer, rows in found:
        for older, row in zip((None, *rows), rows, strict=False):
            first = older is None
            table.add_row(
                Text(trend_name(offer, several=len(gpu_ids) > 1) if first else ""),
                offer.price_type if first else "",
                row.snapshot_date,
                dollars(row.usd_per_gpu_hour),
                "" if older is None else f"{change((older, row)):+.0%}",
            )
    once = sum(1 for o in offers_of(book, gpu_ids) if o.rankable and o.gpu_id in gpu_ids) - len(found)
    return [keep_whole(table), f"{once} more offers were seen once only: no trend." if once else ""]


def trend_name(offer: Offer, *, several: bool) -> str:
    """An offer among others of its card, or of several cards."""
    card = f"{offer.gpu_id}: " if several else ""
    size = f" x{offer.gpu_count}" if offer.gpu_count > 1 else ""
    statistic = "" if offer.statistic == "list" else f" ({offer.statistic})"
    name = offer_name(offer) if offer.offer_sku else offer.provider
    return f"{card}{name}{size}{statistic}"


def plot_trend(book: PriceBook, gpu_ids: Sequence[str], path: Path) -> Path:
    """Draw the history, one line per offer."""
    from tunecast.catalogs.errors import InputError
    from tunecast.plots import Series, line_plot

    found = price_trend(book, gpu_ids)
    if not found:
        raise InputError(f"No offer of {', '.join(gpu_ids)} was seen on two days, so there is no trend to draw.")
    series = [
        Series(
            label=f"{trend_name(offer, several=len(gpu_ids) > 1)}, {offer.price_type}",
            x=[_day(row) for row in rows],
            y=[row.usd_per_gpu_hour for row in rows],
        )
        for offer, rows in found
    ]
    return line_plot(path, series, title=", ".join(gpu_ids), x_label="seen on", y_label="USD per GPU and hour")


def _day(offer: Offer) -> date:
    return date.fromisoformat(offer.snapshot_date)


# --- refresh ------------------------------------------------------------------------------------


def refresh_to_dict(done: Refresh) -> dict[str, Any]:
    """What a refresh brought, for programs, schema ``tunecast.refresh/1``."""
    return {
        "schema": "tunecast.refresh/1",
        "path": str(done.path),
        "source": done.source,
        "prices": done.counts,
        "failed": done.failed,
        "left_out": done.left_out,
    }


def refresh_table(done: Refresh) -> list[RenderableType]:
    """Prices by provider, and why the others gave none."""
    table = plain_table("provider", "prices", "why not", title=f"{sum(done.counts.values())} prices", right=("prices",))
    for provider, n_prices in done.counts.items():
        table.add_row(provider, str(n_prices), "")
    for provider, why in done.failed.items():
        table.add_row(provider, DASH, why)
    return [keep_whole(table, shrinking="why not"), *_left_out(done), f"Kept in {done.path}"]


def _left_out(done: Refresh) -> Iterable[str]:
    ordered = sorted(done.left_out.items(), key=lambda item: -item[1])
    for why, count in ordered[:MOST_LEFT_OUT]:
        yield f"- left out: {count} x {why}"
    rest = ordered[MOST_LEFT_OUT:]
    if rest:
        yield f"- left out: {sum(count for _, count in rest)} for {len(rest)} more reasons"
