"""A user's own prices: a CSV with the columns of `tunecast catalog prices --json`.

Needed: `gpu_canonical_id` (any name of the GPU) and `usd_per_gpu_hour` or `usd_per_hour` (one listing of
`gpu_count` GPUs). Everything else has a plain default: on-demand, seen today, the file as its source, and a
price per GPU is of machines as large as are forecast (`MACHINE` names the columns that say otherwise).
Reserved and committed rows say `term_months`, and `upfront_usd` where something is paid at the start.
"""

from __future__ import annotations

import csv
import io
import re
import reprlib
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

from tunecast.catalogs.clock import today
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import find_gpu
from tunecast.catalogs.prices import ANY_SIZE, PRICE_TYPES, STATISTICS, Offer, gpu_families, parse_offers
from tunecast.catalogs.tables import Row, read_rows

OWN_COLUMNS = ("term_months", "upfront_usd")
"""Columns that only a user's file has."""
SHOWN_COLUMNS = ("rankable", "age_days")
"""Columns that `catalog prices --json` adds; they follow from the others and are not read."""
BINDING_KINDS = ("reserved", "committed")
FEWEST_COLUMNS = 2
"""A GPU and a price."""
MOST_AMOUNT = 1e9
"""Beyond this no cell is a price, a size or a count."""
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
ROUNDING = 0.01
"""Relative difference that rounding may leave between the two prices of a row."""


def read_price_file(path: Path) -> tuple[Offer, ...]:
    """The offers of a user's file. Raises InputError, naming file, line and column, for the first bad cell."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"Price file {path} is not UTF-8 text; save it as CSV UTF-8 (comma delimited).") from error
    except OSError as error:
        raise InputError(
            f"Price file {path} cannot be read ({error.strerror or error}); give the path of a CSV file."
        ) from error
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        _check_header(path, reader.fieldnames or ())
        rows = [_checked(_Line(path, reader.line_num, raw)) for raw in reader]
    except csv.Error as error:
        raise InputError(
            f"{path} is no whole CSV ({error}); close every quote and keep one price on a line."
        ) from error
    if not rows:
        raise InputError(f"Price file {path} has no rows; give one line per price under the header.")
    offers = parse_offers(rows, layer="user")
    _check_one_price_a_day(path, offers)
    return offers


def known_columns() -> tuple[str, ...]:
    """Every column that a user's file may have."""
    return (*read_rows("prices.csv")[0], *OWN_COLUMNS, *SHOWN_COLUMNS)


def _check_header(path: Path, header: Sequence[str]) -> None:
    if len(header) < FEWEST_COLUMNS and not {*header} & {*known_columns()}:  # an empty line, or other separators
        found = reprlib.repr(header[0]) if header else "nothing"
        raise InputError(
            f"{path}, line 1 holds {found}, but must be the header: names of columns with commas between them, for "
            "example gpu_canonical_id,usd_per_gpu_hour."
        )
    twice = next((name for place, name in enumerate(header) if name in header[:place]), None)
    if twice is not None:
        raise InputError(f"{path}, line 1, column {reprlib.repr(twice)} stands twice; keep one of them.")
    unknown = [name for name in header if name not in known_columns()]
    if unknown:
        raise InputError(
            f"{path}, line 1, column {reprlib.repr(unknown[0])} is not known; use {', '.join(known_columns())}."
        )
    if "gpu_canonical_id" not in header:
        raise InputError(f"{path}, line 1, column 'gpu_canonical_id' is missing; add it, with for example l40s-48gb.")
    if not {"usd_per_gpu_hour", "usd_per_hour"} & set(header):
        raise InputError(
            f"{path}, line 1, column 'usd_per_gpu_hour' is missing; add it, or 'usd_per_hour' with the price of an "
            "instance."
        )


MACHINE = ("gpu_count", "instance_gpus", "instance_or_sku", "offer_sku", "usd_per_hour")
"""Columns that speak of one machine: a price per GPU beside none of them is of any number of GPUs."""


def _check_one_price_a_day(path: Path, offers: Sequence[Offer]) -> None:
    """The same offer at two prices on one day has no current price."""
    seen: dict[object, float] = {}
    for offer in offers:
        price = seen.setdefault((offer.key, offer.snapshot_date), offer.usd_per_gpu_hour)
        if price != offer.usd_per_gpu_hour:
            raise InputError(
                f"{path} has two prices of {offer.provider} for {offer.gpu_id} on {offer.snapshot_date} "
                f"(${price:g} and ${offer.usd_per_gpu_hour:g} per GPU); tell them apart by instance_or_sku or region."
            )


class _Line:
    """One line of the file, whose faults name it."""

    def __init__(self, path: Path, number: int, raw: Mapping[str | None, str | list[str] | None]) -> None:
        self.path, self.line_number = path, number
        if None in raw:
            raise self.fault(str(len(raw)), "is beyond the header's last column; quote cells that contain a comma")
        self.cells = {str(name): (text or "").strip() if isinstance(text, str) else "" for name, text in raw.items()}

    def fault(self, column: str, what: str) -> InputError:
        return InputError(f"{self.path}, line {self.line_number}, column {column!r} {what}.")

    def text(self, column: str, default: str = "") -> str:
        return self.cells.get(column) or default

    def amount(self, column: str, *, zero: bool = False) -> float | None:
        """A number above 0 (or, with `zero`, not below it); None for an empty cell."""
        text = self.text(column)
        if not text:
            return None
        if not PLAIN_NUMBER.fullmatch(text):
            raise self.fault(column, f"is {reprlib.repr(text)}, not a number; type for example 2.5")
        value = float(text)
        if value > MOST_AMOUNT:
            raise self.fault(column, f"is {text}, which is above {MOST_AMOUNT:g}; type for example 2.5")
        if value < 0 or (value == 0 and not zero):
            raise self.fault(column, f"is {text}, which is not {'0 or above' if zero else 'above 0'}")
        return value

    def whole(self, column: str) -> int | None:
        value = self.amount(column)
        if value is not None and value != int(value):
            raise self.fault(column, f"is {value:g}, not a whole number")
        return None if value is None else int(value)

    def one_of(self, column: str, choices: tuple[str, ...]) -> str:
        text = self.text(column, choices[0])
        if text not in choices:
            raise self.fault(column, f"is {text!r}; use one of {', '.join(choices)}")
        return text


def _checked(line: _Line) -> Row:
    """A row with every column of the shipped file, from one line of the user's."""
    gpu_count = line.whole("gpu_count") or 1
    per_hour = _usd_per_hour(line, gpu_count)
    statistic = line.one_of("statistic", STATISTICS)
    return {
        "provider": line.text("provider", "user").lower(),
        "tier": line.text("tier"),
        "gpu_canonical_id": _gpu_id(line),
        "gpu_as_listed": line.text("gpu_as_listed", line.text("gpu_canonical_id")),
        "instance_or_sku": line.text("instance_or_sku"),
        "offer_sku": line.text("offer_sku", line.text("instance_or_sku")),
        "region": line.text("region"),
        "gpu_count": str(gpu_count),
        "instance_gpus": str(_instance_gpus(line, gpu_count)),
        ANY_SIZE: "" if any(line.text(name) for name in MACHINE) else "yes",
        "vcpu": _number_text(line.amount("vcpu")),
        "ram_gib": _number_text(line.amount("ram_gib")),
        "price_type": line.one_of("price_type", PRICE_TYPES),
        "statistic": statistic,
        "usd_per_hour": repr(per_hour),
        "usd_per_gpu_hour": repr(per_hour / gpu_count),
        "snapshot_date": _day(line),
        "source": line.text("source", line.path.name),
        "note": line.text("note"),
        "why_not_rankable": line.text("why_not_rankable"),
        **_term(line),
    }


def _gpu_id(line: _Line) -> str:
    name = line.text("gpu_canonical_id")
    if not name:
        raise line.fault("gpu_canonical_id", "is empty; `tunecast catalog gpus` lists the GPUs")
    if name in gpu_families():
        return name
    try:
        return find_gpu(name).id
    except InputError as error:
        raise line.fault("gpu_canonical_id", f"names no GPU: {str(error).rstrip('.')}") from error


def _usd_per_hour(line: _Line, gpu_count: int) -> float:
    """Price of one listing of `gpu_count` GPUs, by whichever of its two columns is filled; both must agree."""
    per_gpu, per_listing = line.amount("usd_per_gpu_hour"), line.amount("usd_per_hour")
    if per_listing is None:
        if per_gpu is None:
            raise line.fault("usd_per_gpu_hour", "is empty; every row needs a price")
        return per_gpu * gpu_count
    if per_gpu is not None and abs(per_gpu * gpu_count / per_listing - 1) > ROUNDING:
        raise line.fault("usd_per_hour", f"is {per_listing:g}, but {gpu_count} x {per_gpu:g} per GPU is not that")
    return per_listing


def _instance_gpus(line: _Line, gpu_count: int) -> int:
    instance_gpus = line.whole("instance_gpus") or gpu_count
    if instance_gpus % gpu_count:
        raise line.fault("instance_gpus", f"is {instance_gpus}, which is not a multiple of gpu_count {gpu_count}")
    return instance_gpus


def _term(line: _Line) -> Row:
    months, upfront = line.amount("term_months"), line.amount("upfront_usd", zero=True)
    kind = line.text("price_type", "on-demand")
    if months is None and (upfront or kind in BINDING_KINDS):
        why = f"price_type {kind}" if kind in BINDING_KINDS else "an upfront payment"
        raise line.fault("term_months", f"is empty, but {why} binds for a term; type its months, for example 12")
    return {"term_months": _number_text(months), "upfront_usd": _number_text(upfront)}


def _day(line: _Line) -> str:
    """The day; a month alone, as some prices of the catalog have it, counts as its first day."""
    text = line.text("snapshot_date") or today().isoformat()
    try:
        day = date.fromisoformat(f"{text}-01" if re.fullmatch(r"\d{4}-\d{2}", text) else text)
    except ValueError:
        raise line.fault("snapshot_date", f"is {text!r}, not a day like 2026-11-20") from None
    if day > today() + timedelta(days=1):  # a day more, for those whose day has begun
        raise line.fault("snapshot_date", f"is {text}, which is still to come; type the day on which you saw the price")
    return day.isoformat()


def _number_text(value: float | None) -> str:
    return "" if value is None else repr(value)
