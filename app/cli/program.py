"""The program: one typer application, one module per command.

Imported for ``--help`` too, so nothing here or at the top of a command's module may import torch,
scipy, pandas, numpy or rich tables.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tunecast.cli.calibrate import calibrate
from tunecast.cli.catalog import catalog
from tunecast.cli.compare import compare
from tunecast.cli.env import env
from tunecast.cli.estimate import estimate
from tunecast.cli.examples import epilog
from tunecast.cli.fit import fit
from tunecast.cli.guard import guarded
from tunecast.cli.measure import measure
from tunecast.cli.recommend import recommend
from tunecast.cli.report import report
from tunecast.cli.sweep import sweep
from tunecast.cli.validate import validate
from tunecast.cli.web import web

program = typer.Typer(
    name="tunecast",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would cut long option names short at 80 columns
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_length, as Transformers' scripts write it
    },
    epilog="Exit codes: 0 fine, 1 run-time failure, 2 bad input, 3 the answer is no (nothing fits), 130 interrupted.",
)

COMMANDS = (env, calibrate, fit, measure, estimate, recommend, sweep, report, compare, validate, catalog, web)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("tunecast"))
        raise typer.Exit


@program.callback()
def tunecast(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Measure the GPU in front of you for minutes; forecast the time, memory and money of a fine-tuning run."""


for _command in COMMANDS:
    program.command(_command.__name__, epilog=epilog(_command.__name__))(guarded(_command))
