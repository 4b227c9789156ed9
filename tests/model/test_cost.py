"""Money follows from hours and dated prices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tunecast import estimate
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.price_book import shipped_book
from tunecast.catalogs.prices import offers_for
from tunecast.model.cost import candidate_prices, cost_per_million_tokens_usd, cost_usd, job_price, user_price
from tunecast.model.links import port_bytes_per_s
from tunecast.model.value import Value


def test_the_users_price_counts_every_gpu() -> None:
    price = user_price(2.0, 16_000)
    assert price.usd_per_h == 32_000
    # Llama 3.1 405B, about 70 days on 16,000 H100 at 2 USD: about 52 million (published arithmetic).
    days = Value(value=68.0, low=66.0, high=70.0)
    assert cost_usd(days.scaled(24.0), price).value == pytest.approx(52.2e6, rel=0.01)


def test_cost_per_million_tokens_is_hourly_price_over_hourly_tokens() -> None:
    rate = Value(value=1000.0, low=500.0, high=2000.0)
    cost = cost_per_million_tokens_usd(rate, user_price(3.6, 1))
    assert cost.value == pytest.approx(1.0)
    assert (cost.low, cost.high) == (pytest.approx(0.5), pytest.approx(2.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_must_be_positive(bad: float) -> None:
    with pytest.raises(InputError, match="--usd-per-gpu-hour"):
        user_price(bad, 1)


def test_the_cheapest_offer_is_rankable_dated_and_on_demand() -> None:
    price = candidate_prices("a100-sxm4-80gb", 1)[0]
    assert price.offer["price_type"] == "on-demand"
    assert price.offer["snapshot_date"]
    assert price.offer["source"]
    assert price.usd_per_h == min(job.usd_per_hour for job in offers_for("a100-sxm4-80gb", 1))


def test_a_gpu_that_nobody_offers_has_no_price() -> None:
    assert not candidate_prices("quadro-rtx-8000-48gb", 1)


def test_several_gpus_come_in_one_machine_where_any_offer_has_it() -> None:
    """One-GPU listings times 8 are 8 machines without the fast link that the forecast counts on."""
    price = candidate_prices("h100-sxm5-80gb", 8)[0]
    assert price.offer["instances"] == 1


def test_a_job_of_several_machines_is_priced_on_as_few_as_are_forecast() -> None:
    """Sixteen GPUs are timed as two machines of eight: sixteen machines of one, though cheaper, are another job."""
    found = candidate_prices("h100-sxm5-80gb", 16)
    assert found
    assert {price.offer["instances"] for price in found} == {2}
    assert all(price.offer["gpus_paid"] == 16 for price in found)
    (sold,) = [job for job in shipped_book().offers_for("gb200-186gb", 8) if job.offer.provider == "coreweave"]
    assert sold.instances == 2  # only in trays of four, which one rack's NVLink joins
    (price,) = [price for price in candidate_prices("gb200-186gb", 8) if price.offer["provider"] == "coreweave"]
    assert price.offer["instances"] == 2
    assert any("NVLink rack" in note for note in price.offer["notes"])


def test_smaller_machines_than_forecast_have_no_price_but_words() -> None:
    """Azure rents A10 by two: eight of them in one machine are nobody's offer, and four machines another forecast."""
    model, ask = "meta-llama/Llama-3.1-8B", {"method": "lora", "gpu": "a10-24gb", "num_gpus": 8}
    whole = estimate(model, **ask)[0]
    assert whole.offer is None
    assert whole.cost_per_million_tokens_usd is None
    (why,) = [note for note in whole.notes if note.startswith("no price")]
    assert "has 2: --gpus-per-node 2 --internode-gbps N" in why
    split = estimate(model, **ask, gpus_per_node=2, internode_gbps=25)[0]
    assert split.offer is not None
    assert split.offer["instances"] == 4
    assert not any(note.startswith("no price") for note in split.notes)


@pytest.mark.parametrize(("num_gpus", "options"), [(1, {}), (4, {}), (16, {"internode_gbps": 100})])
def test_a_user_s_own_price_per_gpu_is_of_any_number(tmp_path: Path, num_gpus: int, options: dict[str, Any]) -> None:
    path = tmp_path / "p.csv"
    path.write_text("gpu_canonical_id,usd_per_gpu_hour\nl40s-48gb,0.40\n")
    asked = {"method": "lora", "gpu": "l40s-48gb", "tokens": 1_000_000, "num_gpus": num_gpus, "prices": [path]}
    (found,) = estimate("meta-llama/Llama-3.1-8B", **asked, **options)
    assert found.offer is not None
    assert (found.offer["provider"], found.offer["usd_per_hour"]) == ("user", pytest.approx(0.40 * num_gpus))


def test_a_user_s_own_machines_are_as_large_as_they_say(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("gpu_canonical_id,gpu_count,usd_per_gpu_hour\nl40s-48gb,2,0.40\n")
    (found,) = estimate("meta-llama/Llama-3.1-8B", method="lora", gpu="l40s-48gb", num_gpus=4, prices=[path])
    assert found.offer is None
    assert any("the largest on offer has 2: --gpus-per-node 2" in note for note in found.notes)


@pytest.mark.parametrize("num_gpus", [8, 72, 76, 144])
def test_trays_of_an_nvlink_rack_are_one_machine_for_each_rack(num_gpus: int) -> None:
    options = {"gpus_per_node": 72, "internode_gbps": 400}
    assert candidate_prices("gb200-186gb", num_gpus, options=options)


@pytest.mark.parametrize(("per_node", "told"), [(8, True), (4, False)])
def test_trays_are_told_as_of_a_rack_where_they_are_timed_as_one_machine(per_node: int, told: bool) -> None:
    options = {"gpus_per_node": per_node, "internode_gbps": 400}
    (price,) = [p for p in candidate_prices("gb200-186gb", 8, options=options) if p.offer["provider"] == "coreweave"]
    assert any("NVLink rack" in note for note in price.offer["notes"]) is told


def test_a_simulated_card_has_the_ports_of_its_card() -> None:
    assert (
        port_bytes_per_s("mock:h100-sxm5-80gb#3") == port_bytes_per_s("h100-sxm5-80gb") == pytest.approx(63e9, rel=0.01)
    )
    assert port_bytes_per_s("unheard-of") == math.inf


def test_a_listing_that_scales_brings_its_host_memory_for_every_gpu() -> None:
    """Runpod lists one H100 with 125 GiB; a pod of eight has eight times that, a machine of eight its own."""
    found = {
        job.offer.provider: job_price(job) for job in reversed(offers_for("h100-sxm5-80gb", 8)) if job.offer.ram_gib
    }
    alone = {job.offer.provider: job.offer for job in reversed(offers_for("h100-sxm5-80gb", 8)) if job.offer.ram_gib}
    assert (alone["runpod"].gpu_count, alone["lambda"].gpu_count) == (1, 8)
    assert found["runpod"].offer["ram_gib"] == pytest.approx(8 * alone["runpod"].ram_gib)
    assert found["lambda"].offer["ram_gib"] == pytest.approx(alone["lambda"].ram_gib)


def test_no_machine_has_more_gpus_than_are_sold_in_one() -> None:
    """Sixteen GPUs of one machine are no two machines of eight."""
    assert not candidate_prices("h100-sxm5-80gb", 16, options={"gpus_per_node": 16})
    assert {price.offer["instances"] for price in candidate_prices("h100-sxm5-80gb", 16)} == {2}
