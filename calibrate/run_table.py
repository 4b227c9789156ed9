"""A table of measured runs as its cells stand: numbers that are numbers, figures that agree, speeds that can be.

Raises `SkipRowError` for a row whose cell cannot be used, naming the column and what stands there.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tunecast.calibrate.cell_dates import DateError, iso_dates
from tunecast.calibrate.cell_numbers import (
    MEASURED,
    NumberError,
    may_be_thousands,
    number_of,
    sequences_of,
    why_none,
)
from tunecast.calibrate.cell_written import comma_cell, two_readings
from tunecast.calibrate.run_columns import READ, by_column, check_columns
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.catalogs.gpus import Gpu
from tunecast.model.architecture import Architecture
from tunecast.model.flops import model_flops_per_step
from tunecast.model.run import Run
from tunecast.model.stacks import BUILT, PRECISIONS, QUANT_METHODS
from tunecast.model.units import GIGA

NEEDED_COLUMNS = ("model", "method", "seq_len", "micro_batch")
"""A column that is absent leaves its run field at the stack's default; an empty cell of one that is there does not."""
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
"""Of what spreadsheets call CSV: where the decimal sign is a comma, they write semicolons. Bars are not read."""
OF_EXCEL = re.compile(r'"?sep=(?P<sign>[,;\t|])"?\s*', re.IGNORECASE)
"""The first line of what Excel reads in every country: no heading, but what separates the columns of those below."""
OWN_OPTIONS = {
    "quant": ("quant_method", QUANT_METHODS),
    "compute_dtype": ("precision", PRECISIONS),
    "attention_impl": ("attn_implementation", BUILT["attention"]),
    "optimizer": ("optim", BUILT["optimizer"]),
    "parallelism": ("sharding", BUILT["sharding"]),
}
"""By column: the option that it stands for, and the values which that option takes on the command line."""
MODULE_NAMES = r"all-linear|[A-Za-z_][\w.]*(,[A-Za-z_][\w.]*)*"
NOTHING = ("", "-", "--", "\u2013", "\u2014", "n/a", "na", "none", "not stated", "unknown", "not reported", "?", "tbd")
"""What a cell without a number says."""
DOUBTS = ("none", "unknown", "?")
"""Of these, what a confidence would be a low one by."""
DEFAULT = r"(\w+ )?default"
"""What it says that leaves the number to the software."""
SIZE_SHARE = 0.3
"""Share by which ``params_b`` may be off the parameters: names round, and some leave out the tables of tokens."""
LEAST_MFU = 1e-4
"""MFU below which no figure is one of training."""
UNIT_MFU = 1e-3
"""MFU below which a figure without its unit may be one in thousandths or thousands (milliseconds, thousands of tokens),
where the cards could do that too. The slowest run of the published table, offloaded ones included, has 0.02."""
IN_THOUSANDS = {
    "tokens_per_s": ("{} thousand tokens", "k", "tokens/s"),
    "tokens_per_s_per_gpu": ("{} thousand tokens", "k", "tokens/s"),
    "samples_per_s": ("{} thousand samples", "", "samples/s"),
    "step_time_s": ("{} milliseconds", " ms", "s"),
}
"""By column: what its number may count, and both as a cell writes them: the 1,000-fold speed, and the stated one."""
AGREE = 0.1
"""Share by which two figures for the speed of one row may differ: sources round, and average over other steps."""

SPEED_COLUMNS = tuple(column for column in MEASURED if column != "peak_mem_gib")
NO_SPEED = (
    "no speed is stated: fill tokens_per_s, tokens_per_s_per_gpu, step_time_s or samples_per_s, or total_time_h and "
    "total_tokens_or_steps"
)
Row = dict[str, str]


class SkipRowError(Exception):
    """Why a row is not used; never leaves the reader."""


def read_table(path: Path) -> list[Row]:
    """Rows of the CSV, each with an id; raises InputError when it cannot be read, lacks a needed column or has one
    id twice."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            begins, above, first = _first_line(handle)
            told = OF_EXCEL.fullmatch(first)
            if told is not None:
                below, above_heading, first = _first_line(handle)
                begins, above = below, above + 1 + above_heading
            sign = told["sign"] if told else _separator(first)
            handle.seek(begins)
            reader = csv.DictReader(handle, strict=True, delimiter=sign)
            columns = reader.fieldnames = by_column(_lower_case(reader.fieldnames))
            read = list(reader)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8; save it as CSV UTF-8 (comma delimited).") from error
    except csv.Error as error:
        line = above + reader.reader.line_num
        raise InputError(
            f"Cannot read the table of runs {path} at its line {line}: {error}; close every quote, and write a quote "
            "inside quotes twice."
        ) from error
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot read the table of runs {path}: {reason}; give a CSV file, or the JSON of one run."
        ) from error
    needs = f"a table of runs needs {', '.join(NEEDED_COLUMNS)}"
    if not columns:
        raise InputError(f"{path} is empty; {needs}.")
    _one_sign_separates(path, columns[0] if len(columns) == 1 else "")
    if not {*columns} & {*READ} and any(re.fullmatch(r"\W*\d[\d.,]*k?", name) for name in columns):
        raise InputError(
            f"The first line of {path} is a run and no heading; write the columns' names above it: {needs}."
        )
    missing = [name for name in NEEDED_COLUMNS if name not in columns]
    if missing:
        check_columns(path, columns)
        raise InputError(f"{path} lacks the column {missing[0]!r}; {needs}.")
    check_columns(path, columns)
    _cells_have_headings(path, columns, read, SEPARATORS[sign])
    rows = [{name: (text or "").strip() for name, text in row.items() if name} for row in read if any(row.values())]
    if sign != ",":
        rows = [{name: comma_cell(name, text) for name, text in row.items()} for row in rows]
    if not rows:
        raise InputError(f"{path} has a heading but no rows; give a row for each run.")
    named = [{**row, "id": row.get("id") or f"row-{number}"} for number, row in enumerate(rows, start=1)]
    _ids_are_unique(path, [row["id"] for row in named])
    return named


def _first_line(handle: TextIO) -> tuple[int, int, str]:
    """(place of the next line that is not empty, how many empty ones are above it, that line): spreadsheets leave rows
    free above their heading."""
    above, begins, line = 0, handle.tell(), handle.readline()
    while line and not line.strip(" ,;\t\r\n"):
        above, begins, line = above + 1, handle.tell(), handle.readline()
    return begins, above, line


def _lower_case(columns: Sequence[str] | None) -> list[str]:
    """A heading in lower case; a name that another column would then share stays as it is."""
    lower = [name.strip().lower() for name in columns or ()]
    return [low if lower.count(low) == 1 else name for name, low in zip(columns or (), lower, strict=True)]


def _separator(heading: str) -> str:
    """What separates the columns of a table: a comma, or, in a heading without one, semicolons or tabs."""
    bare = re.sub(r'"[^"]*"', "", heading)
    signs = [sign for sign in SEPARATORS if sign in bare]
    return signs[0] if signs in ([";"], ["\t"]) else ","


def _one_sign_separates(path: Path, heading: str) -> None:
    """A heading without commas that bars, or two signs, separate is refused by them."""
    found = [f"{word}s" for sign, word in SEPARATORS.items() if sign in heading]
    if found and "commas" not in found:
        raise InputError(f"{path} separates its columns by {' and '.join(found)}; save it with commas between them.")


def _cells_have_headings(path: Path, columns: Sequence[str], rows: Sequence[dict[Any, Any]], sign: str) -> None:
    """A row with more cells than headings has a separator too many, and every cell after it means something else."""
    for line, row in enumerate(rows, start=1):
        more = row.get(None)
        if more:
            raise InputError(
                f"Row {line} of {path} has {len(columns) + len(more)} cells under {len(columns)} headings; put quotes "
                f"around a cell that contains a {sign}."
            )


def _ids_are_unique(path: Path, ids: list[str]) -> None:
    twice = next((name for name, times in Counter(ids).items() if times > 1), None)
    if twice is not None:
        raise InputError(f"{path} has the id {twice!r} in more than one row; give each row an id of its own.")


def own_value(column: str, text: str) -> dict[str, Any] | None:
    """What a cell says that holds a value of the command line's own options; None where it does not."""
    if column == "lora_targets" and re.fullmatch(MODULE_NAMES, text):
        return {"lora_target_modules": text}
    option, values = OWN_OPTIONS.get(column, ("", ()))
    if text not in values:
        return None
    return {option: text} | ({"dtype": text.removesuffix("-autocast")} if option == "precision" else {})


def number(row: Row, column: str) -> float | None:
    """The positive number in a cell (`cell_numbers`); None where it is empty or a word for nothing."""
    text = row.get(column, "")
    if text.strip().lower() in NOTHING or (column == "rank" and re.fullmatch(DEFAULT, text, re.IGNORECASE)):
        return None
    either = two_readings(column, text, _longest(row) if column == "mean_tokens" else None)
    if either:
        raise SkipRowError(f"{column} {text!r} {either}")
    try:
        value = number_of(column, text.strip())
    except NumberError as error:
        raise SkipRowError(f"{column} {text!r} {error}") from error
    if not (math.isfinite(value) and value > 0):
        raise SkipRowError(f"{column} {text!r} {why_none(column, text)}")
    return value


def _longest(row: Row) -> float | None:
    """The length at which samples are cut, above which none has a mean."""
    with contextlib.suppress(SkipRowError):
        return number(row, "seq_len")
    return None


def check_size(row: Row, architecture: Architecture) -> None:
    """The number of parameters that the row states is that of its model: of all, or of those a token meets."""
    text = re.sub(r",(?=\d{3})", "", row.get("params_b", ""))
    if text.strip().lower() not in NOTHING and not re.match(r"[~\u2248a-z\s.]*\d", text, re.IGNORECASE):
        raise SkipRowError(f"params_b {row['params_b']!r} is not a number above 0")
    stated = re.findall(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([BM]?)", text, re.IGNORECASE)
    idle = 0.0
    for group in architecture.groups:
        experts = group.layer.mlp.experts
        if experts is not None:
            every = experts.router_params + experts.up_params + experts.down_params
            idle += group.count * (every - experts.active_weight_params)
    total = architecture.total_params / GIGA
    sizes = (total, total - idle / GIGA)
    if stated and all(abs(_billions(*one) / size - 1.0) > SIZE_SHARE for one in stated for size in sizes):
        raise SkipRowError(
            f"params_b {row['params_b']!r} contradicts model {row['model']!r}, which has {total:.2f} billion parameters"
        )


def _billions(digits: str, unit: str) -> float:
    """A count of parameters: in billions unless it says millions or is as large as single ones."""
    value = float(digits)
    return value / 1e3 if unit.upper() == "M" else value / GIGA if value >= 1e6 else value


def whole(row: Row, column: str) -> int:
    """The whole number in a cell, at least 1."""
    value = number(row, column)
    if value is None:
        raise SkipRowError(f"{column} is not stated")
    if value != int(value):
        raise SkipRowError(f"{column} {row[column]!r} is not a whole number")
    return int(value)


def micro_batches(row: Row, max_length: int, copies: int, notes: list[str]) -> int:
    """Micro-batches of a step: as stated, else what the global batch takes of all copies of the model, else one."""
    if number(row, "grad_accum") is not None:
        return whole(row, "grad_accum")
    stated = _global_batch(row, max_length)
    times = 1.0 if stated is None else stated / (whole(row, "micro_batch") * copies)
    if times <= 1 or not times.is_integer():
        return 1
    notes.append(f"grad_accum is not stated: {int(times)} x micro_batch x data-parallel GPUs are the global_batch")
    return int(times)


def _global_batch(row: Row, max_length: int) -> float | None:
    """Sequences of the whole job's batch, which a cell may count in tokens."""
    text = row.get("global_batch", "")
    stated = sequences_of(text, max_length)
    if stated is None:
        return number(row, "global_batch")
    if math.isnan(stated):
        raise SkipRowError(f"global_batch {text!r} is no whole number of sequences of {max_length} tokens")
    return stated


def check_batch(row: Row, run: Run) -> None:
    """The batch of the whole job, where the row states it, is what its parts multiply to."""
    stated = _global_batch(row, run.max_length)
    samples = run.tokens_per_step / run.max_length
    if stated is not None and stated != samples:
        if number(row, "grad_accum") is None and stated > samples:  # else it was worked out (`micro_batches`)
            raise SkipRowError(
                f"global_batch {row['global_batch']!r} is no multiple of micro_batch x data-parallel GPUs = {samples:g}"
            )
        raise SkipRowError(
            f"global_batch {row['global_batch']!r} is not micro_batch x grad_accum x data-parallel GPUs = {samples:g}"
        )


def stated_tokens_per_s(row: Row, run: Run, *, full: bool, samples_fill: bool = False) -> float | None:
    """Tokens/s of the whole job: as stated, or from those of one GPU, or from the step time where samples fill their
    length (`full`), or at last from samples/s where the row says that each fills it (`samples_fill`; of packed ones it
    may be documents that are counted); None where none is stated. Figures that contradict each other are not used."""
    per_gpu, step_s = number(row, "tokens_per_s_per_gpu"), number(row, "step_time_s")
    found = {
        "tokens_per_s": number(row, "tokens_per_s"),
        "tokens_per_s_per_gpu": None if per_gpu is None else per_gpu * run.num_gpus,
        "step_time_s": run.tokens_per_step / step_s if step_s is not None and full else None,
    }
    if samples_fill:
        samples = number(row, "samples_per_s")
        found["samples_per_s"] = None if samples is None else samples * run.max_length
    speeds = {column: value for column, value in found.items() if value is not None}
    for column, speed in speeds.items():
        first, value = next(iter(speeds.items()))
        if abs(speed / value - 1.0) > AGREE:
            raise SkipRowError(f"{first} {row[first]!r} and {column} {row[column]!r} contradict each other")
    return next(iter(speeds.values()), None)


@contextlib.contextmanager
def naming(column: str) -> Iterator[None]:
    """Every refusal names the column whose cell it is about."""
    try:
        yield
    except TunecastError as error:
        raise SkipRowError(str(error) if str(error).startswith(column) else f"{column}: {error}") from error


def dated(row: Row) -> Row:
    """The row with its date in ISO form: versions of software follow from it."""
    date = row.get("source_date", "")
    if date.lower() in NOTHING:
        return row
    try:
        return {**row, "source_date": iso_dates(date)}
    except DateError as error:
        raise SkipRowError(f"source_date {date!r} {error}") from error


def _slow_products(row: Row, run: Run) -> str:
    """What makes products of a row slower than its cards may be: no cell says in which dtype they are."""
    if row.get("compute_dtype") or run.product_dtype != "fp32":
        return ""
    return ", of products in fp32, as the software has them where no compute_dtype is stated; write bf16 if it was"


def check_possible(row: Row, tokens_per_s: float | None, architecture: Architecture, run: Run, gpu: Gpu) -> None:
    """No row is faster than the peak of its cards (MFU above 1), nor may be meant to be 1,000 times as fast."""
    peak = gpu.peaks.get(run.product_dtype)
    if tokens_per_s is None or peak is None:
        return
    flops_per_s = model_flops_per_step(architecture, run) * tokens_per_s / run.tokens_per_step
    mfu = flops_per_s / (peak * run.num_gpus)
    stated = [column for column in SPEED_COLUMNS if number(row, column) is not None]
    told = f"{_cell_of_speed(row, stated)}{tokens_per_s:g} tokens/s on {run.num_gpus} x {gpu.id}"
    if mfu > 1.0:
        raise SkipRowError(f"{told} would be an MFU of {mfu:.2f}, above 1{_slow_products(row, run)}")
    if stated and 1e3 * mfu <= 1.0 and all(may_be_thousands(column, row[column]) for column in stated):
        column, digits = stated[0], re.findall(r"[\d.]+", row[stated[0]])[0]
        raise SkipRowError(
            f"{column} {row[column]!r} may be {float(digits):g} or {digits.replace('.', '')}, and these cards could do "
            f"either: write {digits.replace('.', '')}, or {digits}0"
        )
    if stated:
        _unit_is_sure(row, stated, mfu)
    if mfu < LEAST_MFU:
        raise SkipRowError(f"{told} would be an MFU of {mfu:.1e}: check its unit")


def _cell_of_speed(row: Row, stated: Sequence[str]) -> str:
    """The cell that tokens/s were worked out from, in front of them; nothing where the row states them."""
    column = stated[0] if stated else "total_time_h"
    return "" if column == "tokens_per_s" else f"{column} {row.get(column, '')!r}: "


def _unit_is_sure(row: Row, stated: Sequence[str], mfu: float) -> None:
    """A speed that is very slow, and 1,000 times as high would be possible, has its unit in its cell or a second figure
    of the row beside it: a speed beside a time."""
    speeds = [column for column in stated if column != "step_time_s"]
    possible = UNIT_MFU <= 1e3 * mfu <= 1.0
    if mfu >= UNIT_MFU or not possible or (speeds and len(speeds) < len(stated)):
        return
    column = stated[0]
    if re.search(r"\d\s*[a-df-z]", row[column], re.IGNORECASE):
        return
    may_be, thousand, one = IN_THOUSANDS[column]
    number_said = re.sub(r"^[~\u2248]\s*|\s*/.*$", "", row[column])
    either = f"{number_said}{thousand} or " if thousand else ""
    raise SkipRowError(
        f"{column} {row[column]!r} would be an MFU of {mfu:.1e}, and may be {may_be.format(number_said)}: write the "
        f"unit, {either}{number_said} {one}"
    )
