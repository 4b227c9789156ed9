"""Refreshing through gpuhunt's own local folder of lists, and what it does with lists that lie or are missing.

The lists are written by gpuhunt itself (`storage.dump`), so that they have its real format.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import TunecastError, UnknownNameError
from tunecast.catalogs.price_book import price_book
from tunecast.catalogs.price_cache import cached_offers
from tunecast.catalogs.price_refresh import _attempt, refresh_prices, with_history

gpuhunt = pytest.importorskip("gpuhunt")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
"""gpuhunt leaves the text wrapper of a local list to the garbage collector."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What is left to the garbage collector is collected before another test could be blamed for it."""
    yield
    gc.collect()


def item(provider: str, instance: str, gpu: str, memory: float, price: float, **more: Any) -> Any:
    """One of gpuhunt's listings, on demand with one GPU unless said otherwise."""
    cells = {"location": "us-east-1", "cpu": 8, "memory": 64.0, "gpu_count": 1, "spot": False, "disk_size": None}
    cells |= {"gpu_vendor": gpuhunt.AcceleratorVendor.NVIDIA, "flags": []} | more
    return gpuhunt.CatalogItem(
        provider=provider, instance_name=instance, price=price, gpu_name=gpu, gpu_memory=memory, **cells
    )


LISTINGS = {
    "aws": [
        item("aws", "p5.48xlarge", "H100", 80, 50.0, gpu_count=8),
        item("aws", "p5.48xlarge", "H100", 80, 21.0, gpu_count=8, spot=True, location="us-east-1a"),
        item("aws", "p5.48xlarge", "H100", 80, 20.0, gpu_count=8, spot=True, location="us-east-1b"),
        item("aws", "p9.new", "H100", 80, 6.0),
        item("aws", "p2.old", "K80", 12, 0.9),
    ],
    "runpod": [
        item("runpod", "NVIDIA H100 80GB HBM3", "H100", 80, 4.1, location="US-KS-2"),
        item("runpod", "NVIDIA H100 80GB HBM3", "H100", 80, 32.8, location="EU-RO-1", gpu_count=8),
        item("runpod", "NVIDIA H100 80GB HBM3", "H100", 80, 2.7, location="CA"),
        item("runpod", "NVIDIA H100 80GB HBM3", "H100", 80, 40.0, gpu_count=8, flags=["runpod-cluster"]),
        item("runpod", "NVIDIA GeForce RTX 3090", "RTX3090", 24, 0.5, location="US-KS-2"),
        item("runpod", "NVIDIA L40S", "L40S", 48, 0.05, location="US-KS-2"),
    ],
    "lambdalabs": [item("lambdalabs", "gpu_9x_a100", "A100", 80 * 1.074, 2.0)],
}


def write_lists(folder: Path, listings: dict[str, list[Any]]) -> None:
    from gpuhunt._internal import storage

    folder.mkdir(exist_ok=True)
    for provider, items in listings.items():
        storage.dump(items, str(folder / f"{provider}.csv"))


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_lists(tmp_path / "lists", LISTINGS)
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path / "lists"))
    return tmp_path


def cached(folder: Path) -> list[tuple[Any, ...]]:
    held = cached_offers(folder)
    assert held is not None
    return [(o.provider, o.gpu_id, o.price_type, o.region, o.gpu_count, o.usd_per_hour) for o in held.offers]


def test_listings_become_offers_of_our_cards(lists: Path) -> None:
    told: list[str] = []
    done = refresh_prices(cache_dir=lists, progress=told.append)
    assert done.counts == {"aws": 3, "lambda": 1, "runpod": 4}
    assert told == ["aws", "lambda", "runpod"]
    assert cached(lists) == [
        ("aws", "h100-sxm5-80gb", "on-demand", "us-east-1", 8, 50.0),
        ("aws", "h100-sxm5-80gb", "spot", "us-east-1", 8, 20.0),
        ("aws", "h100-80gb", "on-demand", "us-east-1", 1, 6.0),
        ("lambda", "a100-80gb", "on-demand", "all", 1, 2.0),
        ("runpod", "h100-sxm5-80gb", "on-demand", "global", 1, 4.1),
        ("runpod", "h100-sxm5-80gb", "community", "global", 1, 2.7),
        ("runpod", "rtx-3090-24gb", "on-demand", "global", 1, 0.5),
        ("runpod", "l40s-48gb", "on-demand", "global", 1, 0.05),
    ]


def test_what_is_left_out_is_counted_by_why(lists: Path) -> None:
    assert refresh_prices(cache_dir=lists).left_out == {
        "K80 12 GB is in no catalog": 1,
        "clusters of two pods or more": 1,
    }


def test_fillers_families_and_implausible_prices_are_shown_and_never_ranked(lists: Path) -> None:
    refresh_prices(cache_dir=lists)
    held = cached_offers(lists)
    assert held is not None
    doubts = {offer.gpu_id: offer.why_not_rankable.split(":")[0] for offer in held.offers if not offer.rankable}
    assert doubts == {
        "h100-80gb": "ambiguous",
        "a100-80gb": "ambiguous",
        "rtx-3090-24gb": "filler",
        "l40s-48gb": "implausible",
    }


def test_refreshed_prices_replace_the_providers_shipped_ones(lists: Path) -> None:
    refresh_prices(cache_dir=lists)
    book = price_book(cache_dir=lists)
    runpod = book.offers_for("h100-sxm5-80gb", 4, ("on-demand", "community"), providers=("runpod",))
    assert [(j.offer.price_type, j.usd_per_hour) for j in runpod] == [
        ("community", pytest.approx(10.8)),
        ("on-demand", pytest.approx(16.4)),
    ]
    assert book.offers_for("a100-sxm4-80gb", providers=("runpod",)) == (), "no longer listed"
    assert [j.offer.layer for j in book.offers_for("a100-sxm4-80gb", 1, ("spot",), providers=("runpod",))] == [
        "shipped"
    ], "gpuhunt has no spot prices of RunPod"
    history = [(o.layer, o.usd_per_hour) for o in book.history(runpod[1].offer)]
    assert history[-2:] == [("shipped", 3.99), ("refreshed", 4.1)]


def test_a_card_that_the_new_list_names_only_by_family_keeps_its_shipped_price(lists: Path) -> None:
    """Lambda's A100 without a form is a family; the shipped price of its A100 SXM stays, with its age."""
    refresh_prices(cache_dir=lists)
    book = price_book(cache_dir=lists)
    assert [j.offer.layer for j in book.offers_for("a100-sxm4-80gb", 8, providers=("lambda",))] == ["shipped"]


def test_a_second_refresh_keeps_the_first_as_history_where_prices_moved(
    lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    file = lists / "lists" / "aws.csv"
    os.utime(file, (1795000000, 1795000000))
    refresh_prices(["aws"], cache_dir=lists)
    write_lists(lists / "lists", {"aws": [item("aws", "p5.48xlarge", "H100", 80, 55.0, gpu_count=8)]})
    os.utime(file, (1795200000, 1795200000))
    refresh_prices(["aws"], cache_dir=lists)
    held = cached_offers(lists)
    assert held is not None
    on_demand = [o for o in held.offers if o.price_type == "on-demand" and o.gpu_count == 8]
    assert [(o.usd_per_hour, o.snapshot_date) for o in on_demand] == [(55.0, "2026-11-20"), (50.0, "2026-11-18")]
    book = price_book(cache_dir=lists)
    assert [j.usd_per_hour for j in book.offers_for("h100-sxm5-80gb", 8, providers=("aws",))] == [55.0]
    assert book.offers_for("h100-sxm5-80gb", 8, ("spot",), providers=("aws",)) == (), "gone from the newer list"


def test_history_keeps_only_rows_at_another_price() -> None:
    row = dict.fromkeys(
        ("tier", "offer_sku", "gpu_canonical_id", "gpu_count", "price_type", "region", "statistic"), ""
    ) | {"provider": "aws"}
    new = row | {"usd_per_hour": "2", "snapshot_date": "2026-11-20"}
    same, moved = (row | {"usd_per_hour": p, "snapshot_date": "2026-11-01"} for p in ("2", "3"))
    assert with_history([new], [same, moved, new]) == (new, moved)


def test_only_the_providers_asked_for(lists: Path) -> None:
    assert refresh_prices(["lambda"], cache_dir=lists).counts == {"lambda": 1}
    with pytest.raises(UnknownNameError, match="Unknown provider 'brev'"):
        refresh_prices(["brev"], cache_dir=lists)


def test_a_provider_without_an_answer_is_told_and_the_others_count(lists: Path) -> None:
    (lists / "lists" / "aws.csv").write_text("not,a,catalog\n1,2,3\n")
    done = refresh_prices(cache_dir=lists)
    assert set(done.counts) == {"lambda", "runpod"}
    assert done.failed == {"aws": "it listed nothing"}


def test_an_unreadable_cache_is_replaced_by_a_refresh(lists: Path) -> None:
    (lists / "prices.json").write_text("{")
    refresh_prices(["lambda"], cache_dir=lists)
    assert len(cached(lists)) == 1


def test_a_folder_without_lists_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    with pytest.raises(TunecastError, match="holds no list of a known provider"):
        refresh_prices(cache_dir=tmp_path)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a name server, whatever the test machine has."""

    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.delenv("GPUHUNT_CATALOG_DIR", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    return


@pytest.mark.usefixtures("no_network")
def test_offline_is_one_sentence_and_leaves_the_cache(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TunecastError) as refused:
        refresh_prices(cache_dir=tmp_path)
    assert str(refused.value).startswith("No price was refreshed: URLError: [Errno -2] Name or service not known")
    assert refused.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", ""), "gpuhunt's tracebacks are kept away"


@pytest.mark.usefixtures("no_network")
def test_the_time_limit_of_sockets_is_put_back(tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    with pytest.raises(TunecastError):
        refresh_prices(cache_dir=tmp_path, timeout_s=5.0)
    assert socket.getdefaulttimeout() == before


def test_a_provider_that_hangs_is_given_up() -> None:
    def hang() -> None:
        time.sleep(30)

    assert _attempt(hang, 0.01) == (None, "no answer within 0.01 s")


def test_without_gpuhunt_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(TunecastError, match=r"pip install 'tunecast\[prices\]'"):
        refresh_prices(cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("gpu", "memory", "expected"),
    [
        ("A100", 40, "a100-40gb"),
        ("H100NVL", 94, "h100-nvl-94gb"),
        ("H200", 141, "h200-sxm5-141gb"),
        ("B300", 270, "b300-sxm-288gb"),
        ("A6000", 48, "rtx-a6000-48gb"),
        ("RTX6000Ada", 48, "rtx-6000-ada-48gb"),
        ("RTX2000Ada", 16, "rtx-2000-ada-16gb"),
        ("RTXPRO6000", 96, "rtx-pro-6000-blackwell-96gb"),
        ("V100", 16, "v100-16gb"),
        ("RTX3080", 10, "rtx-3080-10gb"),
        ("T4", 16, "t4-16gb"),
        ("MI300X", 192, "mi300x-192gb"),
        ("MI325X", 288, "mi325x-256gb"),
        ("H100", 94, "h100-nvl-94gb"),
        ("A100", 20, ""),
        ("P100", 16, ""),
    ],
)
def test_gpuhunts_short_names(gpu: str, memory: float, expected: str) -> None:
    from tunecast.catalogs.gpuhunt_rows import gpu_of

    assert gpu_of("somewhere", item("x", "machine-1", gpu, memory, 1.0)) == expected


def test_asks_of_a_marketplace_become_the_lowest_and_the_median() -> None:
    from tunecast.catalogs.gpuhunt_rows import rows_from_listings

    asks = [item("vastai", str(i), "RTX4090", 24, price) for i, price in enumerate((0.30, 0.50, 0.40))]
    bid = item("vastai", "9", "RTX4090", 24, 0.1, spot=True)
    mapped = rows_from_listings("vastai", [*asks, bid], "2026-11-20", "gpuhunt")
    assert [(r["provider"], r["price_type"], r["statistic"], float(r["usd_per_hour"])) for r in mapped.rows] == [
        ("vast", "marketplace", "lowest-ask", 0.3),
        ("vast", "marketplace", "median", 0.4),
    ]
    assert sum(mapped.left_out.values()) == 1
