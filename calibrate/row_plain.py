"""Cells that say more than their column: what counts all GPUs where the column counts one, products beside their parts,
GPU-hours, lengths that samples are packed to. `plain_cells` leaves in each cell what its column means.

A number of GPUs in such a cell must be that of the row; a product must be that of its parts.
"""

from __future__ import annotations

import math
import re
from typing import Any

from tunecast.calibrate.cell_cards import cards_of
from tunecast.calibrate.cell_grammar import facts_of
from tunecast.calibrate.cell_numbers import EACH, MEASURED, SAMPLES, SECOND, TOKENS_PER_S, sequences_of
from tunecast.calibrate.cell_written import read_as
from tunecast.calibrate.run_end import RAN_OUT
from tunecast.calibrate.run_table import Row, SkipRowError
from tunecast.calibrate.vocabulary import vocabulary

NUMBER = r"\d[\d,.]*"
ALL_WITH_ONE = re.compile(
    rf"(?P<all>\d+)(?: ?(?:{SAMPLES}|total))?\s*[(=,]\s*(?P<one>\d+)(?: ?{SAMPLES})?{EACH}\)?", re.IGNORECASE
)
"""A batch of all GPUs with that of one behind it: ``16 (2 per GPU)``."""
PRODUCT = re.compile(
    r"(?P<all>\d[\d,]*)(?: ?(?:samples|sequences))?\s*(?:=\s*|\(\s*=?\s*)(?P<parts>\d+(?:\s*[x*\u00d7]\s*\d+)+)\s*\)?"
    r"|(?P<parts2>\d+(?:\s*[x*\u00d7]\s*\d+)+)\s*=\s*(?P<all2>\d[\d,]*)",
    re.IGNORECASE,
)
"""A product and its parts: ``64 (2x4x8)``."""
OF_GPUS = re.compile(
    rf"(?P<speed>.*\d ?k?(?: ?(?:{TOKENS_PER_S}))?)\s*(?:\(\s*|on |over |across )(?P<gpus>\d+) ?x? ?"
    r"(?:gpus|cards|devices)\)?",
    re.IGNORECASE,
)
"""A speed with the number of GPUs that reached it: ``40k (8 GPUs)``."""
SAMPLES_OF_ONE = re.compile(rf"(?P<n>\d+(?:\.\d+)?) ?(?:{SAMPLES}? ?(?:/|per) ?{SECOND})?{EACH}", re.IGNORECASE)
GPU_HOURS = re.compile(
    rf"(?P<about>[~\u2248]\s*)?(?P<n>{NUMBER}) ?(?P<power>[kM]?) ?[\w ]*?gpu[- ]?(?:hours?|hrs?|h)", re.IGNORECASE
)
CARD_HOURS = re.compile(
    rf"(?P<about>[~\u2248]\s*)?(?P<n>{NUMBER}) ?(?P<power>[kM]?) ?-?(?P<card>[a-z]+\d[\w]*)[- ]?(?:hours?|hrs?)",
    re.IGNORECASE,
)
PER_CARD = re.compile(r"(?P<speed>.*\d.*?) ?(?:/|\bper) ?(?P<card>[a-z]+\d\w*)", re.IGNORECASE)
POWERS = {"": 1.0, "k": 1e3, "m": 1e6}
PACKED = re.compile(r"\bpacked\b", re.IGNORECASE)


MORE_THAN_A_NUMBER = {"micro_batch": ALL_WITH_ONE, "global_batch": PRODUCT, "tokens_per_s": OF_GPUS}


def said_otherwise(column: str, text: str) -> bool:
    """Whether a cell is read by more than its number: with the row's GPUs, as tokens of a batch, as memory that ran
    out."""
    form = MORE_THAN_A_NUMBER.get(column)
    whole = form is not None and form.fullmatch(text.strip()) is not None
    in_tokens = column == "global_batch" and sequences_of(text, 1) is not None
    return whole or in_tokens or (column in MEASURED and RAN_OUT.fullmatch(text.strip()) is not None)


def plain_cells(row: Row) -> Row:
    """The row, each cell in the unit of its column; raises SkipRowError where a cell contradicts the row or itself."""
    return _packed(_hours(_samples(_per_card(_speed(_global_batch(_micro_batch(row)))))))


def _micro_batch(row: Row) -> Row:
    found = ALL_WITH_ONE.fullmatch(row.get("micro_batch", "").strip())
    if found is None:
        return row
    gpus = cards_of(row)[0]
    if int(found["all"]) != int(found["one"]) * gpus:
        raise SkipRowError(
            f"micro_batch {row['micro_batch']!r} is not {found['one']} on each of {gpus} GPUs: write one number"
        )
    return {**row, "micro_batch": found["one"]}


def _global_batch(row: Row) -> Row:
    found = PRODUCT.fullmatch(row.get("global_batch", "").strip())
    if found is None:
        return row
    stated = (found["all"] or found["all2"]).replace(",", "")
    product = math.prod(int(part) for part in re.findall(r"\d+", found["parts"] or found["parts2"]))
    if int(stated) != product:
        raise SkipRowError(f"global_batch {row['global_batch']!r} contradicts itself: the product is {product}")
    return {**row, "global_batch": stated}


def _speed(row: Row) -> Row:
    found = OF_GPUS.fullmatch(row.get("tokens_per_s", "").strip())
    if found is None:
        return row
    gpus = cards_of(row)[0]
    if int(found["gpus"]) != gpus:
        raise SkipRowError(f"tokens_per_s {row['tokens_per_s']!r} is of {found['gpus']} GPUs, but gpus is {gpus}")
    return {**row, "tokens_per_s": read_as(found["speed"].strip(), row["tokens_per_s"])}


def _samples(row: Row) -> Row:
    found = SAMPLES_OF_ONE.fullmatch(row.get("samples_per_s", "").strip())
    if found is None:
        return row
    return {**row, "samples_per_s": read_as(f"{float(found['n']) * cards_of(row)[0]:.9g}", row["samples_per_s"])}


def _hours(row: Row) -> Row:
    """GPU-hours as hours of the whole job; hours of the row's card (``1.83 A100 hours``) are GPU-hours."""
    text = row.get("total_time_h", "").strip()
    found = GPU_HOURS.fullmatch(text) or _card_hours(row, text)
    if found is None:
        return row
    digits = re.sub(r",(?=\d{3}(?!\d))", "", found["n"])
    try:
        hours = float(digits) * POWERS[found["power"].lower()] / cards_of(row)[0]
    except ValueError as error:
        raise SkipRowError(
            f"total_time_h {row['total_time_h']!r} is no number of GPU-hours: write 8 GPU-hours"
        ) from error
    return {**row, "total_time_h": read_as(f"{found['about'] or ''}{hours:.9g}", row["total_time_h"])}


def _card_hours(row: Row, text: str) -> re.Match[str] | None:
    """Hours of a card that the row names: of another they are refused with the cell."""
    found = CARD_HOURS.fullmatch(text)
    return found if found is not None and _names(row, found["card"]) else None


def _names(row: Row, card: str) -> bool:
    """Whether a word is in what the row calls its card."""
    named = f"{row.get('gpu', '')} {row.get('gpu_canonical_id', '')}"
    return re.search(rf"(?<![a-z0-9])(?:\d+ ?x ?)?{re.escape(card)}(?![a-z0-9])", named, re.IGNORECASE) is not None


def _per_card(row: Row) -> Row:
    """A speed of one GPU that says so by the row's card: ``24k tokens/s/A100``."""
    text = row.get("tokens_per_s_per_gpu", "").strip()
    found = PER_CARD.fullmatch(text)
    if found is None or not _names(row, found["card"]):
        return row
    return {**row, "tokens_per_s_per_gpu": read_as(found["speed"], row["tokens_per_s_per_gpu"])}


def _packed(row: Row) -> Row:
    """A length that is said to be one of packed samples says it of the column ``packed``, where that says nothing."""
    length, text = row.get("seq_len", ""), row.get("packed")
    if text is None or not PACKED.search(length):
        return row
    facts = facts_of("packed", text) if text else None
    if facts is None:
        return {**row, "packed": "packed"}
    if facts.get("packing") is False or facts.get("padded"):
        raise SkipRowError(f"seq_len {length!r} and packed {text!r} contradict each other")
    return row


def variant_options(row: Row) -> dict[str, Any]:
    """What the variant of a stack, named in the notes of the published table, says about the run; any other note says
    nothing."""
    match = re.search(r"Variant: (.*?)\. ", row.get("notes", ""))
    known: dict[str, dict[str, Any]] = vocabulary()["variant"]
    return dict(known.get(match[1] if match else "", {}))
