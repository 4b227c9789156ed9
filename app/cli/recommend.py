"""``tunecast recommend``: what to rent for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunecast.cli.completion import NAMES, choices
from tunecast.cli.options import AMOUNT, FILE, PARALLEL, RUN, Json, Model, cards, of_cards, option, with_groups
from tunecast.cli.options_whole_run import SPOT_PANEL, WHOLE_RUN

if TYPE_CHECKING:
    from tunecast.recommendation import Recommendation

LIMITS = "What a plan has to keep"
ANSWER = "The answer"
PLANS = "cheapest|balance|fastest"
OWNED = ("owned", "electricity_usd_per_kwh", "gpu_power_w", "pue")
"""What concerns a machine of one's own, which nobody has to choose."""
AROUND = {name: annotation for name, annotation in WHOLE_RUN.items() if name not in ("spot", *OWNED)}
SEARCH = {
    "methods": option(str, "Methods to compare, instead of --method.", panel=LIMITS, metavar="lora,qlora,full"),
    "max_gpus": option(int, "GPUs of the largest job that is tried (1, 2, 4, ...). Default: 8.", panel=LIMITS),
    "global_batch": option(int, "Samples per optimizer step of the whole job.", panel=LIMITS, metavar="N"),
    "budget": option(float, "Most that the whole run may cost.", panel=LIMITS, metavar="USD"),
    "deadline": option(str, "When the run must be done.", panel=LIMITS, metavar="36h|2d"),
    "min_fit_confidence": option(
        float, "Least probability that the run fits the card. Default: 0.9.", panel=LIMITS, metavar="P"
    ),
    "provider": option(
        list[str], "Only these providers; repeatable.", panel=LIMITS, metavar="NAME", completion=NAMES["provider"]
    ),
    "region": option(list[str], "Only these regions, or their beginning; repeatable.", panel=LIMITS, metavar="NAME"),
    "purchase": option(
        list[str],
        "Other offers than on-demand; repeatable.",
        panel=LIMITS,
        metavar="community|marketplace|reserved|committed",
    ),
    "spot": option(
        bool, "Interruptible offers too, with what interruptions cost.", "--spot/--no-spot", panel=SPOT_PANEL
    ),
}
"""Options that only this command has."""


CARDS = cards("Cards to choose among; repeatable. Default: all.", "ID")


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, machine=CARDS, search=SEARCH, around=AROUND)
def recommend(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    machine: dict[str, Any],
    search: dict[str, Any],
    around: dict[str, Any],
    write: Annotated[
        list[str] | None,
        typer.Option(
            help="Write the picked plan: trl, axolotl, llama-factory, skypilot, dstack; repeatable.",
            metavar="KIND=FILE.yaml",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    pick: Annotated[
        str,
        typer.Option(
            help="The plan that is written.",
            metavar=PLANS,
            rich_help_panel=ANSWER,
            autocompletion=choices(PLANS),
        ),
    ] = "cheapest",
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw money against time.", metavar="FILE.svg|png", rich_help_panel=ANSWER),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what to rent: cheapest, fastest, balance.

    Over GPUs, their number, offers, batch plans, checkpointing and methods. Exit code 3 when nothing keeps the limits.
    """
    import gc

    from tunecast import recommender
    from tunecast.catalogs.errors import TunecastError
    from tunecast.cli.progress import spinner
    from tunecast.plots import check_plot_path
    from tunecast.written import read_asked_files, training_kinds, with_written, write_plan

    wanted = read_asked_files(write or [], pick)
    if plot is not None:
        check_plot_path(plot)
    gc.disable()  # the process ends soon, and a collection in between costs more than the memory is worth
    with spinner("comparing plans"):
        found = recommender.recommend(
            model,
            **of_cards(machine),
            **search,
            **run_options,
            **amount,
            **parallel,
            **around,
            written=training_kinds(wanted),
        )
    try:
        written = write_plan(found, wanted, pick)
    except TunecastError:  # the answer stands, whatever cannot be written of it
        _tell(found, plot, as_json)
        raise
    _tell(with_written(found, written), plot, as_json)


def _tell(found: Recommendation, plot: Path | None, as_json: bool) -> None:
    from tunecast.cli.console import print_json, show
    from tunecast.cli.guard import THE_ANSWER_IS_NO, fail

    if plot is not None:
        from tunecast.recommend_plot import money_against_time

        money_against_time(plot, found)
    if as_json:
        print_json(found.to_dict())
    else:
        from tunecast.recommend_table import recommendation_report

        show(*recommendation_report(found))
    if not found.front:
        fail(found.refusal(), THE_ANSWER_IS_NO)
