"""``tunecast measure``: run real optimizer steps and time them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tunecast.cli.options import FILE, MEASURED, RUN, Device, Json, Model, with_groups

STEPS_HELP = "Optimizer steps to time, after warm-up; on a card more, for 10 s, where they scatter by over 2%."


@with_groups(run_options=RUN | MEASURED | FILE)
def measure(
    model: Model,
    run_options: dict[str, Any],
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help=STEPS_HELP)] = 5,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="On a mock: simulate even what does not fit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run and time real optimizer steps. Random weights, nothing is downloaded."""
    from tunecast import api
    from tunecast.cli.console import print_json, quiet_libraries, show_forecasts
    from tunecast.cli.progress import spinner
    from tunecast.measurement import OutOfMemoryError

    quiet_libraries()
    try:
        with spinner(f"measuring {model}"):
            forecast = api.measure(model, device=device, steps=steps, ignore_memory=ignore_memory, **run_options)
    except OutOfMemoryError as error:
        if as_json:
            print_json([error.answer])
        raise
    show_forecasts([forecast], as_json=as_json)
