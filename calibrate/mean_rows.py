"""Rows of a table whose samples are not packed and of which the mean length is stated.

Their speed is compared in samples: what a sample takes follows from the mean, while tokens/s may or may not count the
padding. A step is timed at the rows that micro-batches are padded to (`rows`), by lengths as a forecast with
``--mean-tokens`` takes them, and its interval reaches as far as lengths may be more or less alike than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tunecast.calibrate.run_table import SkipRowError, number
from tunecast.model.row_lengths import Rows
from tunecast.model.row_times import stretched
from tunecast.model.rows import WHOLE_RUN_ENDS, likely_runs, multiple_of, timed_run, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.stacks import ignores_padding
from tunecast.model.time import StepTime

COLUMN = "mean_tokens"
IN_SAMPLES = (
    "of samples that are not packed tokens/s may or may not count padding: write samples_per_s, or step_time_s of an "
    "optimizer step"
)


def mean_of(row: Mapping[str, str], run: Run) -> float | None:
    """Mean tokens of the row's samples; None where it does not say. Raises SkipRowError for a mean above the length."""
    mean = number(dict(row), COLUMN)
    if mean is not None and mean > run.max_length:
        raise SkipRowError(f"{COLUMN} {row[COLUMN]!r} is above seq_len {run.max_length}, where samples are cut")
    return mean


def padded_run(run: Run, mean: float) -> Run:
    """The run with padding in its micro-batches, as its stack fills and tells it; samples that all fill have none."""
    if ignores_padding(run.stack) or mean >= run.max_length:
        return run
    return replace(run, padding_mask=True, pad_to_multiple_of=int(multiple_of({"stack": run.stack})))


def rows_of(run: Run, mean: float) -> Rows:
    """Rows of the run's micro-batches of samples of this mean length."""
    rows = unpacked_rows(run, {COLUMN: mean, "packing": False})
    assert rows is not None, "samples that are said not to be packed have rows"
    return rows


def note_of(rows: Rows) -> str:
    """At which length the row is timed, and how sure that is, in a sentence."""
    return f"timed at {rows.length} tokens a row: {rows.how.replace(WHOLE_RUN_ENDS, 'the interval goes')}."


def measured_tokens_per_s(row: Mapping[str, str], run: Run, rows: Rows) -> float | str:
    """Tokens/s of the whole job, padding of `rows` included, by samples/s or a step's time; or why there is none."""
    samples_per_s, step_s = number(dict(row), "samples_per_s"), number(dict(row), "step_time_s")
    if step_s is not None:
        return timed_run(run, rows).tokens_per_step / step_s
    if samples_per_s is not None:
        return samples_per_s * rows.length
    told = any(number(dict(row), name) is not None for name in ("tokens_per_s", "tokens_per_s_per_gpu"))
    return IN_SAMPLES if told else "no speed is stated"


def timed(step_of: Callable[[Run], StepTime], run: Run, rows: Rows) -> StepTime:
    """The step of the mean row, as long as the mean of steps at all likely lengths is, and as unsure as the lengths."""

    def seconds(asked: Run) -> float:
        return step_of(asked).step_time_s.value

    mean, likely = step_of(timed_run(run, rows)), likely_runs(run, rows)
    each_s = {asked: seconds(asked) for asked in {*likely}}
    found = stretched(mean, sum(each_s[asked] for asked in likely) / len(likely) / mean.step_time_s.value)
    if rows.shortest is None or rows.longest is None or rows.shortest == rows.longest:
        return found
    short_s, long_s = (seconds(replace(run, max_length=length)) for length in (rows.shortest, rows.longest))
    return found.unsure_between(short_s, long_s)
