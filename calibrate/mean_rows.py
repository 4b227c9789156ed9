"""Rows of a table whose samples are not packed and of which the mean length is stated.

Their speed is compared in samples: what a sample takes follows from the mean, while tokens/s may or may not count the
padding. A step is timed at the rows that micro-batches are padded to (`rows`), by lengths as a forecast with
``--mean-tokens`` takes them, and its interval reaches as far as lengths may be more or less alike than that. Samples
that lie end to end have no padding (`flat_cells`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from tunecast.calibrate.cell_written import part_of
from tunecast.calibrate.flat_cells import flat_by_default, flat_run, options_of, unevenness_ends
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.row_cells import samples_that_fill
from tunecast.calibrate.row_faults import in_columns
from tunecast.calibrate.run_table import AGREE, NO_SPEED, SPEED_COLUMNS, SkipRowError, number
from tunecast.calibrate.vocabulary import FLAT, FLAT_GROUPED, GROUPED, PADDED
from tunecast.catalogs.errors import TunecastError
from tunecast.model.row_lengths import Rows
from tunecast.model.row_times import stretched
from tunecast.model.rows import WHOLE_RUN_ENDS, likely_runs, multiple_of, timed_run, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.stacks import ignores_padding
from tunecast.model.time import StepTime

Read = Callable[[dict[str, str]], tuple[PublishedRun | None, str]]
"""What a row says, or why it is not read."""
COLUMN = "mean_tokens"
MEAN_SAID = re.compile(
    r"[\s,;(]*\b(?:mean|average|avg\.?) (?:(?:sample )?len(?:gth)? )?(?:(?:is|of|about|around|approx\.?) )*[~\u2248]? ?"
    r"(?P<n>\d[\d,]*+(?:\.\d+)?+)(?: tokens)?+(?! ?(?:a|per|tokens)\b)\)?(?: \((?:median|longest|max)[^()]*\))?",
    re.IGNORECASE,
)
"""The mean length of samples in a cell about packing: ``no, mean length 668``."""
FILLED = "samples fill seq_len"
IN_TOKENS = ("tokens_per_s", "tokens_per_s_per_gpu")
IN_SAMPLES = (
    "of samples that are not packed tokens/s may or may not count padding: write samples_per_s, or step_time_s of an "
    "optimizer step"
)


def with_mean(row: dict[str, str]) -> dict[str, str]:
    """The row with the mean length of its samples in the column of its own, where the cell about packing has it."""
    text = row.get("packed", "")
    found = None if row.get(COLUMN) else MEAN_SAID.search(text)
    if found is None:
        return row
    rest = (text[: found.start()] + text[found.end() :]).strip(" ,;")
    return {**row, "packed": rest, COLUMN: part_of(text, found["n"])} if rest else row


def mean_of(row: Mapping[str, str], run: Run) -> float | None:
    """Mean tokens of the row's samples; None where it does not say. Raises SkipRowError for a mean below one token or
    above the length."""
    mean = number(dict(row), COLUMN)
    if mean is not None and mean < 1.0:
        raise SkipRowError(f"{COLUMN} {row[COLUMN]!r} is below one token")
    if mean is not None and mean > run.max_length:
        raise SkipRowError(f"{COLUMN} {row[COLUMN]!r} is above seq_len {run.max_length}, where samples are cut")
    return mean


def padded_run(run: Run, mean: float) -> Run:
    """The run with padding in its micro-batches, as its stack fills and tells it; samples that all fill have none.

    Raises SkipRowError for padded samples that GPUs share, which an estimate refuses too.
    """
    if ignores_padding(run.stack) or mean >= run.max_length:
        return run
    if run.cp > 1:
        raise SkipRowError("parallelism: padded samples whose tokens context parallelism splits are not built yet")
    return replace(run, padding_mask=True, pad_to_multiple_of=int(multiple_of({"stack": run.stack})))


def rows_of(run: Run, mean: float, *, grouped: bool = False) -> Rows:
    """Rows of the run's micro-batches of samples of this mean length, which may be in the order of their lengths."""
    flat = options_of(mean, run) if run.samples_unevenness is not None else {}
    rows = unpacked_rows(run, {COLUMN: mean, "packing": False, "group_by_length": grouped, **flat})
    assert rows is not None, "samples that are said not to be packed have rows"
    return rows


def note_of(rows: Rows) -> str:
    """At which length the row is timed, and how sure that is, in a sentence."""
    waited = (
        f"; a copy's own rows have {rows.own_length}, which tokens/s count" if rows.own_length < rows.length else ""
    )
    of, memory = "row", ""
    if rows.flat:
        of, memory = "sample", f"; memory at {rows.peak}, those of the largest micro-batch of {rows.micro_batches:,}"
    how = rows.how.replace(WHOLE_RUN_ENDS, "the interval goes")
    return f"timed at {rows.length} tokens a {of}{waited}: {how}{memory}."


def timed(step_of: Callable[[Run], StepTime], run: Run, rows: Rows) -> StepTime:
    """The step of the mean row, as long as the mean of steps at all likely lengths is, and as unsure as the lengths."""

    def seconds(asked: Run) -> float:
        return step_of(asked).step_time_s.value

    mean, likely = step_of(timed_run(run, rows)), likely_runs(run, rows)
    each_s = {asked: seconds(asked) for asked in {*likely}}
    found = stretched(mean, sum(each_s[asked] for asked in likely) / len(likely) / mean.step_time_s.value)
    if rows.flat:
        ends = unevenness_ends(timed_run(run, rows), run, rows.mean_tokens)
        found = found.unsure_between(*(seconds(asked) for asked in ends))
    if rows.shortest is None or rows.longest is None or rows.shortest == rows.longest:
        return found
    short_s, long_s = (seconds(replace(run, max_length=length)) for length in (rows.shortest, rows.longest))
    return found.spread_between(short_s, long_s)


def in_samples(
    row: Mapping[str, str], run: PublishedRun | None, reason: str, read: Read
) -> tuple[PublishedRun | None, str]:
    """A row that states the mean length of its samples: its speed in samples where they are not packed, and why it has
    none; else as it was read (`run`, `reason`), where the mean agrees with it.

    The speed is read as that of samples of equal lengths, so that it is checked like any other.
    """
    unpacked = "packed" not in row or (run is None and is_padded(reason))
    laid = FLAT in reason or FLAT_GROUPED in reason
    try:
        if not (unpacked or laid):
            return (None, reason) if run is None else (_beside_packed(row, run), reason)
        left_out = ("packed", *SPEED_COLUMNS, "total_time_h")
        found, other = read({name: text for name, text in row.items() if name not in left_out})
        mean = None if found is None else mean_of(row, found.run)
        if found is None or mean is None:
            return (run, reason) if found is not None else (None, other)
        return _of_samples(row, found, mean, read, flat=laid or flat_by_default(row, found, mean), reason=reason)
    except SkipRowError as skip:
        return None, str(skip)
    except TunecastError as error:
        return None, in_columns(str(error), row)


def _of_samples(
    row: Mapping[str, str], found: PublishedRun, mean: float, read: Read, *, flat: bool, reason: str
) -> tuple[PublishedRun | None, str]:
    """The run that a row told without its speed (`found`) with it, in rows that its samples make."""
    grouped = GROUPED in reason or FLAT_GROUPED in reason
    asked = flat_run(found, mean) if flat else padded_run(found.run, mean)
    rows = rows_of(asked, mean, grouped=grouped)
    length = _read_length(asked, rows)
    of_rows, other = read(_as_rows(row, asked, length))
    if of_rows is None:
        return None, other
    told = any(row.get(name) for name in IN_TOKENS)
    if of_rows.tokens_per_s is None:
        in_tokens = not flat and (told or _total_in_tokens(row))
        return replace(found, run=asked), IN_SAMPLES if in_tokens else of_rows.why_no_speed or NO_SPEED
    samples_per_s = of_rows.tokens_per_s / length
    if why := "" if flat else _beyond_samples(row, asked, mean, samples_per_s):
        return None, why
    return (
        replace(
            found,
            run=asked,
            mean_tokens=mean,
            grouped=grouped,
            tokens_per_s=of_rows.tokens_per_s if flat and told else samples_per_s * rows.own_length,
            whole_time=of_rows.whole_time,
            reading_notes=(*found.reading_notes, note_of(rows)),
            stated=found.stated | {COLUMN},
        ),
        "",
    )


def _read_length(run: Run, rows: Rows) -> int:
    """Tokens of the shortest rows that samples of the stated mean can have: no speed is above what a card can do for
    padding that is only assumed. A multiple of the GPUs that share a row's tokens."""
    ends = () if rows.flat or rows.shortest is None else (rows.shortest,)
    least: int = min((rows.own_length, *ends))
    return math.ceil(least / (run.tp * run.cp)) * run.tp * run.cp


def _as_rows(row: Mapping[str, str], run: Run, length: int) -> dict[str, str]:
    """The cells of the same speed of samples of so many tokens, without what may or may not count padding."""
    in_tokens = (*IN_TOKENS, *(("total_time_h",) if _total_in_tokens(row) else ()))
    left_out = ("global_batch", *(() if run.samples_unevenness is not None else in_tokens))
    cells = {name: text for name, text in row.items() if name not in left_out}
    steps = str(run.gradient_accumulation_steps)
    return {**cells, "packed": FILLED, "seq_len": str(length), "grad_accum": steps}


def _total_in_tokens(row: Mapping[str, str]) -> bool:
    """Whether the whole run is told in anything but steps."""
    return bool(row.get("total_time_h")) and "step" not in row.get("total_tokens_or_steps", "").lower()


def _beyond_samples(row: Mapping[str, str], run: Run, mean: float, samples_per_s: float) -> str:
    """Why tokens/s beside another speed cannot be of the same run, whether or not they count padding; else nothing."""
    for name, times in zip(IN_TOKENS, (1, run.num_gpus), strict=True):
        stated = number(dict(row), name)
        if stated is None:
            continue
        least, most = samples_per_s * mean, samples_per_s * run.max_length
        if not least / (1.0 + AGREE) <= stated * times <= most * (1.0 + AGREE):
            return (
                f"{name} {row[name]!r} contradicts the row's other speed, {samples_per_s:.4g} samples/s of {mean:g} to "
                f"{run.max_length} tokens"
            )
    return ""


def _beside_packed(row: Mapping[str, str], run: PublishedRun) -> PublishedRun:
    """The run of a row whose samples fill their length or are packed, with a note that their mean is not read where
    attention does not keep them apart.

    Raises SkipRowError for a mean that is no number, and for one that is not the length that all are said to have.
    """
    mean = number(dict(row), COLUMN)
    if mean is None:
        return run
    if samples_that_fill(row) and round(mean) != run.run.max_length:
        raise SkipRowError(
            f"{COLUMN} {row[COLUMN]!r} contradicts packed {row.get('packed', '')!r}, by which every sample has the "
            f"{run.run.max_length} tokens of seq_len: write packed no where samples are shorter"
        )
    if run.run.attention_length is not None:
        return replace(run, stated=run.stated | {COLUMN})
    told = f"{COLUMN} is not read, since samples fill rows or are packed."
    return replace(run, reading_notes=(*run.reading_notes, told))


def padded_memory(row: Mapping[str, str], read: Read) -> tuple[PublishedRun | None, str]:
    """A row of padded samples of which nothing says how long they are: its memory alone, with the mask that padding
    brings."""
    found, other = read({name: text for name, text in row.items() if name != "packed"})
    if found is None:
        return None, other
    try:
        return replace(found, run=padded_run(found.run, 0.0), tokens_per_s=None, whole_time=""), ""
    except SkipRowError as skip:
        return None, str(skip)


def is_padded(reason: str) -> bool:
    """Whether a row was not read only because nothing says how many tokens its padded samples have: memory is that of
    the longest."""
    return reason.startswith("packed ") and any(rows in reason for rows in (PADDED, GROUPED))
