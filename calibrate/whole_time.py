"""The speed of a run whose row states its whole time alone: tokens, or the steps' tokens, over hours.

Evaluations, loading and saving are in that time, so that such a speed is one of the job and no step's: it is compared,
with a note, and nothing is fitted to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunecast.calibrate.cell_numbers import MEASURED
from tunecast.calibrate.run_table import AGREE, NOTHING, Row, SkipRowError, stated_tokens_per_s
from tunecast.model.run import Run
from tunecast.model.units import HOUR_S, MINUTE_S

FLOPS_COLUMNS = ("tflops_per_gpu", "mfu")
"""Columns that state a speed by FLOPs, of which some sources count recomputation or causal attention and others do
not."""
ABOUT = r"(?:~|\u2248|ca\.?|about|approx\.?)?\s*"
AND = r"\s*(?:,|and\b)?\s*"
TIME = re.compile(
    rf"{ABOUT}(?:(?:(?P<days>\d+)\s*days?,?\s+)?(?P<clock>\d+:[0-5]\d:[0-5]\d(?:\.\d+)?)|(?P<hours>\d+(?:\.\d+)?)|(?P<h2>\d+)\s*h\s*(?P<min2>[0-5]\d)|"
    rf"(?:(?P<d>\d+(?:\.\d+)?)\s*d(?:ays?)?{AND})?(?:(?P<h>\d+(?:\.\d+)?)\s*(?:hours?|hrs?|h){AND})?"
    rf"(?:(?P<min>\d+(?:\.\d+)?)\s*m(?:in(?:ute)?s?)?{AND})?(?:(?P<s>\d+(?:\.\d+)?)\s*s(?:ec(?:ond)?s?)?)?)",
    re.IGNORECASE,
)
"""A clock, with days before it as pandas and Python write them, a bare number of hours, or numbers of days, hours,
minutes and seconds in this order."""
DAY_S = 24 * HOUR_S
LENGTHS_S = {"d": DAY_S, "h": HOUR_S, "hours": HOUR_S, "min": MINUTE_S, "s": 1.0, "h2": HOUR_S, "min2": MINUTE_S}
LONG_UNITS = r"(?i:h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)\b"
"""Behind three digits after a comma, which group thousands: a time with a unit has no more than two decimals."""
NUMBER = r"\d{1,3}(?:[, '\u2019_]\d{3})+|\d+(?:\.\d+)?"
POWERS = {
    "": 1.0, "k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "billion": 1e9, "t": 1e12, "trillion": 1e12,
}  # fmt: skip
TOKENS = rf"(?P<tokens>{NUMBER})\s*(?P<tokens_power>{'|'.join(filter(None, POWERS))})?\s*tok(?:ens?)?"
EPOCHS = r"(?:\d+(?:\.\d+)?\s*epochs?\s*[(,=]\s*)?"
STEPS = (
    rf"(?:{EPOCHS}(?P<steps>{NUMBER})\s*(?P<steps_power>k)?\s*"
    r"(?:(?:(?:opt(?:im(?:i[sz]er)?)?|training|train|global)\s+)?steps?|iter(?:ation)?s?|(?:(?:optimi[sz]er|weight)\s+)?updates?)"
    rf"|max[_ -]steps\s*[=:]\s*(?P<max_steps>{NUMBER}))"
)
TOKENS_CELL = re.compile(rf"{ABOUT}{TOKENS}(?:\s+(?:in )?total)?", re.IGNORECASE)
BESIDE = rf"(?P<join>\s*[,;(]\s*|\s+of\s+){ABOUT}{TOKENS}(?:\s+each)?\)?"
STEPS_CELL = re.compile(rf"{ABOUT}{STEPS}(?:{BESIDE}|\))?", re.IGNORECASE)
LITGPT = "litgpt"
"""The stack whose iterations are micro-batches (litgpt ``finetune/lora.py``: ``iter_num``, and ``step_count``)."""
WRITE = "write 600 steps or 10M tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTime:
    """What a row's whole time says of its speed."""

    tokens_per_s: float | None = None
    note: str = ""
    """What the speed is of, where there is one."""
    why_not: str = ""
    """Why there is none though a time, or FLOPs, are stated."""


def whole_time(row: Row, run: Run, *, full: bool) -> WholeTime:
    """Tokens/s by ``total_time_h`` and ``total_tokens_or_steps``; of steps where samples fill their length (`full`)."""
    text, amount = row.get("total_time_h", ""), row.get("total_tokens_or_steps", "")
    if text.lower() in NOTHING:
        return WholeTime(why_not=_by_flops(row))
    seconds = _seconds(text)
    if seconds is None:
        return WholeTime(why_not=f"total_time_h {text!r} {_why_no_time(text)}")
    if amount.lower() in NOTHING:
        return WholeTime(why_not=f"total_time_h {text!r} needs total_tokens_or_steps beside it: {WRITE}")
    tokens = _tokens(amount, run, full=full)
    if isinstance(tokens, str):
        return WholeTime(why_not=f"total_tokens_or_steps {amount!r} {tokens}")
    note = (
        f"tokens/s are of the whole wall time: {tokens:,.0f} tokens in {seconds / HOUR_S:.4g} h, with evaluations, "
        "loading and saving in it."
    )
    return WholeTime(tokens_per_s=tokens / seconds, note=note)


def speed_of(row: Row, run: Run, *, full: bool, samples_fill: bool) -> tuple[float | None, WholeTime]:
    """(tokens/s that the row states, else those of its whole time, what the whole time says where they are of it).

    A speed below what the whole time needs, which holds more than training, is refused.
    """
    stated, whole = stated_tokens_per_s(row, run, full=full, samples_fill=samples_fill), whole_time(row, run, full=full)
    if stated is None:
        return whole.tokens_per_s, whole
    needed = whole.tokens_per_s
    if needed is not None and needed > stated * (1.0 + AGREE):
        raise SkipRowError(
            f"total_time_h {row['total_time_h']!r} and total_tokens_or_steps {row['total_tokens_or_steps']!r} take "
            f"{needed:,.0f} tokens/s, and {stated:,.0f} are stated: they contradict each other"
        )
    return stated, WholeTime()


def _why_no_time(text: str) -> str:
    """Why a cell is no time, behind its column and what stands there."""
    comma = re.fullmatch(rf"{ABOUT}([1-9]\d{{0,2}}),(\d{{3}})", text, re.IGNORECASE)
    if comma is not None:
        return f"may be {comma[1]}.{comma[2]} or {comma[1]}{comma[2]} hours: write it without a comma"
    return "is no time above 0: write 1.5 h, 2h 30min, 90 min or 1:30:00"


def _seconds(text: str) -> float | None:
    plain = re.sub(r"(?<![\d.,])(\d+),(\d{1,2})(?![\d.,])", r"\1.\2", text)
    found = TIME.fullmatch(re.sub(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:,\d{{3}})+(?=\s*{LONG_UNITS})", _ungrouped, plain))
    if found is None:
        return None
    if found["clock"]:
        hours, minutes, rest = (float(part) for part in found["clock"].split(":"))
        seconds = int(found["days"] or 0) * DAY_S + hours * HOUR_S + minutes * MINUTE_S + rest
    else:
        seconds = sum(float(found[unit] or 0.0) * length_s for unit, length_s in LENGTHS_S.items())
    return seconds or None


def _ungrouped(found: re.Match[str]) -> str:
    return found[0].replace(",", "")


def _tokens(text: str, run: Run, *, full: bool) -> float | str:
    """Tokens of the whole job, or what is wrong with the cell."""
    found = TOKENS_CELL.fullmatch(text)
    if found is not None:
        return _number(found, "tokens") or f"says nothing above 0: {WRITE}"
    found = STEPS_CELL.fullmatch(text)
    steps = 0.0 if found is None else _number(found, "steps") or _number(found, "max_steps")
    if found is None or not steps:
        return f"states neither tokens nor optimizer steps: {WRITE}"
    if run.stack == LITGPT and run.gradient_accumulation_steps > 1 and re.search(r"\biter", text, re.IGNORECASE):
        return "counts LitGPT's iterations, which are micro-batches: write optimizer steps"
    stated = _number(found, "tokens")
    if (found["join"] or "").strip() == "of":
        stated *= steps
    by_steps = steps * run.tokens_per_step
    if not (stated or full):
        return "counts steps of samples that may be shorter than seq_len: write 10M tokens"
    if stated and full and abs(by_steps / stated - 1.0) > AGREE:
        return f"contradicts the row, whose step is of {run.tokens_per_step:,} tokens"
    return stated or by_steps


def _number(found: re.Match[str], name: str) -> float:
    """A number of a match with its power of ten; 0 where it is not there."""
    digits = re.sub("[, '\u2019_]", "", found[name] or "0")
    return float(digits) * POWERS[(found.groupdict().get(f"{name}_power") or "").lower()]


def _by_flops(row: Row) -> str:
    """Why a speed that is stated by FLOPs alone is none."""
    columns = flops_alone(row)
    return f"it is stated as {columns} alone, whose count of FLOPs differs between sources" if columns else ""


def flops_alone(row: Row) -> str:
    """Columns that alone state the row's speed, and by FLOPs; empty where there is none, or a speed beside it."""
    speeds = [column for column in MEASURED if column != "peak_mem_gib"]
    if any(row.get(column, "").lower() not in NOTHING for column in (*speeds, "total_time_h")):
        return ""
    return " and ".join(column for column in FLOPS_COLUMNS if row.get(column, "").lower() not in NOTHING)
