"""``tunecast catalog``: the facts that ship with tunecast, and fresh prices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunecast.cli.completion import NAMES, choices
from tunecast.cli.options import Json, Prices

if TYPE_CHECKING:
    from tunecast.catalogs.price_book import PriceBook

OF_PRICES = "Prices"
FACTS = "gpus|models|prices"


def catalog(
    what: Annotated[str, typer.Argument(metavar=FACTS, help="Which facts.", autocompletion=choices(FACTS))],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="Prices of this GPU only; repeatable.",
            metavar="ID",
            rich_help_panel=OF_PRICES,
            autocompletion=NAMES["gpu"],
        ),
    ] = None,
    prices: Prices = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh", help="Ask the providers for today's prices, through gpuhunt.", rich_help_panel=OF_PRICES
        ),
    ] = False,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="Refresh this provider only; repeatable.", metavar="NAME", rich_help_panel=OF_PRICES),
    ] = None,
    trend: Annotated[
        bool, typer.Option("--trend", help="What the offers of --gpu cost before.", rich_help_panel=OF_PRICES)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the --trend.", metavar="FILE.svg|png", rich_help_panel=OF_PRICES),
    ] = None,
    as_json: Json = False,
) -> None:
    """List GPUs, models or prices; refresh prices; show their trend."""
    given = {
        "--gpu": gpu,
        "--prices": prices,
        "--refresh": refresh,
        "--provider": provider,
        "--trend": trend,
        "--plot": plot,
    }
    _check(what, [name for name, value in given.items() if value])
    if refresh:
        _refresh(provider or [], as_json=as_json)
    elif what == "prices":
        _prices(gpu or [], prices or [], trend=trend, plot=plot, as_json=as_json)
    else:
        _facts(what, as_json=as_json)


def _check(what: str, given: list[str]) -> None:
    """Options that do not go together, refused before any work."""
    from tunecast.catalogs.errors import InputError

    if what in ("gpus", "models") and given:
        raise InputError(f"{given[0]} is about prices; type `tunecast catalog prices {given[0]}`.")
    if "--provider" in given and "--refresh" not in given:
        raise InputError("--provider says whose prices to refresh; type it with --refresh, or leave it out.")
    if "--refresh" in given and set(given) - {"--refresh", "--provider"}:
        other = next(name for name in given if name not in ("--refresh", "--provider"))
        raise InputError(f"--refresh fetches prices and shows none; run `tunecast catalog prices {other}` after it.")
    if "--trend" in given and "--gpu" not in given:
        raise InputError("--trend needs a card; type for example --gpu h100-sxm5-80gb --trend.")
    if "--plot" in given and "--trend" not in given:
        raise InputError("--plot draws the history of prices; type it with --trend.")


def _facts(what: str, *, as_json: bool) -> None:
    from tunecast.catalog_tables import catalog_rows, catalog_table
    from tunecast.cli.console import print_json, show

    rows = catalog_rows(what)
    if as_json:
        print_json(rows)
    else:
        show(*catalog_table(what, rows))


def _prices(names: list[str], files: list[Path], *, trend: bool, plot: Path | None, as_json: bool) -> None:
    from tunecast.catalogs.gpus import find_gpu
    from tunecast.catalogs.price_book import price_book
    from tunecast.catalogs.tables import price_rows
    from tunecast.cli.console import print_json, show
    from tunecast.price_tables import offers_of, price_table

    gpu_ids = [find_gpu(name).id for name in names]
    book = price_book(files)
    if trend:
        _trend(book, gpu_ids, plot, as_json=as_json)
    elif as_json:
        wanted = {offer.gpu_id for offer in offers_of(book, gpu_ids)}
        print_json(price_rows([offer for offer in book.offers if not gpu_ids or offer.gpu_id in wanted]))
    else:
        show(*price_table(book, gpu_ids), "Every column, with source and date: tunecast catalog prices --json")


def _trend(book: PriceBook, gpu_ids: list[str], plot: Path | None, *, as_json: bool) -> None:
    from tunecast.cli.console import err, print_json, show
    from tunecast.price_tables import plot_trend, trend_table, trend_to_dict

    if plot is not None:
        err().print(f"drawn: {plot_trend(book, gpu_ids, plot)}")
    if as_json:
        print_json(trend_to_dict(book, gpu_ids))
    else:
        show(*trend_table(book, gpu_ids))


def _refresh(providers: list[str], *, as_json: bool) -> None:
    """Fetch with progress on stderr; exit code 1, and the cache as it was, when nobody answered."""
    from tunecast.catalogs.price_refresh import refresh_prices
    from tunecast.cli.console import err, print_json, show
    from tunecast.price_tables import refresh_table, refresh_to_dict

    with err().status("asking for prices") as status:
        done = refresh_prices(providers, progress=lambda name: status.update(f"asking for prices: {name}"))
    if as_json:
        print_json(refresh_to_dict(done))
    else:
        show(*refresh_table(done))
