"""``tunecast fit``: turn the samples of a record into factors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunecast.cli.options import Json


def fit(
    record: Annotated[Path, typer.Argument(help="A record that `tunecast calibrate --no-fit` wrote.")],
    as_json: Json = False,
) -> None:
    """Fit the factors of a record and write them into it."""
    from tunecast import api
    from tunecast.cli.console import print_json, show
    from tunecast.cli.progress import spinner
    from tunecast.factor_table import factor_table
    from tunecast.model.factors_io import factors_to_dict

    with spinner(f"fitting {record.name}"):
        factors = api.fit(record)
    if as_json:
        print_json(factors_to_dict(factors))
    else:
        show(factor_table(factors), f"record: {record}")
