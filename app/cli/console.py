"""Where output goes: data to stdout, progress and warnings to stderr. Colour only on a terminal.

rich honours ``NO_COLOR`` and ``COLUMNS`` by itself; without a terminal a table is as wide as ``COLUMNS``
says, else 100 columns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from tunecast.cli.guard import THE_ANSWER_IS_NO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tunecast.explain import Term
    from tunecast.model.forecast import Forecast

PLAIN_WIDTH = 100
"""Columns of a table that goes into a pipe or a file."""


def _width(is_terminal: bool) -> int | None:
    return None if is_terminal or os.environ.get("COLUMNS") else PLAIN_WIDTH


def out() -> Console:
    """The console for data."""
    from rich.console import Console

    return Console(width=_width(sys.stdout.isatty()), highlight=False)


def err() -> Console:
    """The console for progress and warnings."""
    from rich.console import Console

    return Console(stderr=True, width=_width(sys.stderr.isatty()), highlight=False)


def show(*parts: RenderableType) -> None:
    """Print tables and lines on stdout; into a pipe or a file without the blanks that fill a table's width."""
    console = out()
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def quiet_libraries() -> None:
    """Keep the deprecations and hints of torch and its relatives, meant for their developers, off stderr."""
    import logging
    import warnings

    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings(
            "ignore", category=category, module=r"(torch|transformers|peft|bitsandbytes|accelerate)\b"
        )
    for name in ("transformers", "bitsandbytes", "accelerate", "peft", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def print_json(data: Any) -> None:
    """Print JSON on stdout; unknown is null, never NaN."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")


def show_forecasts(
    forecasts: Sequence[Forecast], *, as_json: bool, terms: Sequence[Term] | None = None, origins: str = "--json"
) -> None:
    """Print forecasts or measurements, with the terms of the one that is explained; code 3 when none of them fits.

    `origins` are the options that tell where every field came from.
    """
    if as_json:
        from tunecast.explain import terms_to_list
        from tunecast.model.forecast_json import forecast_to_dict

        explained = {} if terms is None else {"terms": terms_to_list(terms)}
        print_json([forecast_to_dict(forecast) | explained for forecast in forecasts])
    else:
        from tunecast.forecast_table import forecast_report

        show(*forecast_report(forecasts, out().width))
        if terms is not None:
            from tunecast.explain import terms_table

            show(*terms_table(terms))
        else:
            show("", f"Where every field and number comes from: {origins}")
    if all(forecast.fits is False for forecast in forecasts):
        raise typer.Exit(THE_ANSWER_IS_NO)
