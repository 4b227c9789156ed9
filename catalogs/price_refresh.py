"""Fresh prices through gpuhunt, into the user's cache (`tunecast catalog prices --refresh`).

gpuhunt is asked for a fixed list of providers: those whose lists it publishes as files, and the
marketplaces that answer without a key. It has no cache and no time limit of its own, so both are here.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunecast.catalogs.clock import today
from tunecast.catalogs.errors import TunecastError, UnknownNameError
from tunecast.catalogs.gpuhunt_rows import PROVIDER_NAMES, Mapped, rows_from_listings
from tunecast.catalogs.price_cache import CachedPrices, cached_offers, write_cache
from tunecast.catalogs.tables import Row

LISTED_PROVIDERS = ("aws", "azure", "cloudrift", "gcp", "lambdalabs", "nebius", "oci", "runpod", "verda")
"""gpuhunt publishes their lists as files."""
ASKED_PROVIDERS = {"vastai": "VastAIProvider", "vultr": "VultrProvider"}
"""Asked live, without a key."""
CATALOG_DIR = "GPUHUNT_CATALOG_DIR"
"""gpuhunt's own switch to a folder of lists, one CSV per provider."""

TIMEOUT_S = 60.0
"""For each provider, and for all published lists together."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """What a refresh brought."""

    path: Path
    source: str
    counts: dict[str, int]
    """Prices by provider."""
    failed: dict[str, str]
    """Providers that gave none, with why; what was known of them stays."""
    left_out: dict[str, int]
    """Listings that are no price of a card in the catalog, by why."""


def refresh_prices(
    providers: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Progress = lambda _: None,
) -> Refresh:
    """Ask providers (all of them by default) for their prices and replace theirs in the cache.

    Raises TunecastError, leaving the cache as it was, when not one of them answered.
    """
    gpuhunt = _gpuhunt()
    mapped: dict[str, Mapped] = {}
    failed: dict[str, str] = {}
    for provider, result in _asked(gpuhunt, _wanted(providers), timeout_s, progress):
        name = PROVIDER_NAMES.get(provider, provider)
        if isinstance(result, Mapped) and result.rows:
            mapped[name] = result
        else:
            failed[name] = result if isinstance(result, str) else "it lists no card of the catalog"
    if not mapped:
        why = next(iter(failed.values()), f"{os.environ.get(CATALOG_DIR)} holds no list of a known provider")
        raise TunecastError(f"No price was refreshed: {why}; the prices known before stay in use.")
    return _kept(mapped, failed, cache_dir)


def _kept(mapped: dict[str, Mapped], failed: dict[str, str], cache_dir: Path | None) -> Refresh:
    """The cache with the refreshed providers' rows replaced, what they were before kept as history."""
    rows = with_history([row for m in mapped.values() for row in m.rows], _rows_before(cache_dir))
    source = f"gpuhunt, refreshed {today().isoformat()} ({', '.join(mapped)})"
    path = write_cache(CachedPrices(fetched_on=today().isoformat(), source=source, rows=rows), cache_dir)
    left_out: dict[str, int] = {}
    for result in mapped.values():
        for why, count in result.left_out.items():
            left_out[why] = left_out.get(why, 0) + count
    counts = {name: len(result.rows) for name, result in mapped.items()}
    return Refresh(path=path, source=source, counts=counts, failed=failed, left_out=left_out)


def _rows_before(cache_dir: Path | None) -> tuple[Row, ...]:
    """The rows of the last refresh; a file that cannot be read is replaced, as its error message promises."""
    try:
        before = cached_offers(cache_dir)
    except TunecastError:
        return ()
    return () if before is None else before.rows


def with_history(new: Iterable[Row], old: Iterable[Row]) -> tuple[Row, ...]:
    """New rows, then older ones of the same day and place only where the price was another one."""
    fresh = list(new)
    days = {(row["provider"], row["snapshot_date"]) for row in fresh}
    prices = {(*_offer(row), row["usd_per_hour"]) for row in fresh}
    kept = [
        row
        for row in old
        if (row["provider"], row["snapshot_date"]) not in days and (*_offer(row), row["usd_per_hour"]) not in prices
    ]
    return (*fresh, *kept)


def _offer(row: Row) -> tuple[str, ...]:
    columns = ("provider", "tier", "offer_sku", "gpu_canonical_id", "gpu_count", "price_type", "region", "statistic")
    return tuple(row[column] for column in columns)


def _gpuhunt() -> Any:
    try:
        import gpuhunt
    except ImportError as error:
        raise TunecastError(
            "Refreshing prices needs gpuhunt, which is not installed; run `pip install 'tunecast[prices]'`."
        ) from error
    return gpuhunt


def _wanted(providers: Sequence[str]) -> tuple[str, ...]:
    """gpuhunt's names of the providers asked for; of a local folder, those that it has."""
    folder = os.environ.get(CATALOG_DIR)
    everyone = (*LISTED_PROVIDERS, *ASKED_PROVIDERS)
    if folder is not None:
        everyone = tuple(p for p in LISTED_PROVIDERS if (Path(folder) / f"{p}.csv").is_file())
    if not providers:
        return everyone
    ours = {PROVIDER_NAMES.get(provider, provider): provider for provider in everyone}
    unknown = [name for name in providers if name.lower() not in ours]
    if unknown:
        raise UnknownNameError("provider", unknown[0], ours, hint=f"Prices can be refreshed of {', '.join(ours)}.")
    return tuple(ours[name.lower()] for name in providers)


def _asked(
    gpuhunt: Any, providers: Sequence[str], timeout_s: float, progress: Progress
) -> Iterator[tuple[str, Mapped | str]]:
    """Each provider's rows, or in words why there are none."""
    catalog = gpuhunt.Catalog(auto_reload=False)
    with _quiet(), _socket_timeout(timeout_s):
        unloaded = ""
        if CATALOG_DIR not in os.environ and set(providers) & set(LISTED_PROVIDERS):
            progress("published price lists")
            unloaded = _attempt(catalog.load, timeout_s)[1]
        for provider in providers:
            progress(PROVIDER_NAMES.get(provider, provider))
            if provider in LISTED_PROVIDERS and unloaded:
                yield provider, unloaded
            else:
                yield provider, _one_provider(gpuhunt, catalog, provider, timeout_s)


def _one_provider(gpuhunt: Any, catalog: Any, provider: str, timeout_s: float) -> Mapped | str:
    def ask() -> list[Any]:
        if provider in ASKED_PROVIDERS:
            catalog.add_provider(_live_provider(provider))
        found: list[Any] = catalog.query(provider=provider, min_gpu_count=1)
        return found

    listings, why = _attempt(ask, timeout_s)
    if why:
        return why
    if not listings:
        local = CATALOG_DIR in os.environ or provider in catalog.catalog or provider in ASKED_PROVIDERS
        return "it listed nothing" if local else "its list could not be downloaded"
    source = f"gpuhunt {getattr(gpuhunt, '__version__', '')}".strip() + f", {provider} list"
    return rows_from_listings(provider, listings, _day_of(catalog, provider), source)


def _live_provider(provider: str) -> Any:
    from importlib import import_module

    return getattr(import_module(f"gpuhunt.providers.{provider}"), ASKED_PROVIDERS[provider]).from_env()


def _attempt(function: Callable[[], Any], timeout_s: float) -> tuple[Any, str]:
    """What a function returns, and in words why it did not; it runs aside, so that nobody waits for ever."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), ""))
        except Exception as error:
            outcome.append((None, _reason(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    return outcome[0] if outcome else (None, f"no answer within {timeout_s:g} s")


def _reason(error: BaseException) -> str:
    """The innermost cause in words: a library's error often only says that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(getattr(error, "reason", "") or error).strip().rstrip(".")
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _day_of(catalog: Any, provider: str) -> str:
    """The day of a list: of its version (20260818-42), of the file in a local folder, else today."""
    folder = os.environ.get(CATALOG_DIR)
    if folder is not None and provider in LISTED_PROVIDERS:
        seconds = (Path(folder) / f"{provider}.csv").stat().st_mtime
        return datetime.fromtimestamp(seconds, tz=UTC).date().isoformat()
    version = re.match(r"(\d{4})(\d{2})(\d{2})", str(getattr(catalog.catalog.get(provider), "version", "")))
    return "-".join(version.groups()) if version else today().isoformat()


@contextmanager
def _quiet() -> Iterator[None]:
    """gpuhunt logs a traceback per provider that fails; the answer here is one line per provider."""
    logger = logging.getLogger("gpuhunt")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """gpuhunt downloads without a limit; this one holds for every socket opened meanwhile."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
