"""``tunecast estimate``: forecast a run on GPUs you do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunecast.cli.options import (
    AMOUNT,
    FILE,
    PARALLEL,
    RUN,
    THE_MACHINE,
    THE_RUN,
    Json,
    Model,
    cards,
    of_cards,
    with_groups,
)
from tunecast.cli.options_whole_run import DEADLINE, WHOLE_RUN

if TYPE_CHECKING:
    from tunecast.explain import Term
    from tunecast.model.forecast import Forecast


CARDS = cards("Catalog id or everyday name; repeatable. Default: all.", "ID|all|cpu|mock:ID")


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, machine=CARDS, around=WHOLE_RUN | DEADLINE)
def estimate(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    machine: dict[str, Any],
    around: dict[str, Any],
    share_host: Annotated[
        bool,
        typer.Option(
            "--share-host",
            help="The record's machine and software are those of the GPUs asked for.",
            rich_help_panel=THE_MACHINE,
        ),
    ] = False,
    achieved_tflops: Annotated[
        float | None,
        typer.Option(
            help="Model TFLOP/s per GPU: replaces every step-time term, as the classic calculators do.",
            metavar="X",
            rich_help_panel=THE_MACHINE,
        ),
    ] = None,
    max_batch: Annotated[
        bool,
        typer.Option("--max-batch", help="Take the largest micro-batch that fits.", rich_help_panel=THE_MACHINE),
    ] = False,
    max_length_that_fits: Annotated[
        bool,
        typer.Option(
            "--max-length-that-fits", help="Take the longest sequence that fits.", rich_help_panel=THE_MACHINE
        ),
    ] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Trace the real code of this run instead of using formulas: any causal model of transformers.",
            rich_help_panel=THE_RUN,
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Every term with its formula, inputs and origin (one GPU)."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Forecast memory, time and money of a run on each GPU. Exit code 3 when it fits none."""
    from tunecast import api
    from tunecast.cli.console import quiet_libraries, show_forecasts
    from tunecast.cli.progress import told_on_stderr

    if exact:
        quiet_libraries()
    asked: dict[str, Any] = {
        **of_cards(machine, gpu=["all"]),
        "share_host": share_host,
        "achieved_tflops": achieved_tflops,
        **run_options,
        **amount,
        **parallel,
        **around,
    }
    searching: dict[str, Any] = {"max_batch": max_batch, "max_length_that_fits": max_length_that_fits, "exact": exact}
    terms_of = _explainer(model, asked, searching) if explain else None
    with told_on_stderr(True) as told:
        forecasts = api.estimate(model, told=told, **searching, **asked)
    terms = None if terms_of is None else terms_of(forecasts[0])
    one = len(forecasts) == 1 and not (max_batch or max_length_that_fits)
    show_forecasts(forecasts, as_json=as_json, terms=terms, origins="--explain or --json" if one else "--json")
    _refuse_late(forecasts, around.get("deadline"))


def _refuse_late(forecasts: Sequence[Forecast], deadline: str | None) -> None:
    """Code 3 when a deadline was given and no card keeps it, as with any other demand that nothing meets.

    A card on which the run does not fit keeps none: its time is that of a run with more memory than it has.
    """
    if deadline is None:
        return
    from tunecast.cli.guard import THE_ANSWER_IS_NO, fail
    from tunecast.model.num_gpus import parse_hours
    from tunecast.tables import duration

    held = [one for one in forecasts if one.fits is not False]
    took = {f"{one.run.num_gpus} x {one.gpu}": one.total_time_h.value for one in held if one.total_time_h}
    if took and min(took.values()) > parse_hours(deadline):
        fastest = min(took, key=lambda name: took[name])
        fail(
            f"No run is done within --deadline {deadline}: the fastest, {fastest}, takes {duration(took[fastest])}; "
            "allow more time, name other cards with --gpu, or type tunecast recommend.",
            THE_ANSWER_IS_NO,
        )


def _explainer(model: str, asked: Mapping[str, Any], searching: Mapping[str, Any]) -> Callable[[Forecast], list[Term]]:
    """The terms of the run as it was asked, once it is forecast; what searches has none to show."""
    from tunecast.api import traced
    from tunecast.catalogs.errors import InputError
    from tunecast.explain import explained, one_question

    if any(value for name, value in searching.items() if name != "exact"):
        raise InputError("--explain takes the run as it is; leave out --max-batch and --max-length-that-fits.")
    given = {name: value for name, value in asked.items() if name != "deadline"}
    source = traced() if searching.get("exact") else None
    question, target = one_question(model, source=source, **given)
    return lambda forecast: explained(question, target, forecast)
