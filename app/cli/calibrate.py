"""``tunecast calibrate``: measure the device in front of you."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunecast.cli.options import Device, Json


def calibrate(
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="About 3 minutes on a GPU, 2 on a CPU (the default).")] = False,
    full: Annotated[bool, typer.Option("--full", help="More shapes, more repeats, larger files.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the record.")] = Path("tunecast-records"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted calibration.")] = False,
    no_fit: Annotated[bool, typer.Option("--no-fit", help="Only measure; `tunecast fit RECORD` later.")] = False,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            help="Time collectives between so many GPUs of this machine (processes of a CPU). "
            "Default: all of the same card; 1 leaves them out.",
            metavar="N",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a device and write one record."""
    from tunecast import api
    from tunecast.against_catalog import against_catalog, catalog_table
    from tunecast.catalogs.errors import InputError
    from tunecast.cli.console import print_json, quiet_libraries, show
    from tunecast.cli.progress import progress_bar

    if quick and full:
        raise InputError("--quick and --full exclude each other; keep one of them.")
    quiet_libraries()
    with progress_bar() as progress:
        path = api.calibrate_device(
            device,
            mode="full" if full else "quick",
            out=out,
            fresh=fresh,
            fit=not no_fit,
            num_gpus=num_gpus,
            progress=progress,
        )
    comparison = against_catalog(path)
    if as_json:
        print_json(comparison.as_dict())
        return
    show(catalog_table(comparison), *resumed_words(path), f"record: {path}")


def resumed_words(path: Path) -> list[str]:
    """That some of a record's trials are of a calibration that was interrupted."""
    from tunecast.calibrate.record import read_record

    record = read_record(path)
    kept = record["protocol"].get("resumed_trials", 0)
    if not kept:
        return []
    return [f"{kept} of {len(record['trials'])} trials are of an interrupted calibration; --fresh measures all again."]
