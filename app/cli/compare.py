"""``tunecast compare``: a record against the catalog, records against one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunecast.cli.options import Json


def compare(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORD...", help="Calibration records, or a folder: the newest of each device."),
    ],
    plot: Annotated[
        Path | None, typer.Option(help="Draw measured against catalog, device by device.", metavar="FILE.svg|png")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare records with the catalog and each other. The first one given is the reference."""
    from tunecast.against_catalog import against_catalog, catalog_table
    from tunecast.cli.console import err, print_json, show
    from tunecast.cli.progress import spinner
    from tunecast.compare import between_records, named_records, pair_table
    from tunecast.plots import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    with spinner("comparing records"):
        first, *others = named_records(records)
        catalog = [against_catalog(path) for path in (first, *others)]
        pairs = [between_records(first, other) for other in others]
    if plot is not None:
        from tunecast.compare_plot import plot_shares

        err().print(f"picture: {plot_shares(catalog, plot)}")
    if as_json:
        print_json(
            {
                "schema": "tunecast.comparison/1",
                "against_catalog": [comparison.as_dict() for comparison in catalog],
                "between_records": [pair.as_dict() for pair in pairs],
            }
        )
        return
    show(*(catalog_table(comparison) for comparison in catalog), *(pair_table(pair) for pair in pairs))
