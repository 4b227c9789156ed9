"""``tunecast validate``: forecasts against runs that were measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tunecast.catalogs.errors import InputError
from tunecast.cli.completion import NAMES
from tunecast.cli.options import Json


def refuse_unused(path: Path, *, single: bool, explain: str | None, bar: float | None, **of_one: object) -> None:
    """Raise InputError for an option that says nothing about what is validated: a single run, a table of runs or one of
    its rows."""
    if single and explain is not None:
        raise InputError(f"--explain names a row of a table, but {path} is one run; leave it out.")
    if explain is not None and bar is not None:
        raise InputError(
            f"--max-median-error is a bar for the median of a table's rows, but --explain shows {explain} alone; leave "
            "one of them out."
        )
    for name, value in of_one.items():
        if value and not single:
            raise InputError(
                f"--{name} is about a single run (RUN.json), but {path} is a table, whose rows say what ran on which "
                "card; leave it out."
            )


def share(text: str) -> float:
    """The bar as a share: ``0.12`` or ``12%``. Raises InputError for what is neither, or so large that all is below."""
    digits = text.strip().removesuffix("%")
    try:
        value = float(digits) / (1.0 if digits == text.strip() else 100.0)
    except ValueError:
        value = -1.0
    if 0.0 <= value <= 1.0:
        return value
    typed = f"{value / 100.0:g} or {value:g}%" if digits == text.strip() and 1.0 < value <= 100.0 else "0.2 or 20%"
    raise InputError(f"--max-median-error {text} is no share between 0 and 1; write {typed}.")


THREADS = "OMP_NUM_THREADS"
"""Sums over threads end the search of a refit elsewhere: with one thread the figures are those of results/validation on
any number of processors, and come no later (small matrices)."""


def validate(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS.csv|RUN.json",
            help="A table of measured runs; a record of TunecastCallback; or a trainer_state.json.",
        ),
    ],
    explain: Annotated[
        str | None, typer.Option(help="Show how the row with this id was read and forecast.", metavar="ID")
    ] = None,
    max_median_error: Annotated[
        str | None,
        typer.Option(help="End with code 3 when a median error is larger: 0.12 or 12%.", metavar="X"),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="What a trainer_state.json ran: training file or model.", metavar="FILE|MODEL"),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpu", help="What a trainer_state.json ran on.", metavar="GPU", autocompletion=NAMES["gpu"]),
    ] = None,
    record: Annotated[
        list[Path] | None, typer.Option(help="Forecast a single run anew from this calibration record.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast runs that were measured, and compare."""
    if "numpy" not in sys.modules:  # which reads it when it is loaded
        os.environ.setdefault(THREADS, "1")
    from tunecast import validation
    from tunecast.cli.console import err, print_json, show
    from tunecast.cli.guard import THE_ANSWER_IS_NO
    from tunecast.cli.progress import spinner, told_or_printed
    from tunecast.validation_table import explanation, report

    single = runs.suffix == ".json"
    gpu = one_gpu(gpus)
    bar = None if max_median_error is None else share(max_median_error)
    refuse_unused(runs, single=single, explain=explain, bar=bar, config=config, gpu=gpu, record=record)
    if explain is not None:
        with told_or_printed("forecasting the run") as told:
            found = validation.explain(runs, explain, told)
        if as_json:
            print_json(validation.explained(found))
        else:
            show(*explanation(found))
        return
    if single:
        from tunecast.run_validation import run_report, validate_run

        with spinner("forecasting the run"):
            run = validate_run(runs, config=config, gpu=gpu, records=record or ())
        print_json(run.as_dict()) if as_json else show(*run_report(run))
        missed = [] if bar is None else run.above(bar)
    else:
        with told_or_printed("forecasting every run") as told:
            result = validation.validate(runs, told)
        print_json(result.as_dict()) if as_json else show(*report(result))
        for note in result.notes:
            err().print(note)
        missed = [] if bar is None else result.above(bar)
    for line in missed:
        err().print(line)
    if missed:
        raise typer.Exit(THE_ANSWER_IS_NO)


def one_gpu(gpus: list[str] | None) -> str | None:
    """The card that was named, if any; raises InputError for several."""
    from tunecast.catalogs.errors import InputError

    if gpus and len(gpus) > 1:
        raise InputError(f"--gpu names {len(gpus)} kinds of GPU ({', '.join(gpus)}), and a run had one; name that.")
    return gpus[0] if gpus else None
