"""Checks of what renting costs beside the machine: interruptions, storage, transfer out, networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tunecast.catalogs.integrity import Check, is_day, repeated
from tunecast.catalogs.tables import Row, number

EGRESS_BASES = ("stated", "placeholder", "unknown")


def rental_facts_sourced(rows: Sequence[Row]) -> list[str]:
    """Every row has a provider, a source and a day."""
    faults = [f"{_row(r)}: {column} is empty" for r in rows for column in ("provider", "source") if not r[column]]
    return faults + [f"{_row(r)}: {r['source_date']!r} is not a day" for r in rows if not is_day(r["source_date"])]


def interruptions_are_bands(rows: Sequence[Row]) -> list[str]:
    """A band lies within a month's 0 to 1, opens upwards only with its top left empty, and is stated once."""
    faults = repeated("interruption", (" ".join((r["provider"], r["instance"], r["region"])) for r in rows))
    for row in rows:
        low, high = number(row["monthly_low"]), number(row["monthly_high"])
        if low is None or not 0 <= low < 1 or (high is not None and not low < high <= 1):
            faults.append(f"{_row(row)}: {row['monthly_low']!r} to {row['monthly_high']!r} is no band of a month")
        saving = number(row["saving_vs_on_demand"])
        if saving is not None and not 0 <= saving < 1:
            faults.append(f"{_row(row)}: a saving of {saving} is not a fraction below 1")
    return faults


def storage_steps_rise(rows: Sequence[Row]) -> list[str]:
    """Each kind's price steps start at 0 GB and rise; every price is above zero."""
    faults = [f"{_row(r)}: a price of {r['usd_per_gb_month']!r}" for r in rows if not (_usd(r, "_month") or 0) > 0]
    return faults + list(_steps(rows, ("provider", "kind")))


def egress_steps_rise(rows: Sequence[Row]) -> list[str]:
    """Each provider's steps start at 0 GB and rise; a price goes with the basis stated, and is not below zero."""
    faults = list(_steps(rows, ("provider",)))
    for row in rows:
        usd = _usd(row)
        if row["basis"] not in EGRESS_BASES or (usd is None) == (row["basis"] == "stated"):
            faults.append(f"{_row(row)}: {row['usd_per_gb']!r} does not go with the basis {row['basis']!r}")
        if usd is not None and usd < 0:
            faults.append(f"{_row(row)}: a price of {usd}")
    return faults


def networks_positive(rows: Sequence[Row]) -> list[str]:
    """Every machine is listed once, with a bandwidth above zero."""
    faults = repeated("network", (" ".join((r["provider"], r["instance"])) for r in rows))
    return faults + [f"{_row(r)}: no bandwidth" for r in rows if not (number(r["network_gbit_per_s"]) or 0) > 0]


def _steps(rows: Sequence[Row], columns: tuple[str, ...]) -> Iterable[str]:
    starts: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        starts.setdefault(tuple(row[column] for column in columns), []).append(float(row["from_gb"]))
    for key, found in starts.items():
        if found[0] != 0 or any(later <= earlier for earlier, later in pairwise(found)):
            yield f"{' '.join(key)}: price steps from {found} GB do not rise from 0"


def _usd(row: Row, per: str = "") -> float | None:
    return number(row[f"usd_per_gb{per}"])


def _row(row: Row) -> str:
    columns = ("provider", "instance", "region", "kind", "from_gb")
    return " ".join(row[column] for column in columns if row.get(column))


RENTAL_CHECKS: dict[str, tuple[Check, ...]] = {
    "interruptions.csv": (rental_facts_sourced, interruptions_are_bands),
    "storage.csv": (rental_facts_sourced, storage_steps_rise),
    "egress.csv": (rental_facts_sourced, egress_steps_rise),
    "networks.csv": (rental_facts_sourced, networks_positive),
}
