"""``tunecast catalog prices``: the table at several widths, the history and its picture, the refresh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tunecast.catalogs.prices import current_offers, load_prices
from tunecast.cli.program import program

FIXED_DAY = "1795132800"
"""2026-11-20, as seconds."""


def run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(program, ["catalog", *arguments], env={"COLUMNS": str(columns)})


def data(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def hermetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNECAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", FIXED_DAY)


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_the_table_fits_every_width_and_cuts_nothing(columns: int) -> None:
    lines = run("prices", "--gpu", "h100-sxm5-80gb", columns=columns).stdout.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert not any("…" in line for line in lines)
    words = " ".join(" ".join(line.split()) for line in lines)
    for name in ("Standard_ND96isr_H100_v5", "gpu_8x_h100_sxm5", "vbm-112c-2048gb-8-h100-gpu"):
        assert name in words, "long names wrap whole"


def test_one_gpu_shows_what_is_not_ranked_and_why() -> None:
    text = " ".join(run("prices", "--gpu", "h100 sxm", columns=200).stdout.split())
    for words in ("paperspace_H100 via Shadeform newyork-usa-1;", "undated: the month is", "not ranked: fixture: an"):
        assert words in text
    assert "rtx-4090" not in text


def test_the_whole_table_ranks_no_filler_and_names_the_cards_without_a_price() -> None:
    text = run("prices", columns=200).stdout
    ranked = sum(offer.rankable for offer in current_offers())
    assert f"{ranked} current offers of {len(load_prices())} rows: shipped snapshot" in text
    assert "not ranked:" not in text
    assert "No price that may be ranked: v100-pcie-32gb" in text
    assert "mi350x-288gb" in text


def test_a_card_without_a_price_says_so() -> None:
    assert "No price that may be ranked: mi350x-288gb" in run("prices", "--gpu", "mi350x").stdout


def test_json_rows_keep_the_facts_columns_and_can_be_one_cards() -> None:
    rows = data("prices")
    assert len(rows) == len(load_prices())
    a10g = data("prices", "--gpu", "a10g")
    assert {row["gpu_canonical_id"] for row in a10g} == {"a10g-24gb"}
    assert a10g == [row for row in rows if row["gpu_canonical_id"] == "a10g-24gb"]


def test_own_prices_stand_among_the_others(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("provider,gpu_canonical_id,usd_per_gpu_hour\nmine,mi350x-288gb,3\n")
    text = run("prices", "--gpu", "mi350x", "--prices", str(tmp_path / "own.csv")).stdout
    assert "mine (yours)" in text
    assert "No price" not in text


def test_the_trend_is_the_dated_history(tmp_path: Path) -> None:
    """RunPod's H100 SXM: 3.49 on 29 September and 7 October, 3.99 on 10 October and 9 November: up by 14%."""
    trend = data("prices", "--gpu", "h100-sxm5-80gb", "--trend")
    assert trend["schema"] == "tunecast.trend/1"
    (runpod,) = (o for o in trend["offers"] if (o["provider"], o["price_type"]) == ("runpod", "on-demand"))
    assert [(p["snapshot_date"], p["usd_per_gpu_hour"]) for p in runpod["points"]] == [
        ("2026-09-29", 3.49),
        ("2026-10-07", 3.49),
        ("2026-10-10", 3.99),
        ("2026-11-09", 3.99),
    ]
    assert runpod["change"] == pytest.approx(3.99 / 3.49 - 1)
    text = run("prices", "--gpu", "h100-sxm5-80gb", "--trend").stdout
    assert "+14%" in text
    assert "-40%" in text, "the median on Vast fell from 4.00 to 2.40"


def test_a_trend_never_holds_a_price_that_may_not_be_ranked() -> None:
    for gpu in ("rtx-3090-24gb", "h100-sxm5-80gb", "a100-sxm4-80gb"):
        for offer in data("prices", "--gpu", gpu, "--trend")["offers"]:
            assert all(len(point["snapshot_date"]) == len("2026-01-01") for point in offer["points"])
            assert (offer["provider"], offer["points"][-1]["usd_per_gpu_hour"]) != ("runpod", 0.5)


def test_the_trend_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trend.svg"
    done = run("prices", "--gpu", "h100-sxm5-80gb", "--trend", "--plot", str(path))
    assert done.exit_code == 0, done.output
    texts = [node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert "runpod, on-demand" in texts
    assert "USD per GPU and hour" in texts
    again = tmp_path / "again.svg"
    run("prices", "--gpu", "h100-sxm5-80gb", "--trend", "--plot", str(again))
    assert again.read_bytes() == path.read_bytes()
    png = tmp_path / "trend.png"
    assert run("prices", "--gpu", "h100-sxm5-80gb", "--trend", "--plot", str(png)).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "trend of gpus": (("gpus", "--trend"), "--trend is about prices"),
    "trend without a card": (("prices", "--trend"), "--trend needs a card"),
    "plot without a trend": (("prices", "--gpu", "a10g", "--plot", "x.svg"), "--plot draws the history"),
    "plot as pdf": (("prices", "--gpu", "h100 sxm", "--trend", "--plot", "x.pdf"), "neither .svg nor .png"),
    "plot without history": (("prices", "--gpu", "mi350x", "--trend", "--plot", "x.svg"), "no trend to draw"),
    "plot into nowhere": (
        ("prices", "--gpu", "h100 sxm", "--trend", "--plot", "/nowhere/x.svg"),
        "cannot be written",
    ),
    "unknown card": (("prices", "--gpu", "b9000"), "Unknown GPU 'b9000'"),
    "ambiguous card": (("prices", "--gpu", "h100"), "ambiguous"),
    "provider without refresh": (("prices", "--provider", "aws"), "type it with --refresh"),
    "refresh with a card": (("prices", "--refresh", "--gpu", "a10g"), "run `tunecast catalog prices --gpu`"),
    "refresh of nobody": (("prices", "--refresh", "--provider", "brev"), "Unknown provider 'brev'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_sentence(name: str) -> None:
    arguments, sentence = REFUSED[name]
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("prices", "--gpu", "h100 sxm", "--trend", "--plot", str(tmp_path / "x.svg"))
    assert done.exit_code == 1
    assert "pip install 'tunecast[report]'" in " ".join(done.stderr.split())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_refresh_from_a_local_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gpuhunt")
    header = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"
    (tmp_path / "aws.csv").write_text(f"{header}\ng5.xlarge,us-east-1,0.9,4,16.0,1,A10G,24.0,False,,nvidia,\n")
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    done = data("prices", "--refresh")
    assert (done["schema"], done["prices"], done["failed"]) == ("tunecast.refresh/1", {"aws": 1}, {})
    assert Path(done["path"]) == tmp_path / "cache" / "prices.json"
    text = run("prices", "--gpu", "a10g").stdout
    assert "$0.90" in text
    assert "gpuhunt, refreshed 2026-11-20 (aws), then shipped snapshot" in " ".join(text.split())
    assert "aws" in run("prices", "--refresh").stdout


def test_an_estimate_uses_the_refreshed_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tunecast.catalogs.price_cache import CachedPrices, write_cache
    from tunecast.catalogs.tables import read_rows

    (old,) = (row for row in read_rows("prices.csv") if row["offer_sku"] == "g5.xlarge")
    row = old | {"usd_per_hour": "0.8", "usd_per_gpu_hour": "0.8", "snapshot_date": "2026-11-20"}
    write_cache(CachedPrices(fetched_on="2026-11-20", source="gpuhunt", rows=(row,)), tmp_path / "cache")
    done = CliRunner().invoke(program, ["estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "a10g", "--json"])
    assert json.loads(done.stdout)[0]["offer"]["usd_per_hour"] == 0.8
