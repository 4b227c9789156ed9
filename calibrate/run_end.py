"""How a run of a table ended, by its cells: with figures, without memory, or otherwise."""

from __future__ import annotations

import re

from tunecast.calibrate.cell_numbers import MEASURED
from tunecast.calibrate.run_table import NOTHING, SPEED_COLUMNS, Row, SkipRowError, number

OUT_OF_MEMORY = "OUT OF MEMORY"
"""How the notes of a run begin that ran out of memory; a cell of what was measured may say so instead."""
RAN_OUT = re.compile(r"(cuda )?(oom|out[ -]of[ -]memory|ooms|oom'?ed)( error)?[.!]?", re.IGNORECASE)
BEGINS_RAN_OUT = re.compile(r"(cuda )?(oom|out[ -]of[ -]memory)\b", re.IGNORECASE)
"""How notes of a row begin that has nothing measured because memory ran out."""
SAYS_IT_RAN = (*MEASURED, "total_time_h")
"""Columns of which one has to say something for a run to count as one that ran."""
ENDED = re.compile(
    r"(ok(ay)?|ran|runs|success(ful|fully)?|succeeded|complete(d)?|done|finished|pass(ed)?|yes|true|fits?|\u2713|\u2705)[.!]?",
    re.IGNORECASE,
)
FAILED = re.compile(
    r"(fail(ed|ure|s)?|crash(ed)?|error(ed)?|kill(ed)?|abort(ed)?|cancel(l)?ed|interrupted|stopped|diverged|nan|timeout|"
    r"timed out|hung|preempted|running|no|false|\u2717|\u274c)[.!]?",
    re.IGNORECASE,
)
"""What the column ``status`` says of runs that ended, and of others."""


def out_of_memory(row: Row) -> Row:
    """The row with what a cell of the measured, or its status, says of memory that ran out in its notes, as
    `OUT_OF_MEMORY` begins."""
    cells = [column for column in (*SAYS_IT_RAN, "status") if RAN_OUT.fullmatch(row.get(column, "").strip())]
    notes = row.get("notes", "")
    if not cells and not (BEGINS_RAN_OUT.match(notes) and nothing_measured(row)):
        return row
    ran = next((column for column in SPEED_COLUMNS if column not in cells and number(row, column) is not None), None)
    if ran is not None:
        raise SkipRowError(f"{ran} {row[ran]!r} and {cells[0]} {row[cells[0]]!r} contradict each other")
    told = notes if notes.startswith(OUT_OF_MEMORY) else f"{OUT_OF_MEMORY}. {notes}"
    return {**row, **dict.fromkeys((*SAYS_IT_RAN, "status"), ""), "notes": told}


def nothing_measured(row: Row) -> bool:
    """Whether no cell has anything that was measured, so that the row does not say either that it ran."""
    return not any(row.get(column, "").strip() for column in SAYS_IT_RAN)


def check_status(row: Row) -> None:
    """Raise SkipRowError where the status says that the run did not end well, or says what is not known."""
    text = row.get("status", "").strip()
    if text.lower() in NOTHING or ENDED.fullmatch(text):
        return
    if FAILED.fullmatch(text):
        raise SkipRowError(f"status {text!r}: runs that ended are compared, and those out of memory (OOM)")
    raise SkipRowError(f"status {text!r} is not a word known here: write ok, OOM or failed")
