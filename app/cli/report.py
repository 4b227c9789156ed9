"""``tunecast report``: a page for whoever approves the money."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tunecast.cli.options import AMOUNT, FILE, PARALLEL, RUN, Model, cards, of_cards, with_groups
from tunecast.cli.options_whole_run import WHOLE_RUN

CARDS = cards("Cards to show; repeatable. Default: all.", "ID|all")


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, machine=CARDS, around=WHOLE_RUN)
def report(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    machine: dict[str, Any],
    around: dict[str, Any],
    out: Annotated[Path, typer.Option(help="Where the page goes.", metavar="FILE.html")] = Path("tunecast-report.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Write the same as Markdown too.", metavar="FILE.md")
    ] = None,
) -> None:  # fmt: skip
    """Write one self-contained page about a run.

    The answer, money against time, every card, memory, what it depends on, and where every number comes from.
    """
    from tunecast.cli.console import err
    from tunecast.cli.guard import THE_ANSWER_IS_NO
    from tunecast.cli.progress import told_on_stderr
    from tunecast.report.gather import gather
    from tunecast.report.write import check_paths, write_report

    check_paths(out, markdown)
    with told_on_stderr(True) as told:
        found = gather(
            model,
            command=shlex.join(["tunecast", *sys.argv[1:]]),
            told=told,
            **of_cards(machine, gpu="all"),
            **run_options,
            **amount,
            **parallel,
            **around,
        )
        written = write_report(found, out, markdown)
    for path in written:
        err().print(f"report: {path}")
    if all(forecast.fits is False for forecast in found.forecasts) and found.recommended is None:
        raise typer.Exit(THE_ANSWER_IS_NO)
