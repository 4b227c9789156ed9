"""A user's own prices in a forecast, from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.cli.program import program

MODEL = "Qwen/Qwen2.5-0.5B"


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    """Dearer than the market, so that it can only be taken because it is the user's."""
    path = tmp_path / "contract.csv"
    path.write_text(
        "provider,gpu_canonical_id,gpu_count,price_type,usd_per_gpu_hour,term_months\n"
        "mine,a100-sxm4-80gb,1,reserved,9.5,12\n"
    )
    return path


def test_the_users_price_is_the_one_that_counts(contract: Path) -> None:
    (mine,) = tunecast.estimate(MODEL, gpu="a100-sxm4-80gb", tokens="1M", prices=[contract])
    (market,) = tunecast.estimate(MODEL, gpu="a100-sxm4-80gb", tokens="1M")
    assert mine.offer is not None
    assert market.offer is not None
    assert (mine.offer["provider"], mine.offer["usd_per_hour"], mine.offer["source"]) == ("mine", 9.5, "contract.csv")
    assert mine.cost_per_million_tokens_usd is not None
    assert market.cost_per_million_tokens_usd is not None
    ratio = mine.cost_per_million_tokens_usd.value / market.cost_per_million_tokens_usd.value
    assert ratio == pytest.approx(9.5 / market.offer["usd_per_hour"])
    assert any("reserved for 12 months: the whole term is owed" in note for note in mine.notes)
    assert market.offer["provider"] != "mine"


def test_gpus_that_the_file_leaves_out_keep_the_catalogs_price(contract: Path) -> None:
    (with_file,) = tunecast.estimate(MODEL, gpu="l40s", prices=[contract])
    (without,) = tunecast.estimate(MODEL, gpu="l40s")
    assert with_file.offer == without.offer
    assert with_file.offer is not None


def test_on_the_command_line(contract: Path) -> None:
    arguments = ["estimate", MODEL, "--gpu", "a100-sxm4-80gb", "--prices", str(contract), "--json"]
    done = CliRunner().invoke(program, arguments)
    assert json.loads(done.stdout)[0]["offer"]["usd_per_gpu_hour"] == 9.5


def test_old_prices_tell_their_age_and_fresh_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An L40S was last seen on 2026-10-10: 41 days before 2026-11-20, 5 days before 2026-10-15."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795132800")
    (old,) = tunecast.estimate(MODEL, gpu="l40s")
    assert "the price is 41 days old (seen 2026-10-10)" in old.notes
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1792022400")
    (fresh,) = tunecast.estimate(MODEL, gpu="l40s")
    assert not any("days old" in note for note in fresh.notes)


def test_a_table_tells_the_ages_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2026-11-20 the L40S was seen 41 days ago, the T4 of AWS 123 days ago, and MI350X has no price."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795132800")
    arguments = ["estimate", MODEL, "--gpu", "l40s", "--gpu", "t4", "--gpu", "mi350x"]
    text = " ".join(CliRunner().invoke(program, arguments).stdout.split())
    assert "- 2 of 2 prices are 41 to 123 days old: tunecast catalog prices --refresh" in text
    assert text.count("days old") == 1


def test_a_gpu_without_a_price_has_none() -> None:
    (forecast,) = tunecast.estimate(MODEL, gpu="mi350x-288gb", tokens="1M")
    assert (forecast.offer, forecast.cost_usd, forecast.cost_per_million_tokens_usd) == (None, None, None)


def test_what_makes_a_spot_price_doubtful_is_told() -> None:
    (found,) = tunecast.estimate("Qwen/Qwen2.5-0.5B", gpu="h100-sxm5-80gb", tokens="10M", spot=True)
    assert found.offer is not None
    doubts = {note for note in found.offer["notes"] if "on-demand price" in note}
    assert doubts
    assert doubts <= {*found.notes}
