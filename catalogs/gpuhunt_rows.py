"""gpuhunt's listings as rows of our price file.

gpuhunt names a card by a short name and its memory (`A100`, 80), which does not say PCIe or SXM. What the
machine itself says decides first: an instance that is in the shipped prices, then a name that the driver
uses (RunPod lists pods under it). What stays ambiguous becomes a family, which is shown and never ranked;
what is in no catalog is left out and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Protocol

from tunecast.catalogs.gpus import ids_called, load_gpus, match_device
from tunecast.catalogs.integrity import PRICE_CHECKS, is_filler
from tunecast.catalogs.prices import PRICE_TYPES, gpu_families, offers_for
from tunecast.catalogs.tables import GIB, Row, read_rows

PROVIDER_NAMES = {"lambdalabs": "lambda", "vastai": "vast"}
"""gpuhunt's providers whose name differs from ours."""

ONE_PRICE_REGIONS = {"runpod": "global", "lambda": "all"}
"""Providers with one price everywhere, and the region under which the shipped prices have them."""

LISTED_MEMORY_TOLERANCE = 0.13
"""gpuhunt's memory against the sticker: B300 270 for 288 GB, MI325X 288 for 256, Lambda 7% high;
the closest two cards of one short name, H100 of 80 and 94 GB, are 15% apart."""

IMPLAUSIBLE_BELOW = 0.2
"""A price under this share of the cheapest one known for the card is shown and not ranked."""

SPECIAL_FLAGS = {
    "runpod-cluster": "clusters of two pods or more",
    "gcp-dws-calendar-mode": "reserved by calendar only",
}
"""gpuhunt's flags of listings that nobody can rent as one machine on demand."""


class Listing(Protocol):
    """What we read of gpuhunt's `CatalogItem`."""

    instance_name: str
    location: str
    price: float
    cpu: int
    memory: float
    gpu_count: int
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool
    flags: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The rows of one provider, and what was left out with why."""

    rows: tuple[Row, ...]
    left_out: dict[str, int]


def rows_from_listings(provider: str, listings: Iterable[Any], day: str, source: str) -> Mapped:
    """Rows of `prices.csv` from one provider's listings; `provider` is gpuhunt's name."""
    name = PROVIDER_NAMES.get(provider, provider)
    left_out: Counter[str] = Counter()
    rows: list[Row] = []
    for listing in listings:
        reason = _unusable(name, listing)
        gpu_id = "" if reason else gpu_of(name, listing)
        if reason or not gpu_id:
            left_out[reason or f"{listing.gpu_name} {listing.gpu_memory:g} GB is in no catalog"] += 1
        else:
            rows.append(_row(name, listing, gpu_id, day, source))
    return Mapped(rows=tuple(_sound(_merged(name, rows), left_out)), left_out=dict(left_out))


def _unusable(provider: str, listing: Listing) -> str:
    """Why a listing is no price of a whole GPU machine, empty if it is one."""
    special = [SPECIAL_FLAGS[flag] for flag in listing.flags if flag in SPECIAL_FLAGS]
    if special:
        return special[0]
    if not listing.gpu_count or not listing.gpu_name or not listing.gpu_memory:
        return "no GPU"
    if provider == "vast" and listing.spot:
        return "lowest bids of interruptible Vast machines, which are not prices"
    return "" if listing.price > 0 else "a price of zero"


def gpu_of(provider: str, listing: Listing) -> str:
    """The GPU id or family of a listing; empty when it is in no catalog."""
    known = _shipped_instances().get((provider, listing.instance_name))
    if known:
        return known
    memory_gb = listing.gpu_memory or 0.0
    by_driver = match_device(listing.instance_name, round(memory_gb * GIB))
    if by_driver is not None:
        return by_driver.id
    gpus = load_gpus()
    ids = [i for i in ids_called(listing.gpu_name or "") if _memory_fits(gpus[i].memory_marketing_gb, memory_gb)]
    return ids[0] if len(ids) == 1 else _family_of(ids, listing.gpu_name or "", memory_gb)


def _family_of(ids: Sequence[str], name: str, memory_gb: float) -> str:
    """The family of exactly these cards, else the declared listing of that name without a specification."""
    for family, members in gpu_families().items():
        if ids and set(ids) <= set(members):
            return family
        if not ids and not members and _key(family) == _key(f"{name}-{memory_gb:g}gb"):
            return family
    return ""


def _memory_fits(sold_gb: float, listed_gb: float) -> bool:
    return abs(listed_gb / sold_gb - 1) <= LISTED_MEMORY_TOLERANCE


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _shipped_instances() -> dict[tuple[str, str], str]:
    """Instances whose card the shipped prices state, where all their rows agree."""
    stated: dict[tuple[str, str], set[str]] = {}
    for row in read_rows("prices.csv"):
        if row["offer_sku"]:
            stated.setdefault((row["provider"], row["offer_sku"]), set()).add(row["gpu_canonical_id"])
    return {machine: next(iter(ids)) for machine, ids in stated.items() if len(ids) == 1}


def _row(provider: str, listing: Listing, gpu_id: str, day: str, source: str) -> Row:
    kind, tier = _kind_and_tier(provider, listing)
    pods = provider in ("runpod", "vast")
    return {
        "provider": provider,
        "tier": tier,
        "gpu_canonical_id": gpu_id,
        "gpu_as_listed": listing.instance_name if provider == "runpod" else str(listing.gpu_name),
        "instance_or_sku": "" if pods else listing.instance_name,
        "offer_sku": "" if pods else listing.instance_name,
        "region": _region(provider, listing.location),
        "gpu_count": str(listing.gpu_count),
        "instance_gpus": str(listing.gpu_count),
        "vcpu": str(listing.cpu),
        "ram_gib": str(listing.memory),
        "price_type": kind,
        "statistic": "list",
        "usd_per_hour": repr(float(listing.price)),
        "usd_per_gpu_hour": repr(listing.price / listing.gpu_count),
        "snapshot_date": day,
        "source": source,
        "note": "",
        "why_not_rankable": "",
    }


def _kind_and_tier(provider: str, listing: Listing) -> tuple[str, str]:
    """Purchase kind and tier. RunPod lists its Community Cloud by country, its Secure Cloud by data centre."""
    if provider == "vast":
        return "marketplace", "marketplace"
    if listing.spot:
        return "spot", ""
    if provider != "runpod":
        return "on-demand", ""
    return ("community", "community") if re.fullmatch(r"[A-Z]{2}", listing.location) else ("on-demand", "secure")


def _region(provider: str, location: str) -> str:
    """The region of a zone: `us-central1-a` and `us-east-1a` lie in `us-central1` and `us-east-1`."""
    if provider in ONE_PRICE_REGIONS:
        return ONE_PRICE_REGIONS[provider]
    if provider == "vast":
        return "global"
    zone = {"gcp": r"-[a-z]$", "aws": r"(?<=\d)[a-z]$"}.get(provider)
    return re.sub(zone, "", location) if zone else location


def _merged(provider: str, rows: Sequence[Row]) -> list[Row]:
    """One row per offer: the cheapest zone; of a marketplace's asks, the lowest and the median."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        count = "" if provider == "runpod" else row["gpu_count"]
        key = ("tier", "gpu_canonical_id", "offer_sku", "region", "price_type")
        groups.setdefault((*(row[column] for column in key), count), []).append(row)
    return [merged for group in groups.values() for merged in _one_offer(provider, group)]


def _one_offer(provider: str, group: Sequence[Row]) -> list[Row]:
    if provider == "vast":
        prices = [float(row["usd_per_hour"]) for row in group]
        return [_asked(group[0], min(prices), "lowest-ask", 1), _asked(group[0], median(prices), "median", len(prices))]
    if provider == "runpod":
        return [min(group, key=lambda row: (int(row["gpu_count"]), float(row["usd_per_gpu_hour"])))]
    return [min(group, key=lambda row: float(row["usd_per_hour"]))]


def _asked(row: Row, usd_per_hour: float, statistic: str, asks: int) -> Row:
    label = "cheapest offer" if statistic == "lowest-ask" else f"median of {asks} offers"
    return row | {
        "instance_or_sku": label,
        "statistic": statistic,
        "usd_per_hour": repr(usd_per_hour),
        "usd_per_gpu_hour": repr(usd_per_hour / int(row["gpu_count"])),
        "note": "with a share of the host's disk",
        "vcpu": "",
        "ram_gib": "",
    }


def _sound(rows: Iterable[Row], left_out: Counter[str]) -> Iterable[Row]:
    """Rows that pass the checks of the shipped file; fillers and implausible prices are kept and not ranked."""
    for row in rows:
        marked = row | {"why_not_rankable": _doubt(row)}
        if any(check([marked]) for check in PRICE_CHECKS):
            left_out["rows that fail the checks of the price file"] += 1
        else:
            yield marked


def _doubt(row: Row) -> str:
    if is_filler(row):
        return "filler: RunPod answers 0.50 for cards that it does not offer"
    known = _cheapest_known(row["gpu_canonical_id"])
    if known and float(row["usd_per_gpu_hour"]) < IMPLAUSIBLE_BELOW * known:
        return f"implausible: under a fifth of the {known:.2f} USD/h that is the lowest in the shipped prices"
    return ""


@cache
def _cheapest_known(gpu_id: str) -> float:
    """Lowest price per GPU in the shipped snapshot, of any purchase kind; 0 where there is none."""
    return min((job.offer.usd_per_gpu_hour for job in offers_for(gpu_id, 1, PRICE_TYPES)), default=0.0)
