"""What renting costs beside the machine: interruptions, storage, transfer out, and the network between machines.

Every figure has its source and date in its data file. What is not there is None: unknown, which the
caller has to ask for or to label as assumed, never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tunecast.catalogs.tables import GIGA, Row, number, read_rows

if TYPE_CHECKING:
    from tunecast.catalogs.prices import JobOffer

BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """How often a spot machine was taken back, as a band of its fraction per month."""

    provider: str
    instance: str
    region: str
    monthly_low: float
    monthly_high: float | None
    """None: the band is open, "more than `monthly_low`"."""
    source: str
    source_date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A rate that holds from an amount on, like an income tax bracket."""

    from_gb: float
    usd_per_gb: float | None
    """None: nobody states it."""
    source: str
    source_date: str
    note: str


def interruptions(provider: str, instance: str, region: str) -> Interruptions | None:
    """How often such machines are taken back; None: nobody states it. A zone (us-east-1a) counts as its region."""
    known = _interruptions()
    place = (provider.lower(), instance)
    return known.get((*place, region)) or known.get((*place, region.rstrip("abcdef")))


@cache
def _interruptions() -> dict[tuple[str, str, str], Interruptions]:
    return {(r["provider"], r["instance"], r["region"]): _interruption(r) for r in read_rows("interruptions.csv")}


def _interruption(row: Row) -> Interruptions:
    return Interruptions(
        provider=row["provider"],
        instance=row["instance"],
        region=row["region"],
        monthly_low=float(row["monthly_low"]),
        monthly_high=number(row["monthly_high"]),
        source=row["source"],
        source_date=row["source_date"],
    )


def storage_usd_per_gb_month(provider: str, kind: str = "disk", gb: float = 0.0) -> float | None:
    """USD per GB and month, on average over `gb` GB (0: the first of them); None: unknown.

    `kind` is one of the provider's or a role: disk, network, stopped-disk, snapshot, object; the first
    kind listed for a role is its price.
    """
    return _average(storage_tiers(provider, kind), gb)


def dearest_storage_usd_per_gb_month(kind: str, gb: float) -> float:
    """The highest of the providers' prices for so much of one kind of storage."""
    providers = {row["provider"] for row in read_rows("storage.csv")}
    found = (storage_usd_per_gb_month(provider, kind, gb) for provider in providers)
    return max(price for price in found if price is not None)


@cache
def storage_tiers(provider: str, kind: str = "disk") -> tuple[Tier, ...]:
    """The price steps of one kind of storage, with their sources; empty where it is not known."""
    rows = [row for row in read_rows("storage.csv") if row["provider"] == provider.lower()]
    chosen = next((row["kind"] for row in rows if kind in (row["kind"], row["role"])), None)
    return tuple(_tier(row, "usd_per_gb_month") for row in rows if row["kind"] == chosen)


def egress_usd_per_gb(provider: str, gb: float) -> float | None:
    """USD per GB for `gb` GB that leave the provider, on average over its price steps; None: unknown."""
    return _average(egress_tiers(provider), gb)


@cache
def egress_tiers(provider: str) -> tuple[Tier, ...]:
    """The price steps of traffic out to the internet, with their sources; empty where nothing is known."""
    return tuple(_tier(row, "usd_per_gb") for row in read_rows("egress.csv") if row["provider"] == provider.lower())


def _tier(row: Row, column: str) -> Tier:
    return Tier(
        from_gb=float(row["from_gb"]),
        usd_per_gb=number(row[column]),
        source=row["source"],
        source_date=row["source_date"],
        note=row["note"],
    )


def _average(tiers: tuple[Tier, ...], gb: float) -> float | None:
    """Sum over steps of the GB that fall into each times its rate, over all GB; None if one of them is unknown."""
    reached = [tier for tier in tiers if tier.from_gb < gb] or list(tiers[:1])
    rates = [tier.usd_per_gb for tier in reached]
    if not reached or any(rate is None for rate in rates):
        return None
    if gb <= 0:
        return rates[0]
    ends = [*(tier.from_gb for tier in reached[1:]), gb]
    parts = zip(reached, ends, strict=True)
    return sum((end - tier.from_gb) * (tier.usd_per_gb or 0.0) for tier, end in parts) / gb


@cache
def node_network_bytes_per_s(provider: str, instance: str) -> float | None:
    """What one machine can send to others, all its network cards together; None: unknown."""
    for row in read_rows("networks.csv"):
        if (row["provider"], row["instance"]) == (provider.lower(), instance):
            return float(row["network_gbit_per_s"]) * GIGA / BITS_PER_BYTE
    return None


def joined_at(job: JobOffer) -> float | None:
    """Bytes/s out of one of an offer's machines; None: it is one machine, or its network is unknown."""
    return node_network_bytes_per_s(job.offer.provider, job.offer.offer_sku) if job.instances > 1 else None
