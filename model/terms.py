"""What a machine's price includes: how time is counted, storage, transfer out, interruptions, electricity.

`Terms` are known once an offer is chosen; `whole_run` turns hours into money with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.catalogs.rental_facts import interruptions
from tunecast.model.cost import Price
from tunecast.model.factors import Factor
from tunecast.model.phase_rates import Billing, Rates, billing_rule
from tunecast.model.units import GIB
from tunecast.model.value import Value
from tunecast.model.whole_run_options import WholeRunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """How often one machine is taken away, as the share interrupted within a month."""

    monthly: Value
    origin: str
    """``cli``, ``documented`` or ``assumed``."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What the job's machine of one's own draws, in watts of the socket."""

    training_w: float
    waiting_w: float
    spread: Value
    """The watts over their best guess: 1 with an interval."""
    usd_per_kwh: float
    origin: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The price of the machine with the GPUs, and what comes with it."""

    usd_per_h: float
    """All machines of the job together; 0 when owned."""
    provider: str = "user"
    machines: int = 1
    """An interruption of any of them stops the job."""
    billing: Billing
    storage_usd_per_gb_month: float | None = None
    """None asks the provider's own; unknown there, storage is not counted."""
    egress_usd_per_gb: float | None = None
    cuts: Cuts | None = None
    """None: not interruptible."""
    on_demand_usd_per_h: float | None = None
    """The same job without interruptions, to compare an interruptible one with."""
    power: Power | None = None
    ram_bytes: float | None = None
    """Host memory of one machine; None where the listing does not say."""


def rented(
    price: Price, options: WholeRunOptions, rates: Rates, *, on_demand: Price | None = None, machines: int = 1
) -> Terms:
    """The terms of an offer, or of the user's own price for as many `machines` as the job is timed on."""
    offer = price.offer
    provider = str(offer.get("provider") or "user")
    machines = int(offer.get("instances") or machines)
    ram_gib = offer.get("ram_gib")
    return Terms(
        usd_per_h=price.usd_per_h,
        provider=provider,
        machines=machines,
        billing=_billing(provider, options),
        storage_usd_per_gb_month=options.storage_usd_per_gb_month,
        egress_usd_per_gb=options.egress_usd_per_gb,
        cuts=cuts_of(offer, options, rates) if options.spot else None,
        on_demand_usd_per_h=None if on_demand is None else on_demand.usd_per_h,
        ram_bytes=None if ram_gib is None else float(ram_gib) * GIB,
    )


def owned(
    gpu: Gpu | None,
    num_gpus: int,
    options: WholeRunOptions,
    rates: Rates,
    measured_w: float | None,
    *,
    machines: int = 1,
) -> Terms:
    """The terms of machines of one's own: no rent, no rounding, electricity."""
    return Terms(
        usd_per_h=0.0,
        provider="owned",
        machines=machines,
        billing=Billing(granularity_s=0.0, minimum_s=0.0, origin="cli", source="--owned"),
        storage_usd_per_gb_month=options.storage_usd_per_gb_month or 0.0,
        egress_usd_per_gb=options.egress_usd_per_gb or 0.0,
        power=power_of(gpu, num_gpus, options, rates, measured_w, machines=machines),
    )


def _billing(provider: str, options: WholeRunOptions) -> Billing:
    rule = billing_rule(provider)
    given = (options.billing_granularity_s, options.billing_minimum_s)
    if given == (None, None):
        return rule
    return replace(
        rule,
        granularity_s=rule.granularity_s if given[0] is None else given[0],
        minimum_s=rule.minimum_s if given[1] is None else given[1],
        origin="cli",
        source="--billing-granularity-s, --billing-minimum-s",
    )


def cuts_of(offer: Mapping[str, Any], options: WholeRunOptions, rates: Rates) -> Cuts:
    """The interruption rate: the user's, else the band of that instance and region, else assumed.

    A closed band stands for its middle. An open one ("more than 20%") ends at the assumed upper end and
    stands for the geometric middle.
    """
    given = options.interruption_rate_per_month
    if given is not None:
        return Cuts(monthly=Value(value=given, low=given, high=given), origin="cli", source="given by the user")
    found = interruptions(str(offer.get("provider")), str(offer.get("instance_or_sku")), str(offer.get("region") or ""))
    assumed = rates["interruption_per_month"]
    if found is None:
        value = Value(value=assumed.value, low=assumed.low, high=assumed.high)
        return Cuts(
            monthly=value,
            origin=assumed.origin,
            source="assumed: no rate of this offer is known; --interruption-rate-per-month",
        )
    source = f"{found.source}, {found.source_date}"
    low, high = found.monthly_low, found.monthly_high
    if high is None:
        top = max(assumed.high, low)
        return Cuts(
            monthly=Value(value=math.sqrt(low * top), low=low, high=top),
            origin="documented",
            source=f"{source}: more than {low:.0%}, upper end {top:.0%} assumed",
        )
    middle = (low + high) / 2.0
    band = Value(value=middle, low=low, high=high)
    return Cuts(monthly=band, origin="documented", source=f"{source}: {low:.0%} to {high:.0%}")


def power_of(
    gpu: Gpu | None,
    num_gpus: int,
    options: WholeRunOptions,
    rates: Rates,
    measured_w: float | None,
    *,
    machines: int = 1,
) -> Power | None:
    """Watts while training and while waiting: GPUs, hosts, and the building's overhead.

    Training: what the user says, else the record's median sensor reading, else the power limit times an
    assumed share. Without any of them (a CPU) only the host counts.
    """
    if options.electricity_usd_per_kwh is None:
        return None
    limit_w = 0.0 if gpu is None or gpu.tdp_w is None else gpu.tdp_w
    busy, idle = rates["gpu_power_frac"], rates["gpu_idle_frac"]
    host_w = rates["host_power_w"]
    pue = rates["pue"].value if options.pue is None else options.pue
    building = f"PUE {pue:g}{' (assumed)' if options.pue is None else ''}"
    if options.gpu_power_w is not None:
        card = Factor(value=1, low=1, high=1, unit="1", origin="cli")
        card_w, word = options.gpu_power_w, "given"
    elif measured_w is not None:
        card, card_w, word = Factor(value=1, low=0.9, high=1.1, unit="1", origin="measured"), measured_w, "measured"
    else:
        card, card_w, word = busy, limit_w * busy.value, f"{busy.value:.0%} of its {limit_w:.0f} W, assumed"
    hosts_w = machines * host_w.value
    training_w = num_gpus * card_w + hosts_w
    spread = math.hypot(
        num_gpus * card_w * math.log(card.high / card.low) / 2.0,
        hosts_w * math.log(host_w.high / host_w.low) / 2.0,
    )
    ends = math.exp(spread / training_w)
    return Power(
        training_w=training_w * pue,
        waiting_w=(num_gpus * limit_w * idle.value + hosts_w) * pue,
        spread=Value(value=1.0, low=1.0 / ends, high=ends),
        usd_per_kwh=options.electricity_usd_per_kwh,
        origin="cli" if word == "given" else "measured" if word == "measured" else "assumed",
        how=f"{card_w:.0f} W per GPU while training ({word}), {host_w.value:.0f} W host (assumed)"
        f"{f' in each of {machines:,} machines' if machines > 1 else ''}, {building}",
    )
