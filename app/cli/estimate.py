"""``tunecast estimate``: forecast a run on GPUs you do not have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
    Prices,
    ShareHost,
    UsdPerGpuHour,
    with_groups,
)
from tunecast.cli.options_whole_run import DEADLINE, WHOLE_RUN

if TYPE_CHECKING:
    from tunecast.explain import Term


@with_groups(run_options=RUN | FILE, amount=AMOUNT, parallel=PARALLEL, around=WHOLE_RUN | DEADLINE)
def estimate(
    model: Model,
    run_options: dict[str, Any],
    amount: dict[str, Any],
    parallel: dict[str, Any],
    around: dict[str, Any],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Catalog id or everyday name; repeatable. Default: all.",
            metavar="ID|all|cpu|mock:ID",
            show_default=False,
            rich_help_panel=THE_MACHINE,
        ),
    ] = None,
    record: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration record of a device; repeatable.", metavar="FILE", rich_help_panel=THE_MACHINE),
    ] = None,
    share_host: ShareHost = False,
    usd_per_gpu_hour: UsdPerGpuHour = None,
    prices: Prices = None,
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
        "gpu": gpu or ["all"],
        "records": record or [],
        "share_host": share_host,
        "usd_per_gpu_hour": usd_per_gpu_hour,
        "prices": prices or [],
        "achieved_tflops": achieved_tflops,
        **run_options,
        **amount,
        **parallel,
        **around,
    }
    searching: dict[str, Any] = {"max_batch": max_batch, "max_length_that_fits": max_length_that_fits, "exact": exact}
    terms = _terms(model, asked, searching) if explain else None
    with told_on_stderr(True) as told:
        forecasts = api.estimate(model, told=told, **searching, **asked)
    show_forecasts(forecasts, as_json=as_json, terms=terms)


def _terms(model: str, asked: Mapping[str, Any], searching: Mapping[str, Any]) -> list[Term]:
    """The terms of the run as it was asked; what searches or traces has none to show."""
    from tunecast.catalogs.errors import InputError
    from tunecast.explain import explain

    if any(searching.values()):
        raise InputError("--explain takes the run as it is; leave out --max-batch, --max-length-that-fits and --exact.")
    return explain(model, **{name: value for name, value in asked.items() if name != "deadline"})
