"""``tunecast report``: a page for whoever approves the money."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tunecast.cli.options import AMOUNT, FILE, PARALLEL, RUN, THE_MACHINE, Model, Prices, UsdPerGpuHour, with_groups
from tunecast.cli.options_whole_run import WHOLE_RUN


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, around=WHOLE_RUN)
def report(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    around: dict[str, Any],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Cards to show; repeatable. Default: all.", metavar="ID|all", show_default=False,
            rich_help_panel=THE_MACHINE,
        ),
    ] = None,
    record: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration record of a card; repeatable.", metavar="FILE", rich_help_panel=THE_MACHINE),
    ] = None,
    usd_per_gpu_hour: UsdPerGpuHour = None,
    prices: Prices = None,
    out: Annotated[Path, typer.Option(help="Where the page goes.", metavar="FILE.html")] = Path("tunecast-report.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Write the same as Markdown too.", metavar="FILE.md")
    ] = None,
) -> None:  # fmt: skip
    """Write one self-contained page about a run.

    The answer, money against time, every card, memory, what it depends on, and where every number comes from.
    """
    from tunecast.cli.console import err
    from tunecast.cli.progress import told_on_stderr
    from tunecast.report.gather import gather
    from tunecast.report.write import check_paths, write_report

    check_paths(out, markdown)
    with told_on_stderr(True) as told:
        found = gather(
            model,
            command=shlex.join(["tunecast", *sys.argv[1:]]),
            gpu=gpu or "all",
            records=record or [],
            told=told,
            usd_per_gpu_hour=usd_per_gpu_hour,
            prices=prices or [],
            **run_options,
            **amount,
            **parallel,
            **around,
        )
        written = write_report(found, out, markdown)
    for path in written:
        err().print(f"report: {path}")
