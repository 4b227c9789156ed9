"""Dated prices: every row that was seen, the current ones, and what a job of some GPUs would pay.

An offer is (provider, tier, SKU, GPU, GPUs per instance, purchase kind, region). Its newest row is
its price; older rows are its history. A marketplace's lowest ask and its median are two offers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from typing import TYPE_CHECKING

from tunecast.catalogs import clock
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.tables import Row, names, number, read_rows

if TYPE_CHECKING:
    from tunecast.catalogs.price_book import PriceBook

PRICE_TYPES = ("on-demand", "spot", "community", "marketplace", "reserved", "committed")
"""Purchase kinds. On-demand is the default; each of the others must be asked for."""

STATISTICS = ("list", "lowest-ask", "median")
"""A price list, or of a marketplace's asks the lowest or the median: these are different offers."""

HOURS_PER_MONTH = 730.0
"""365 days over 12 months, as clouds count a month of commitment."""

STALE_AFTER_DAYS = 30
"""Prices older than this say how old they are: within two months RunPod's list rose by 10 to 20%."""

AGE_NOTE = "the price is"
"""How the note on an old price begins."""

SCALING_PROVIDERS = frozenset({"runpod", "vast"})
"""Providers whose single-GPU listing scales within one machine at the per-GPU price."""

SCALING_MAX_GPUS = 8
"""GPUs of the largest such machine."""
ANY_SIZE = "any_size"
"""Column of a user's own price per GPU that names no machine."""
SEPARATE = "separate machines"
"""Words of the note on a job that takes several."""

OfferKey = tuple[str, str, str, str, int, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One price as one source stated it on one day."""

    row: int
    """Index among `load_prices()` and among the lines of the data file."""
    provider: str
    tier: str
    sku: str
    """The listing's own words; `offer_sku` is empty where they name no machine."""
    offer_sku: str
    gpu_id: str
    """A GPU of the catalog, or a family of `gpu_families.csv`."""
    gpu_as_listed: str
    region: str
    gpu_count: int
    """GPUs that one instance has; all are paid for."""
    vcpu: float | None
    ram_gib: float | None
    price_type: str
    statistic: str
    """list (a price list), lowest-ask or median (of a marketplace's asks)."""
    usd_per_hour: float
    """One whole instance."""
    usd_per_gpu_hour: float
    snapshot_date: str
    source: str
    note: str
    why_not_rankable: str
    """Empty, or: filler, fixture, undated, ambiguous, no specification."""
    term_months: float | None = None
    """How long a reserved or committed price binds."""
    upfront_usd: float = 0.0
    """Paid once at the start of the term for one instance; its share is already in both prices per hour."""
    layer: str = "shipped"
    """Where the row comes from: shipped, refreshed or user."""
    any_size: bool = False
    """A user's own price per GPU, of machines as large as are forecast."""
    raw: Row = field(default_factory=dict, repr=False, compare=False)
    """The row as it was read."""

    @property
    def rankable(self) -> bool:
        """Whether this price may compete; others are only shown."""
        return not self.why_not_rankable

    @property
    def key(self) -> OfferKey:
        """What makes two rows the same offer on different days."""
        return (
            self.provider,
            self.tier,
            self.offer_sku,
            self.gpu_id,
            self.gpu_count,
            self.price_type,
            self.region,
            self.statistic,
        )

    @property
    def scales(self) -> bool:
        """Whether more GPUs than listed come in one machine at the per-GPU price."""
        listed = self.provider in SCALING_PROVIDERS and not self.tier.startswith("via ") and self.gpu_count == 1
        return listed or self.any_size

    def age_days(self, today: date | None = None) -> int:
        """Days since the snapshot; a month without a day counts from its first."""
        year, month, day = (self.snapshot_date + "-01")[:10].split("-")
        return ((today or clock.today()) - date(int(year), int(month), int(day))).days

    @property
    def stale(self) -> bool:
        """Whether the price is so old that an answer should say so."""
        return self.age_days() > STALE_AFTER_DAYS

    @property
    def age(self) -> str:
        """How old the price is, in words."""
        days = self.age_days()
        return "today" if days <= 0 else f"{days} day{'' if days == 1 else 's'} old"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOffer:
    """An offer applied to a job of `num_gpus` GPUs: whole instances, paid in full."""

    offer: Offer
    num_gpus: int
    instances: int
    gpus_paid: int
    usd_per_hour: float
    """The whole job."""
    notes: tuple[str, ...]


@cache
def load_prices() -> tuple[Offer, ...]:
    """Every row of the shipped file, in its order."""
    return parse_offers(read_rows("prices.csv"))


def parse_offers(rows: Iterable[Row], layer: str = "shipped") -> tuple[Offer, ...]:
    """Offers from rows with the columns of `prices.csv`; the loader's own columns may be missing."""
    return tuple(_offer(index, row, layer) for index, row in enumerate(rows))


@cache
def gpu_families() -> dict[str, tuple[str, ...]]:
    """Listings that do not say which card: family id to the GPU ids it may mean (none: no specification)."""
    return {row["family_id"]: names(row["members"]) for row in read_rows("gpu_families.csv")}


def current_offers(offers: Sequence[Offer] | None = None) -> tuple[Offer, ...]:
    """The newest row of every offer; CPU and RAM that it leaves out come from its older rows."""
    newest: dict[OfferKey, Offer] = {}
    for offer in sorted(load_prices() if offers is None else offers, key=lambda o: o.snapshot_date):
        newest[offer.key] = _keep_shape(offer, newest.get(offer.key))
    return tuple(sorted(newest.values(), key=lambda o: o.row))


def offers_for(
    gpu_id: str,
    num_gpus: int = 1,
    price_types: Sequence[str] = ("on-demand",),
    *,
    offers: Sequence[Offer] | None = None,
) -> tuple[JobOffer, ...]:
    """Current offers that may be ranked, for a job of `num_gpus` of this GPU, cheapest whole job first."""
    return _book(offers).offers_for(gpu_id, num_gpus, price_types)


def unranked_offers_for(
    gpu_id: str,
    num_gpus: int = 1,
    price_types: Sequence[str] = PRICE_TYPES,
    *,
    offers: Sequence[Offer] | None = None,
) -> tuple[JobOffer, ...]:
    """Current offers that are shown and never ranked, those of an ambiguous family included."""
    return _book(offers).unranked_offers_for(gpu_id, num_gpus, price_types)


def _book(offers: Sequence[Offer] | None) -> PriceBook:
    from tunecast.catalogs.price_book import book_of, shipped_book

    return shipped_book() if offers is None else book_of(offers)


def job_offer(offer: Offer, num_gpus: int) -> JobOffer:
    """What the job pays per hour: ceil(num_gpus / GPUs per instance) whole instances.

    A scaling provider's listing makes machines of up to 8 GPUs at the per-GPU price instead.
    """
    per_instance = SCALING_MAX_GPUS if offer.scales else offer.gpu_count
    instances = math.ceil(num_gpus / per_instance)
    gpus_paid = num_gpus if offer.scales else instances * offer.gpu_count
    usd_per_hour = num_gpus * offer.usd_per_gpu_hour if offer.scales else instances * offer.usd_per_hour
    return JobOffer(
        offer=offer,
        num_gpus=num_gpus,
        instances=instances,
        gpus_paid=gpus_paid,
        usd_per_hour=usd_per_hour,
        notes=tuple(_job_notes(offer, num_gpus, instances, gpus_paid)),
    )


def _job_notes(offer: Offer, num_gpus: int, instances: int, gpus_paid: int) -> Iterable[str]:
    if offer.why_not_rankable:
        yield f"not ranked: {offer.why_not_rankable}"
    if offer.scales and not offer.any_size and num_gpus > 1:
        yield f"one-GPU listing times {num_gpus}; whether so many are free together is not known"
    if gpus_paid > num_gpus:
        yield f"whole instances: {gpus_paid} GPUs are paid for, {num_gpus} used"
    if instances > 1:
        yield f"{instances} {SEPARATE}; their network decides the speed"
    if offer.statistic != "list":
        yield {"lowest-ask": "lowest ask, not typical", "median": "median ask"}[offer.statistic]
    if offer.sku.startswith("cheapest per-GPU plan"):
        yield "the provider's cheapest plan per GPU; its machine size is not stated"
    if offer.term_months is not None:
        yield _term_note(offer)
    if offer.stale:
        yield f"{AGE_NOTE} {offer.age} (seen {offer.snapshot_date})"
    if offer.note and offer.note not in ("lowest ask, not typical", "median ask"):
        yield offer.note


def _term_note(offer: Offer) -> str:
    """What a reserved or committed price binds to; the upfront payment is spread over every hour of the term."""
    upfront = f", ${offer.upfront_usd:,.0f} of it upfront per instance" if offer.upfront_usd else ""
    return f"{offer.price_type} for {offer.term_months:g} months{upfront}: the whole term is owed, used or not"


def check_request(num_gpus: int, price_types: Sequence[str]) -> None:
    """Raises InputError for a job without GPUs or an unknown purchase kind."""
    if num_gpus < 1:
        raise InputError(f"A job needs at least 1 GPU, not {num_gpus}.")
    unknown = [kind for kind in price_types if kind not in PRICE_TYPES]
    if unknown:
        raise InputError(f"Unknown purchase kind {unknown[0]!r}: use one of {', '.join(PRICE_TYPES)}.")


def cheapest_first(jobs: Iterable[JobOffer]) -> tuple[JobOffer, ...]:
    """By cost of the whole job; equal costs by fewer machines, then by name, so that the order is stable."""
    return tuple(sorted(jobs, key=lambda j: (j.usd_per_hour, j.instances, j.offer.provider, j.offer.sku)))


def _keep_shape(offer: Offer, older: Offer | None) -> Offer:
    if older is None or offer.vcpu is not None:
        return offer
    return replace(offer, vcpu=older.vcpu, ram_gib=older.ram_gib)


def _upfront_usd_per_h(row: Row) -> float:
    """What a listing's upfront payment adds per hour: upfront / (months x 730 hours)."""
    upfront, months = number(row.get("upfront_usd", "")), number(row.get("term_months", ""))
    return upfront / (months * HOURS_PER_MONTH) if upfront and months else 0.0


def _offer(index: int, row: Row, layer: str) -> Offer:
    listed_count = int(row["gpu_count"])
    gpu_count = int(row.get("instance_gpus") or listed_count)
    upfront_usd_per_h = _upfront_usd_per_h(row)
    return Offer(
        row=index,
        provider=row["provider"],
        tier=row["tier"],
        sku=row["instance_or_sku"],
        offer_sku=row.get("offer_sku", row["instance_or_sku"]),
        gpu_id=row["gpu_canonical_id"],
        gpu_as_listed=row["gpu_as_listed"],
        region=row["region"] or "global",
        gpu_count=gpu_count,
        vcpu=number(row["vcpu"]),
        ram_gib=number(row["ram_gib"]),
        price_type=row["price_type"],
        statistic=row.get("statistic") or "list",
        usd_per_hour=(float(row["usd_per_hour"]) + upfront_usd_per_h) * gpu_count / listed_count,
        usd_per_gpu_hour=float(row["usd_per_gpu_hour"]) + upfront_usd_per_h / listed_count,
        snapshot_date=row["snapshot_date"],
        source=row["source"],
        note=row["note"],
        why_not_rankable=row.get("why_not_rankable") or _family_reason(row["gpu_canonical_id"]),
        term_months=number(row.get("term_months", "")),
        upfront_usd=(number(row.get("upfront_usd", "")) or 0.0) * gpu_count / listed_count,
        layer=layer,
        any_size=bool(row.get(ANY_SIZE)),
        raw={column: text for column, text in row.items() if column != ANY_SIZE},
    )


def _family_reason(gpu_id: str) -> str:
    members = gpu_families().get(gpu_id)
    if members is None:
        return ""
    return f"ambiguous: may be {' or '.join(members)}" if members else "no specification of this card in the catalog"
