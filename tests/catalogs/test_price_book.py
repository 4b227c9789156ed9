"""Layers of prices: the user's over refreshed ones over the shipped snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tunecast.catalogs.errors import TunecastError, UnknownNameError
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.price_book import PriceBook, book_of, layered, price_book, shipped_book
from tunecast.catalogs.price_cache import CachedPrices, cached_offers, default_cache_dir, write_cache
from tunecast.catalogs.prices import PRICE_TYPES, Offer, offers_for, parse_offers
from tunecast.catalogs.tables import Row, read_rows

LAMBDA_A10: Row = {
    **dict.fromkeys(read_rows("prices.csv")[0], ""),
    "provider": "lambda",
    "gpu_canonical_id": "a10-24gb",
    "instance_or_sku": "gpu_1x_a10",
    "gpu_count": "1",
    "price_type": "on-demand",
    "usd_per_hour": "0.9",
    "usd_per_gpu_hour": "0.9",
    "snapshot_date": "2026-11-01",
    "source": "a price list",
}


def offers(*changes: dict[str, str], layer: str = "shipped") -> tuple[Offer, ...]:
    rows: Iterable[Row] = [{**LAMBDA_A10, **change} for change in changes or ({},)]
    return tuple(replace(offer, layer=layer) for offer in parse_offers(rows))


def prices_of(book: PriceBook, **asked: object) -> list[float]:
    return [job.usd_per_hour for job in book.offers_for("a10-24gb", **asked)]  # type: ignore[arg-type]


def test_the_shipped_book_answers_as_the_plain_function_does() -> None:
    for gpu_id in load_gpus():
        assert shipped_book().offers_for(gpu_id, 2, PRICE_TYPES) == offers_for(gpu_id, 2, PRICE_TYPES)


def test_the_users_price_of_the_same_offer_counts_even_if_it_is_older_or_dearer() -> None:
    own = book_of(offers({"usd_per_hour": "1.2", "usd_per_gpu_hour": "1.2", "snapshot_date": "2025-01-01"}))
    both = layered(own, book_of(offers()), whole_providers=False)
    assert prices_of(both) == [1.2]
    assert [o.usd_per_hour for o in both.history(both.current[0])] == [1.2, 0.9]


def test_the_users_other_offers_compete_with_the_rest() -> None:
    own = book_of(offers({"provider": "mine", "usd_per_hour": "1.2", "usd_per_gpu_hour": "1.2"}))
    assert prices_of(layered(own, book_of(offers()), whole_providers=False)) == [0.9, 1.2]


def test_a_refreshed_provider_replaces_what_it_no_longer_lists() -> None:
    old = book_of(offers({}, {"instance_or_sku": "gone", "usd_per_hour": "0.1", "usd_per_gpu_hour": "0.1"}))
    new = book_of(offers({"snapshot_date": "2026-11-20", "usd_per_hour": "1", "usd_per_gpu_hour": "1"}))
    assert prices_of(layered(new, old, whole_providers=True)) == [1.0]


def test_a_refresh_leaves_other_providers_purchase_kinds_and_newer_rows_alone() -> None:
    old = book_of(
        offers(
            {"provider": "aws", "usd_per_hour": "2", "usd_per_gpu_hour": "2"},
            {"price_type": "spot", "usd_per_hour": "3", "usd_per_gpu_hour": "3"},
            {"snapshot_date": "2026-11-21", "usd_per_hour": "4", "usd_per_gpu_hour": "4", "instance_or_sku": "later"},
        )
    )
    new = book_of(offers({"snapshot_date": "2026-11-20"}))
    assert prices_of(layered(new, old, whole_providers=True), price_types=("on-demand", "spot")) == [0.9, 2, 3, 4]


def test_reserved_rows_count_unasked_only_from_the_users_own_file() -> None:
    reserved = {"price_type": "reserved", "term_months": "12"}
    assert prices_of(book_of(offers(reserved))) == []
    assert prices_of(book_of(offers(reserved)), price_types=("reserved",)) == [0.9]
    assert prices_of(book_of(offers(reserved, layer="user"))) == [0.9]
    assert prices_of(book_of(offers(reserved, layer="user")), price_types=("spot",)) == [], "it is not interrupted"
    assert prices_of(book_of(offers({"price_type": "spot"}, layer="user"))) == []


def test_an_upfront_payment_is_spread_over_every_hour_of_the_term() -> None:
    """By hand: 2 USD/h and 8,760 USD upfront for 12 months of 730 h are 3 USD/h for the two GPUs together."""
    term = {"price_type": "reserved", "term_months": "12", "upfront_usd": "8760"}
    shape = {"gpu_count": "2", "usd_per_hour": "2", "usd_per_gpu_hour": "1"}
    (job,) = book_of(offers({**term, **shape})).offers_for("a10-24gb", 4, ("reserved",))
    assert (job.instances, job.usd_per_hour, job.offer.usd_per_gpu_hour) == (2, 6.0, 1.5)
    assert any("reserved for 12 months, $8,760 of it upfront per instance" in note for note in job.notes)


def test_providers_and_regions_narrow_the_offers() -> None:
    book = book_of(offers({"region": "us-east-1"}, {"provider": "aws", "region": "eu-west-1"}, {"provider": "mine"}))
    assert {job.offer.provider for job in book.offers_for("a10-24gb", providers=("AWS",))} == {"aws"}
    assert {job.offer.region for job in book.offers_for("a10-24gb", regions=("us", "eu-west-1"))} == {
        "us-east-1",
        "eu-west-1",
    }
    with pytest.raises(UnknownNameError, match=r"Unknown provider 'asw'\. Did you mean aws"):
        book.offers_for("a10-24gb", providers=("asw",))
    with pytest.raises(UnknownNameError, match=r"Unknown region 'mars'\. There are .*us-east-1"):
        book.offers_for("a10-24gb", regions=("mars",))


def test_old_prices_say_how_old_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """2026-11-01 is 30 days before 2026-12-01 and 31 days before 2026-12-02; only the second is stale."""
    for day_s, told in (("1796083200", False), ("1796169600", True)):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", day_s)
        (job,) = book_of(offers()).offers_for("a10-24gb")
        assert ("the price is 31 days old (seen 2026-11-01)" in job.notes) is told


def test_a_written_cache_is_read_back_and_layered(tmp_path: Path) -> None:
    assert cached_offers(tmp_path) is None
    row = {**LAMBDA_A10, "snapshot_date": "2026-11-19", "usd_per_hour": "0.7", "usd_per_gpu_hour": "0.7"}
    write_cache(CachedPrices(fetched_on="2026-11-19", source="gpuhunt, 2026-11-19", rows=(row,)), tmp_path)
    book = price_book(cache_dir=tmp_path)
    (job,) = book.offers_for("a10-24gb", providers=("lambda",))
    assert (job.usd_per_hour, job.offer.layer) == (0.7, "refreshed")
    assert book.sources == ("gpuhunt, 2026-11-19", "shipped snapshot")


def test_a_write_that_fails_leaves_the_old_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(CachedPrices(fetched_on="2026-11-19", source="first", rows=(LAMBDA_A10,)), tmp_path)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_cache(CachedPrices(fetched_on="2026-11-20", source="second", rows=()), tmp_path)
    held = cached_offers(tmp_path)
    assert held is not None
    assert held.source == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["prices.json"]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"schema": "tunecast.prices/9"})])
def test_an_unreadable_cache_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(TunecastError, match=r"prices\.json cannot be read .* --refresh"):
        cached_offers(tmp_path)


def test_the_cache_lies_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TUNECAST_CACHE_DIR", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tunecast"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_cache_dir().parts[-3:] == ("Library", "Caches", "tunecast")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tunecast" / "Cache"
    monkeypatch.setenv("TUNECAST_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
