"""Dates as people write them, in ISO form: a day, a month or a year, and what stands beside them.

``June 15, 2024``, ``15.06.2024``, ``Juni 2024``, ``2024/06`` and ``20240615`` are one day or month each; a quarter and
a half of a year are their last month, because versions are those of the newest release by then. Which of two numbers is
the day depends on the country: ``03/04/2024`` is read only where one of the orders is no date. A year alone is that
year, unless a word beside it says which part of it is meant. Of several dates the last is the newest; one that is not,
one before transformers and one more than a year ahead are refused.
"""

from __future__ import annotations

import datetime
import itertools
import re

from tunecast.catalogs.clock import today

MONTHS = (
    r"jan(?:uar[yi]?|vier)?|enero|gennaio|janeiro|j\u00e4nner",
    r"feb(?:ruar[yi]?|rero|braio)?|f\u00e9vr(?:ier)?|fevereiro",
    r"mar(?:ch|s|zo|\u00e7o)?|m\u00e4rz|mrz",
    r"apr(?:il(?:e)?)?|avr(?:il)?|abril",
    r"may|mai|mayo|maggio|maio",
    r"june?|juni|juin|junio|giugno|junho",
    r"july?|juli|juil(?:let)?|julio|luglio|julho",
    r"aug(?:ust)?|ao\u00fbt|agosto",
    r"sept?(?:ember|embre|iembre)?|settembre|setembro",
    r"oct(?:ober|obre|ubre)?|okt(?:ober)?|ottobre|outubro",
    r"nov(?:ember|embre|iembre|embro)?",
    r"dec(?:ember)?|dez(?:ember|embro)?|d\u00e9c(?:embre)?|dic(?:iembre|embre)?",
)
"""The months in English, German, French, Spanish, Italian and Portuguese, with what they are shortened to."""
NAME = rf"(?P<name>{'|'.join(MONTHS)})\b\.?"
OTHER_NAME = NAME.replace("<name>", "<later>")
DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
YEAR = r"(?P<year>(?:19|20)\d\d)"
CLOCK = r"(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
SPAN = r"\s*(?:-|\u2013|\u2014|to|and|until|through)\s*"
FORMS = tuple(
    re.compile(rf"(?<![\w.'/-]){form}(?![\w'])(?![./-]\d)", re.IGNORECASE)
    for form in (
        rf"{YEAR}[-./](?P<month>\d{{1,2}})[-./](?P<day>\d{{1,2}}){CLOCK}",
        rf"{YEAR}[-./](?P<month>\d{{1,2}})",
        rf"{YEAR}\s*[\u5e74\ub144]\s*(?P<month>\d{{1,2}})\s*[\u6708\uc6d4](?:\s*(?P<day>\d{{1,2}})\s*[\u65e5\u53f7\uc77c])?",
        r"(?P<year>20\d\d)(?P<month>0[1-9]|1[0-2])(?P<day>[0-3]\d)?",
        rf"(?P<first>\d{{1,2}})(?P<sign>[./-])(?P<second>\d{{1,2}})(?P=sign){YEAR}",
        rf"(?P<month>\d{{1,2}})[./-]{YEAR}",
        rf"{NAME}\s*{DAY},?\s+{YEAR}",
        rf"{DAY}\.?[\s-]*(?:(?:of|de|del)\s+)?{NAME}[\s,-]*(?:(?:of|de|del)\s+)?{YEAR}",
        rf"{NAME}{SPAN}{OTHER_NAME}[\s,/-]*(?:(?:of|de|del)\s+)?{YEAR}",
        rf"{NAME}[\s,/-]*(?:(?:of|de|del)\s+)?(?:{YEAR}|['\u2019](?P<short>[12]\d))",
        rf"{YEAR}[\s,/-]*{NAME}",
        rf"{YEAR}\s*\(\s*{NAME}\s*\)",
        rf"q(?P<quarter>[1-4])[\s,/-]*(?:(?:of|de|del)\s+)?{YEAR}",
        rf"{YEAR}[\s,/-]*q(?P<quarter>[1-4])",
        rf"{YEAR}\s*\(\s*q(?P<quarter>[1-4])\s*\)",
        rf"q(?P<quarter>[1-4])(?:{SPAN}|/)q(?P<later_quarter>[1-4])[\s,/-]*(?:(?:of|de|del)\s+)?{YEAR}",
        rf"{YEAR}[\s,/-]*q(?P<quarter>[1-4])(?:{SPAN}|/)q(?P<later_quarter>[1-4])",
        rf"h(?P<half>[12])[\s,/-]*(?:(?:of|de|del)\s+)?{YEAR}",
        rf"{YEAR}[\s,/-]*h(?P<half>[12])",
        rf"{YEAR}\s*\(\s*h(?P<half>[12])\s*\)",
    )
)
"""What is tried at every place, longest match first; the groups say what each number is."""
ISO = re.compile(r"\b(?:19|20)\d\d(?:-\d\d(?:-\d\d)?)?\b")
BESIDE_A_YEAR = re.compile(
    r"\b(approx(imately)?|about|around|circa|ca|c|and|to|until|through|between|from|since|by|as|of|in|on|at|the|or|rows?"
    r"|added|over|time|snapshot|page|head|published|measured|released|updated|accessed|late|end|year|whole|all)\b",
    re.IGNORECASE,
)
"""Words that say nothing of the part of a year, or that it is its end."""
PART_OF_A_YEAR = re.compile(
    r"\b(early|mid|middle|begin\w*|start|spring|summer|autumn|fall|winter|half|quarter|week|cw ?\d+|w ?\d+)\b",
    re.IGNORECASE,
)
MONTH_OF_A_YEAR = re.compile(rf"\b(?:{NAME}|[qh][1-4]\b|(?<![\w.])\d{{1,2}}(?![\w.]))", re.IGNORECASE)
"""In brackets behind a year: it may be a part of that year."""
LEFT_OVER = re.compile(r"\b[qh][1-4]\b", re.IGNORECASE)
LOOKED_UP = re.compile(
    r"[\s,;]*[(\[]?\s*\b(?:last )?(?:accessed|retrieved|viewed|downloaded|archived|crawled)\b[^()\[\]]*[)\]]?\s*$",
    re.IGNORECASE,
)
"""When somebody read the source: no date of what ran, beside another."""
OLDEST = "2017"
"""Year of the first transformer (Vaswani et al., Attention Is All You Need)."""
WRITE = "write it as 2024-06-15, 2024-06 or 2024"


class DateError(ValueError):
    """Why a text is no date, after ``source_date 'text'``."""


def iso_dates(text: str) -> str:
    """A text with its dates in ISO form, a date first; raises `DateError` where it cannot be told which is meant."""
    written = LOOKED_UP.sub("", text)
    text = written if re.search(r"\d", written) else text
    found, place = "", 0
    while place < len(text):
        matches = [match for form in FORMS if (match := form.match(text, place)) is not None]
        best = max(matches, key=lambda match: len(match[0]), default=None)
        found += _iso(best) if best is not None else text[place]
        place = best.end() if best is not None else place + 1
    if not ISO.search(found):
        raise DateError(f"names no year: {WRITE}")
    _nothing_left(found)
    _in_time(ISO.findall(found))
    return found if ISO.match(found) else " to ".join(ISO.findall(found))


def _iso(match: re.Match[str]) -> str:
    """One date of a text."""
    said = {name: value for name, value in match.groupdict().items() if value is not None}
    year = said.get("year") or f"20{said['short']}"
    if "first" in said:
        return _in_order(year, int(said["first"]), int(said["second"]))
    if "later" in said:
        return f"{_day(year, _month(said['name']))} to {_day(year, _month(said['later']))}"
    if "later_quarter" in said:
        return f"{_day(year, 3 * int(said['quarter']))} to {_day(year, 3 * int(said['later_quarter']))}"
    if "quarter" in said or "half" in said:
        return _day(year, 3 * int(said["quarter"]) if "quarter" in said else 6 * int(said["half"]))
    month = _month(said["name"]) if "name" in said else int(said["month"])
    return _day(year, month, int(said["day"]) if "day" in said else None)


def _month(name: str) -> int:
    return next(number for number, names in enumerate(MONTHS, start=1) if re.fullmatch(names, name, re.IGNORECASE))


def _in_order(year: str, first: int, second: int) -> str:
    """Day and month as the calendar allows; refused where either order is a date."""
    orders = {(month, day) for day, month in ((first, second), (second, first)) if month <= 12}
    if len(orders) > 1:
        written = " or ".join(f"{year}-{month:02}-{day:02}" for month, day in sorted(orders))
        raise DateError(f"may be {written}: write which")
    month, day = next(iter(orders), (first, second))
    return _day(year, month, day)


def _day(year: str, month: int, day: int | None = None) -> str:
    """A day or month of the calendar."""
    try:
        datetime.date(int(year), month, day or 1)
    except ValueError as error:
        raise DateError("is no day of the calendar") from error
    return f"{year}-{month:02}" if day is None else f"{year}-{month:02}-{day:02}"


def _nothing_left(found: str) -> None:
    """No number or word beside the dates may be a month of them; what stands in brackets is about something else."""
    dates = ISO.findall(found)
    rest = ISO.sub(" ", found)
    bare = re.sub(r"\([^)]*\)|\[[^\]]*\]", " ", rest)
    years_alone = all(len(date) == 4 for date in dates)
    part = PART_OF_A_YEAR.search(rest) or MONTH_OF_A_YEAR.search(rest) if years_alone else LEFT_OVER.search(bare)
    number = re.search(r"(?<![\w.])\d{1,2}(?![\w.])|\b['\u2019]?\d\d\b", bare)
    words = re.findall(r"[^\W\d_]+", BESIDE_A_YEAR.sub(" ", bare)) if years_alone else []
    odd = part[0] if part else number[0] if number else words[0] if words else ""
    if odd:
        raise DateError(f"says {odd!r} beside {dates[-1]}, which may be a part of the year: {WRITE}")


def _in_time(dates: list[str]) -> None:
    """Dates on which a language model can have been trained, the newest last: versions are those of its day."""
    now = today().isoformat()
    newest = f"{int(now[:4]) + 1}{now[4:]}"
    for date in dates:
        if date < OLDEST or date > newest[: len(date)]:
            raise DateError(f"says {date}, when no such run was measured: {WRITE}")
    for earlier, later in itertools.pairwise(dates):
        shared = min(len(earlier), len(later))
        if later[:shared] < earlier[:shared]:
            raise DateError(f"says {later} behind {earlier}: write the day alone whose software ran")
