"""Money: what a job pays per hour, and what that makes of its time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tunecast.catalogs.price_book import PriceBook, shipped_book
from tunecast.catalogs.prices import SCALING_MAX_GPUS, SEPARATE, JobOffer, load_prices
from tunecast.catalogs.rental_facts import BITS_PER_BYTE, joined_at
from tunecast.model.bounds import MOST_USD_PER_H, at_most
from tunecast.model.parallel_network import gpus_per_machine, machines_in_racks, network_taken, part_of_network
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.units import GIGA, HOUR_S, MEGA, gib
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

    What counts of them is what `as_forecast` keeps of a job with these `options`.
    """
    found = (book or shipped_book()).offers_for(gpu_id, num_gpus, price_types)
    return tuple(job_price(job, options) for job in as_forecast(found, gpu_id, options or {}))


def as_forecast(jobs: Sequence[JobOffer], gpu_id: str, options: Mapping[str, Any]) -> tuple[JobOffer, ...]:
    """Of the offers of a job, those that can be as fast as its forecast; the user's own alone where there are any.

    GPUs are forecast with the link inside machines of ``gpus_per_node``, so only offers of as few machines count (of
    more, where one rack's NVLink joins them), and none whose network is known and slower than the forecast takes.
    """
    per_node = gpus_per_machine(options)
    network = network_taken(gpu_id, options)

    def few_enough(job: JobOffer) -> bool:
        racked = machines_in_racks(gpu_id, job.offer.gpu_count, job.num_gpus)
        return job.offer.any_size or job.instances <= max(math.ceil(job.num_gpus / per_node), racked)

    def fast_enough(job: JobOffer) -> bool:
        own = joined_at(job)
        if own is None or network is None:
            return True
        return part_of_network(own, per_node, job.gpus_paid / job.instances) >= network

    own = [job for job in jobs if job.offer.layer == "user"] or jobs
    return tuple(job for job in own if few_enough(job) and fast_enough(job))


def why_no_price(jobs: Sequence[JobOffer], options: Mapping[str, Any]) -> str | None:
    """What is rented where none of these offers of a job is as it is forecast; None where nothing is rented at all."""
    own = [job for job in jobs if job.offer.layer == "user"] or jobs
    if not own:
        return None
    num_gpus, per_node = own[0].num_gpus, gpus_per_machine(options)
    largest = max(SCALING_MAX_GPUS if job.offer.scales else job.offer.gpu_count for job in own)
    if largest < min(per_node, num_gpus):
        return (
            f"no price: nobody is known to rent {min(per_node, num_gpus)} of this GPU in one machine, as is forecast; "
            f"the largest on offer has {largest}: --gpus-per-node {largest} --internode-gbps N forecasts those"
        )
    return (
        f"no price: no machines of {per_node} of this GPU are known to be rented that are joined as fast as is "
        "forecast; --internode-gbps N forecasts and prices slower ones"
    )


def job_price(job: JobOffer, options: Mapping[str, Any] | None = None) -> Price:
    """A catalog offer as a price of a job with these options, with its provenance."""
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
            "ram_gib": _machine_ram_gib(job),
            "snapshot_date": offer.snapshot_date,
            "age_days": offer.age_days(),
            "source": offer.source,
            "notes": list(_notes(job, gpus_per_machine(options or {}))),
        },
    )


def has_room(offer: Mapping[str, Any], host_bytes: float) -> bool:
    """Whether a machine of the offer has room for so much beside its GPUs: of those that do not say how much they have,
    as much for each GPU as any of the provider that does; a price of the user's own says nothing of machines."""
    if host_bytes == 0 or offer.get("gpus_paid") is None or offer.get("provider") == "user":
        return True
    memory_gib = offer.get("ram_gib")
    if memory_gib is None:
        memory_gib = most_gib_per_gpu(offer["provider"]) * offer["gpus_paid"] / offer["instances"]
    return bool(gib(host_bytes) <= memory_gib)


@cache
def most_gib_per_gpu(provider: str) -> float:
    """The most host memory for a GPU of all offers that say how much they have: of the provider's, where any do."""
    stated = [offer for offer in load_prices() if offer.ram_gib is not None]
    own = [offer for offer in stated if offer.provider == provider] or stated
    return max(offer.ram_gib / offer.gpu_count for offer in own if offer.ram_gib is not None)


def _machine_ram_gib(job: JobOffer) -> float | None:
    """Host memory of one machine of the job: a listing of one GPU that scales brings its own for every GPU."""
    gpus = job.gpus_paid / job.instances
    return None if job.offer.ram_gib is None else job.offer.ram_gib * gpus / job.offer.gpu_count


def _notes(job: JobOffer, per_node: int) -> Iterator[str]:
    """The notes of an offer, machines told as those of NVLink racks where they are more than are timed."""
    for note in job.notes:
        racked = machines_in_racks(job.offer.gpu_id, job.offer.gpu_count, job.num_gpus)
        in_rack = SEPARATE in note and math.ceil(job.num_gpus / per_node) < job.instances <= racked
        yield (
            f"{job.instances} machines, taken as of as few NVLink racks as hold them: ask for that" if in_rack else note
        )


def cost_usd(total_time_h: Value, price: Price) -> Value:
    """Hours times the job's price."""
    return total_time_h.scaled(price.usd_per_h)


def cost_per_million_tokens_usd(tokens_per_s: Value, price: Price) -> Value:
    """Price per hour over tokens per hour, for a million tokens."""
    return tokens_per_s.scaled(HOUR_S / MEGA).inverse(price.usd_per_h)
