"""``tunecast sweep``: how a forecast changes with its inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunecast.cli.completion import choices
from tunecast.cli.options import AMOUNT, FILE, PARALLEL, RUN, Json, Model, cards, of_cards, with_groups
from tunecast.cli.options_whole_run import WHOLE_RUN

if TYPE_CHECKING:
    from tunecast.sweep_result import Sweep

THE_SWEEP = "The sweep"


CARD = cards("The GPU that is looked at.", "ID|mock:ID")
ANALYSES = "tornado|what-if|size-steps|efficiency-steps|disk-load"
METRICS = "cost|time|train|load|step|speed|memory|cost-per-million"


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, machine=CARD, around=WHOLE_RUN)
def sweep(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    machine: dict[str, Any],
    around: dict[str, Any],
    analysis: Annotated[
        str | None,
        typer.Option(
            help="A sweep by name. Default: tornado.",
            metavar=ANALYSES,
            autocompletion=choices(ANALYSES),
            rich_help_panel=THE_SWEEP,
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="An input and its values, as max_length=512,1024,2048; twice for a grid. "
            "An option of the run or of what is around it, model, or mfu.",
            metavar="NAME=A,B,...",
            rich_help_panel=THE_SWEEP,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What is looked at. Default: cost, else time, else step.",
            metavar=METRICS,
            autocompletion=choices(METRICS),
            rich_help_panel=THE_SWEEP,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write every row there too.", metavar="FILE", rich_help_panel=THE_SWEEP)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw it: tornado, heat map or lines.", metavar="FILE.svg|png", rich_help_panel=THE_SWEEP),
    ] = None,
    as_json: Json = False,
) -> None:
    """Vary a forecast over its inputs.

    A tornado over every input, a grid of two, techniques side by side, or a classic analysis by name.
    """
    from tunecast.catalogs.errors import InputError
    from tunecast.catalogs.files import refuse_one_file_twice
    from tunecast.cli.progress import counted
    from tunecast.plots import check_plot_path
    from tunecast.sweep import sweep as run_sweep

    named = machine.get("gpu") or []
    if not named:
        raise InputError("A sweep looks at one GPU; add --gpu NAME, for example --gpu l40s.")
    if len(named) > 1:
        raise InputError(
            f"A sweep looks at one GPU, but --gpu was given {len(named)} times; keep one, or compare cards with "
            "tunecast estimate."
        )
    refuse_one_file_twice([("--csv", csv), ("--plot", plot)])
    if plot is not None:
        check_plot_path(plot)
    options = {**run_options, **amount, **parallel, **around, **of_cards({**machine, "gpu": named[0]})}
    with counted("forecasts") as told:
        found = run_sweep(
            model,
            analysis=analysis,
            over=over or (),
            metric=metric,
            told=told,
            **options,
        )
    _tell(found, csv, plot, as_json)


def _tell(found: Sweep, csv: Path | None, plot: Path | None, as_json: bool) -> None:
    from tunecast import sweep_table
    from tunecast.cli.console import err, out, print_json, show

    if csv is not None:
        err().print(f"table: {sweep_table.write_csv(found, csv)}")
    if plot is not None:
        from tunecast.sweep_plots import plot_sweep

        err().print(f"picture: {plot_sweep(found, plot)}")
    print_json(sweep_table.sweep_to_dict(found)) if as_json else show(*sweep_table.sweep_report(found, out().width))
