"""The whole run and its price: phases, what the machine is paid for, interruptions, and what else costs money.

`whole_run` is pure arithmetic on amounts that were computed before, so that thousands of offers can be
tried: about a tenth of a millisecond a call. What it needs:

    work     = run_work.work_of(architecture, run, amount, forward_frac=...)   once per run
    rates    = phase_rates.phase_rates(gpu, factors, options.phase_rate)       once per device
    terms    = terms.rented(price, options, rates) or terms.owned(...)         once per offer; None: no price
    answer   = whole_run(work, step_time_s, options=options, rates=rates, terms=terms)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from tunecast.catalogs.rental_facts import dearest_storage_usd_per_gb_month, egress_usd_per_gb, storage_usd_per_gb_month
from tunecast.catalogs.tables import read_rows
from tunecast.model.factors import Factor
from tunecast.model.interrupted import Interrupted, interrupted
from tunecast.model.phase import Phase, Work
from tunecast.model.phase_rates import Billing, Rates
from tunecast.model.phases import (
    dataset_bytes,
    exported_bytes,
    kept_checkpoints,
    merges,
    phases_of,
    uploaded_bytes,
)
from tunecast.model.terms import Power, Terms
from tunecast.model.units import GIGA, KILO, MONTH_H
from tunecast.model.value import Value, exact, product, total
from tunecast.model.whole_run_options import WholeRunOptions

DAY_H = 24.0
STORES = {"s3": "aws", "ebs": "aws", "gcs": "gcp", "gs": "gcp", "blob": "azure"}
"""Storage services by their everyday names, and the provider that bills what leaves them."""
TRAINING = ("train", "evaluate")
"""Phases in which a GPU draws its training power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """Every phase of a run with its time, and what it all costs."""

    phases: tuple[Phase, ...]
    total_time_h: Value
    """Wall clock from the request to the end, all phases one after another; expected, if interruptible."""
    train_time_h: Value
    """Training alone, as if nothing interrupted it."""
    cost_usd: Value | None
    """None without a price."""
    cost_parts_usd: dict[str, float] = field(default_factory=dict)
    """Rent, other machines, storage, egress, electricity; they sum to `cost_usd`."""
    billed_h: float | None = None
    """Hours of the machine with the GPUs that are paid for."""
    energy_kwh: float | None = None
    interruptions: Interrupted | None = None
    usd_per_h: float | None = None
    """Of the machine with the GPUs, all of the job's together."""
    billing: Billing | None = None
    power: Power | None = None
    seed: int = 0
    """Of the simulation of interruptions."""
    uncounted: tuple[str, ...] = ()
    evaluates_every: int | None = None
    """Steps between evaluations; None: one at the end, however long the run is."""
    guessed_storage_usd_per_gb_month: float | None = None
    """What a disk was taken to cost where the provider's price is not known; None: nothing was."""
    """What costs money and is not in `cost_usd`, because nobody states its price."""

    @property
    def phases_h(self) -> dict[str, float]:
        """Hours by phase; they sum to the total."""
        return {phase.name: phase.hours.value for phase in self.phases}


def whole_run(
    work: Work, step_time_s: Value, *, options: WholeRunOptions, rates: Rates, terms: Terms | None
) -> WholeRun:
    """Phases, total time and cost of one run on one offer; `terms` None leaves the money out."""
    rates = _with_ram(rates, options, terms)
    phases = phases_of(work, step_time_s, rates, options)
    trained = next(phase.hours for phase in phases if phase.name == "train")
    here = [phase for phase in phases if phase.usd_per_h is None]
    elsewhere = [phase for phase in phases if phase.usd_per_h is not None]
    held = total(phase.hours for phase in here)
    cuts = None
    if options.spot and terms is not None and terms.cuts is not None:
        cuts = interrupted(here, work, rates, options, terms)
        added = cuts.added_h
        phases = (*phases, Phase(name="interruptions", hours=added, origin=terms.cuts.origin, how=cuts.how))
        held = cuts.expected_h
    time = total([held, *(phase.hours for phase in elsewhere)]) if elsewhere else held
    whole = WholeRun(
        phases=phases,
        total_time_h=time,
        train_time_h=trained,
        cost_usd=None,
        interruptions=cuts,
        seed=options.seed,
        evaluates_every=options.eval_steps,
    )
    return whole if terms is None else _priced(whole, held, elsewhere, work, rates, options, terms)


def _with_ram(rates: Rates, options: WholeRunOptions, terms: Terms | None) -> Rates:
    """Host memory as the offer states it, where data are prepared on that machine and the user says nothing else."""
    if terms is None or terms.ram_bytes is None or rates["host_ram_gb"].origin != "assumed":
        return rates
    if "prepare" in options.phase_machine or not (options.prepare or options.dataset_gb or options.data_location):
        return rates
    ram_gb = terms.ram_bytes / GIGA
    return {**rates, "host_ram_gb": Factor(value=ram_gb, low=ram_gb, high=ram_gb, unit="GB", origin="datasheet")}


def _priced(
    whole: WholeRun,
    held: Value,
    elsewhere: Sequence[Phase],
    work: Work,
    rates: Rates,
    options: WholeRunOptions,
    terms: Terms,
) -> WholeRun:
    bill = terms.billing.billed_h
    rent = Value(value=bill(held.value), low=bill(held.low), high=bill(held.high)).scaled(terms.usd_per_h)
    others = total(phase.hours.scaled(phase.usd_per_h or 0.0) for phase in elsewhere)
    gb = disk_bytes(work, rates, options, terms.machines) / GIGA
    per_month, guessed = _storage_usd_per_gb_month(gb, options, terms)
    gb_months = gb * (whole.total_time_h.value + options.keep_days * DAY_H) / MONTH_H
    storage, egress, uncounted = _flat(gb_months, work, rates, options, terms, per_month)
    energy, kwh = _energy(whole, terms)
    parts = {
        "rent": rent.value,
        "other_machines": others.value,
        "storage": storage,
        "egress": egress,
        "electricity": energy.value,
    }
    return replace(
        whole,
        cost_usd=total([rent, others, exact(storage), exact(egress), energy]),
        cost_parts_usd={name: usd for name, usd in parts.items() if usd > 0.0},
        billed_h=bill(held.value),
        energy_kwh=kwh,
        usd_per_h=terms.usd_per_h,
        billing=terms.billing,
        power=terms.power,
        uncounted=uncounted,
        guessed_storage_usd_per_gb_month=per_month if guessed and storage > 0.0 else None,
    )


def _storage_usd_per_gb_month(gb: float, options: WholeRunOptions, terms: Terms) -> tuple[float | None, bool]:
    """(price of the disk, whether it is a guess): of a provider whose own is not known the dearest of those that are,
    where the disk is kept after the run, so that no offer is the cheapest because its price is missing."""
    if terms.storage_usd_per_gb_month is not None or terms.provider == "user":
        return terms.storage_usd_per_gb_month, False
    known = storage_usd_per_gb_month(terms.provider, "disk", gb)
    if known is not None or options.keep_days <= 0.0:
        return known, False
    return dearest_storage_usd_per_gb_month("disk", gb), True


def _flat(
    gb_months: float, work: Work, rates: Rates, options: WholeRunOptions, terms: Terms, per_month: float | None
) -> tuple[float, float, tuple[str, ...]]:
    """(storage, egress, what is not counted): GB-months of the disk, and GB that leave a provider."""
    if options.train_only:
        return 0.0, 0.0, ()
    unknown = []
    if per_month is None:
        unknown.append("storage")
    storage = (per_month or 0.0) * gb_months
    egress = 0.0
    for place, out_gb in transfers_gb(work, rates, options, terms):
        per_gb = _egress(place, out_gb, terms)
        egress += (per_gb or 0.0) * out_gb
        if per_gb is None:
            unknown.append("egress")
    return storage, egress, tuple(dict.fromkeys(unknown))


def transfers_gb(work: Work, rates: Rates, options: WholeRunOptions, terms: Terms) -> list[tuple[str, float]]:
    """(provider, GB) that leave it: what is uploaded, and data that lie with another provider."""
    leaving = [(terms.provider, uploaded_bytes(work, options) / GIGA)]
    if options.data_location is not None:
        name = options.data_location[0].lower()
        place = STORES.get(name, name)
        if place != terms.provider:
            leaving.append((place, dataset_bytes(work, rates, options) / GIGA))
    return [(place, gb) for place, gb in leaving if gb > 0.0]


def _egress(place: str, gb: float, terms: Terms) -> float | None:
    """USD per GB; a place that is no provider (a disk of one's own) lets data go for nothing."""
    if terms.egress_usd_per_gb is not None:
        return terms.egress_usd_per_gb
    if place == "user":
        return None
    known = place in egress_providers() or place == terms.provider
    return egress_usd_per_gb(place, gb) if known else 0.0


@cache
def egress_providers() -> frozenset[str]:
    """Providers whose transfer out has a price, or is known to be unknown."""
    return frozenset(row["provider"] for row in read_rows("egress.csv"))


def disk_bytes(work: Work, rates: Rates, options: WholeRunOptions, machines: int = 1) -> float:
    """What lies on the disks at the end: weights on those of every machine, and data where they are prepared; the
    result and checkpoints once, whose shards are written by whoever has them."""
    data = dataset_bytes(work, rates, options) if options.prepare or options.dataset_gb is not None else 0.0
    kept = kept_checkpoints(work, options) * work.checkpoint_bytes
    merged = work.merged_bytes if merges(work, options) else 0.0
    exported = exported_bytes(work, options) if options.export is not None else 0.0
    begun_from = 0.0 if options.from_scratch else work.download_bytes
    return machines * (begun_from + data) + work.model_bytes * options.repeats + kept + merged + exported


def _energy(whole: WholeRun, terms: Terms) -> tuple[Value, float | None]:
    """Electricity of the machine's own hours: training watts while it trains or evaluates, waiting watts else."""
    power = terms.power
    if power is None:
        return exact(0.0), None
    here = [phase for phase in whole.phases if phase.usd_per_h is None]
    kwh = total(
        phase.hours.scaled((power.training_w if phase.name in TRAINING else power.waiting_w) / KILO) for phase in here
    )
    return product(kwh, power.spread).scaled(power.usd_per_kwh), kwh.value
