"""Money: what a job pays per hour, and what that makes of its time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunecast.catalogs.price_book import PriceBook, shipped_book
from tunecast.catalogs.prices import SCALING_MAX_GPUS, JobOffer
from tunecast.catalogs.rental_facts import BITS_PER_BYTE, joined_as_fast, joined_at
from tunecast.model.bounds import MOST_USD_PER_H, at_most
from tunecast.model.parallel_network import network_taken
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.units import GIGA, HOUR_S, MEGA
from tunecast.model.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What the whole job pays per hour."""

    usd_per_h: float
    offer: dict[str, Any]
    """Provider, instance, date and source, for the answer."""


def user_price(usd_per_gpu_hour: float, num_gpus: int) -> Price:
    """One number from the user; raises InputError unless it is positive."""
    flag = "--usd-per-gpu-hour"
    usd_per_h = at_most(flag, number_above_zero(flag, usd_per_gpu_hour, "2.0"), MOST_USD_PER_H)
    offer = {"provider": "user", "usd_per_gpu_hour": usd_per_h, "source": flag}
    return Price(usd_per_h=usd_per_h * num_gpus, offer=offer)


def candidate_prices(
    gpu_id: str,
    num_gpus: int,
    price_types: Sequence[str] = ("on-demand",),
    *,
    book: PriceBook | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[Price, ...]:
    """Current offers that may be ranked, cheapest per hour first; the user's own prices alone where there are any.

    GPUs are forecast with the link inside machines of 8, so only offers of as few machines count; where there
    are none, those of the fewest. Machines whose network is known and slower than the forecast of a job with these
    `options` takes do not count either.
    """
    found = (book or shipped_book()).offers_for(gpu_id, num_gpus, price_types)
    offers = joined_as_fast(found, network_taken(gpu_id, options or {}))
    own = tuple(job for job in offers if job.offer.layer == "user") or offers
    fewest = max(math.ceil(num_gpus / SCALING_MAX_GPUS), min((job.instances for job in own), default=1))
    return tuple(job_price(job) for job in own if job.instances <= fewest)


def job_price(job: JobOffer) -> Price:
    """A catalog offer as a price, with its provenance."""
    offer, network_bytes_per_s = job.offer, joined_at(job)
    return Price(
        usd_per_h=job.usd_per_hour,
        offer={
            "provider": offer.provider,
            "tier": offer.tier or None,
            "instance_or_sku": offer.sku or None,
            "region": offer.region or None,
            "price_type": offer.price_type,
            "instances": job.instances,
            "gpus_paid": job.gpus_paid,
            "network_gbps": None if network_bytes_per_s is None else network_bytes_per_s * BITS_PER_BYTE / GIGA,
            "usd_per_hour": job.usd_per_hour,
            "usd_per_gpu_hour": offer.usd_per_gpu_hour,
            "ram_gib": offer.ram_gib,
            "snapshot_date": offer.snapshot_date,
            "age_days": offer.age_days(),
            "source": offer.source,
            "notes": list(job.notes),
        },
    )


def cost_usd(total_time_h: Value, price: Price) -> Value:
    """Hours times the job's price."""
    return total_time_h.scaled(price.usd_per_h)


def cost_per_million_tokens_usd(tokens_per_s: Value, price: Price) -> Value:
    """Price per hour over tokens per hour, for a million tokens."""
    return tokens_per_s.scaled(HOUR_S / MEGA).inverse(price.usd_per_h)
