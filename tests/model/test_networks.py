"""What joins machines where nobody says it: a figure of the catalog with an interval, and only offers that have it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tunecast import estimate, recommend
from tunecast.catalogs.prices import offers_for
from tunecast.catalogs.rental_facts import node_network_bytes_per_s
from tunecast.catalogs.tables import read_rows
from tunecast.model.cost import as_forecast
from tunecast.model.forecast import Forecast
from tunecast.model.parallel_network import catalog_network
from tunecast.sweep import sweep

CARD, MODEL = "a100-sxm4-80gb", "meta-llama/Llama-2-7b-hf"
GBIT = 1e9 / 8


def ask(**options: object) -> Forecast:
    asked = {"method": "full", "sharding": "fsdp", "num_gpus": 64, "max_length": 2048, "gpu": CARD, **options}
    return estimate(MODEL, **asked)[0]


def test_the_fastest_network_of_a_card_and_the_next_slower_one() -> None:
    """Azure, AWS and Google state 1,600, 400 and 100 Gbit/s for their machines of 8 A100."""
    known = catalog_network(CARD)
    assert known is not None
    assert (known.bytes_per_s / GBIT, known.slower_bytes_per_s / GBIT) == pytest.approx((1600, 400))
    assert known.where.startswith("azure")


def test_an_unstated_network_may_be_the_slower_one_and_a_stated_one_may_not() -> None:
    unstated, stated, slower = ask(), ask(internode_gbps=1600), ask(internode_gbps=400)
    assert unstated.step_time_s.value == pytest.approx(stated.step_time_s.value)
    assert slower.step_time_s.value > stated.step_time_s.value
    assert unstated.step_time_s.high > stated.step_time_s.high
    assert unstated.step_time_s.low == pytest.approx(stated.step_time_s.low, rel=0.02)
    assert any("perhaps 400" in note and "--internode-gbps" in note for note in unstated.notes)
    assert not any("perhaps" in note for note in stated.notes)


def test_a_card_whose_instances_have_one_network_is_given_no_slower_one() -> None:
    """A slower_bytes_per_s that is no slower, wherever the catalog knows one figure alone."""
    by_instance = {(row["provider"], row["instance"]): row for row in read_rows("networks.csv")}
    speeds = {
        float(by_instance[provider, sku]["network_gbit_per_s"]) for provider, sku in by_instance if "p6-b300" in sku
    }
    known = catalog_network("b300-sxm-288gb")
    assert known is not None
    assert {known.bytes_per_s / GBIT} == speeds == {known.slower_bytes_per_s / GBIT}


def test_a_part_of_a_machine_has_its_part_of_the_network() -> None:
    """AWS's machine of 8 H100 has 400 Gbit/s for each of them; of machines with more GPUs nothing is known."""
    card = "h100-sxm5-80gb"
    speeds = {gpus: found.bytes_per_s / GBIT for gpus in (1, 2, 4, 8) if (found := catalog_network(card, gpus))}
    assert speeds == pytest.approx({1: 400, 2: 800, 4: 1600, 8: 3200})
    assert catalog_network(card, 16) is None
    found = estimate(MODEL, method="lora", gpu=card, num_gpus=8, gpus_per_node=2)[0]
    assert any("joined at 800 Gbit/s each (2/8 of " in note for note in found.notes)


@pytest.mark.parametrize("gbps", [100, 400, 1600])
def test_offers_of_several_machines_are_those_joined_as_fast(gbps: float) -> None:
    jobs = offers_for(CARD, 16)
    kept = as_forecast(jobs, CARD, {"internode_gbps": gbps})
    speeds = {node_network_bytes_per_s(job.offer.provider, job.offer.offer_sku) for job in kept if job.instances > 1}
    assert min(speed for speed in speeds if speed is not None) == pytest.approx(gbps * GBIT)
    assert None in speeds, "an offer whose network nobody states is kept"
    one = [job for job in offers_for(CARD, 8) if job.instances == 1]
    assert {job.offer.offer_sku for job in as_forecast(one, CARD, {"internode_gbps": 1e7})} == {
        job.offer.offer_sku for job in one
    }


def test_a_part_of_a_machine_is_compared_with_its_part_of_the_network() -> None:
    """Pairs of Azure's 1,600 Gbit/s for eight have 400; AWS's 400 for eight leave 100 for a pair."""
    kept = as_forecast(offers_for(CARD, 16), CARD, {"gpus_per_node": 2})
    stated = {job.offer.provider for job in kept if node_network_bytes_per_s(job.offer.provider, job.offer.offer_sku)}
    assert stated == {"azure"}


def test_an_assumed_latency_is_in_the_interval() -> None:
    """LoRA over 1,024 GPUs waits for hops: at a hundredth of its latency's time the step is much shorter, and the
    interval of an assumed latency reaches far."""
    (far,) = estimate("meta-llama/Llama-3.1-8B", method="lora", sharding="fsdp", num_gpus=1024, gpu="h100-sxm5-80gb")
    large = {"per_device_train_batch_size": 8}  # for which no host waits
    (near,) = estimate(
        "meta-llama/Llama-3.1-8B", method="lora", sharding="fsdp", num_gpus=8, gpu="h100-sxm5-80gb", **large
    )
    waits = far.time_parts_s["communication"] / far.step_time_s.value
    assert waits > 0.5
    assert far.step_time_s.high / far.step_time_s.value > 1.8
    assert near.step_time_s.high / near.step_time_s.value < 1.6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_gpus": 16}, "the offer's own network is not stated"),
        ({"num_gpus": 16, "internode_gbps": 400}, None),
        ({"num_gpus": 8}, None),
        (
            {"num_gpus": 16, "gpus_per_node": 4, "internode_gbps": 400},
            "timed as 4 machines of 4 GPUs, though the offer is 2",
        ),
    ],
)
def test_an_offer_that_is_not_what_is_timed_says_so(options: dict[str, int], told: str | None) -> None:
    (found,) = estimate(MODEL, method="full", sharding="fsdp", gpu=CARD, **options)
    assert found.offer is not None
    words = ("own network is not stated", "though the offer is")
    said = [note for note in found.notes if any(word in note for word in words)]
    assert (said == []) if told is None else (len(said) == 1 and told in said[0])
    separate = any("separate machines" in note for note in found.notes)
    assert separate is (options["num_gpus"] > 8 and "gpus_per_node" not in options)


@pytest.mark.parametrize("sharding", ["fsdp", "hsdp", "zero3", "ddp"])
@pytest.mark.parametrize("gbps", [25, 100, 400])
def test_a_slow_network_is_in_part_hidden_and_never_less_than_its_line_carries(sharding: str, gbps: int) -> None:
    """Between what the job takes over a network of no time and that with all of its communication on top; 2 bytes of 8
    billion parameters go out of every machine once at the least."""
    asked = {"method": "full", "num_gpus": 64, "max_length": 8192, "per_device_train_batch_size": 2}
    slow, free = (
        estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", sharding=sharding, internode_gbps=each, **asked)[0]
        for each in (gbps, 1e6)
    )
    line_s = 2 * 8.03e9 * 7 / 8 / (gbps * 1e9 / 8)
    assert slow.step_time_s.value > max(line_s, free.step_time_s.value)
    assert slow.scaling is not None
    work_s = slow.step_time_s.value - slow.scaling.exposed_communication_s
    assert work_s == pytest.approx(free.step_time_s.value - free.scaling.exposed_communication_s, rel=1e-3)


def test_recommend_rents_only_machines_as_fast_as_it_reckons_with() -> None:
    asked = {
        "method": "full", "sharding": "fsdp", "num_gpus": 16, "max_gpus": 16, "global_batch": 16, "max_length": 2048,
        "tokens": "10M", "gpu": CARD, "provider": ["gcp", "azure"],
    }  # fmt: skip
    found = {gbps: recommend(MODEL, **asked, internode_gbps=gbps) for gbps in (100, 1600)}
    rented = {
        gbps: {picked.candidate.price.offer["provider"] for picked in answer.front if picked.candidate.num_gpus == 16}
        for gbps, answer in found.items()
    }
    assert rented[1600] == {"azure"}
    assert rented[100] <= {"gcp", "azure"}


def test_a_rented_network_that_is_known_has_no_interval_of_an_unstated_one() -> None:
    """Azure's page states its network: the plan's forecast is that of a user who types it, and says whose it is."""
    asked = {
        "method": "full", "sharding": "fsdp", "num_gpus": 16, "max_gpus": 16, "global_batch": 16, "max_length": 2048,
        "tokens": "10M", "gpu": CARD, "provider": ["azure"],
    }  # fmt: skip
    silent, typed = (
        next(picked for picked in recommend(MODEL, **asked, **more).front if picked.candidate.num_gpus == 16)
        for more in ({}, {"internode_gbps": 1600})
    )
    assert silent.candidate.price.offer["network_gbps"] == 1600
    assert silent.forecast.step_time_s == typed.forecast.step_time_s
    assert any("1,600 Gbit/s each (azure " in note for note in silent.forecast.notes)
    assert not any("perhaps" in note for note in silent.forecast.notes)


def on_two_machines(gbps: float, **options: object) -> Forecast:
    asked = {"sharding": "ddp", "num_gpus": 16, "max_length": 4096, "gpu": "h100-sxm5-80gb", **options}
    return estimate("meta-llama/Llama-3.1-8B", method="full", internode_gbps=gbps, **asked)[0]


def test_no_step_is_faster_than_the_line_that_was_stated() -> None:
    """By hand: of two machines each sends half of the 16.06 GB of bf16 gradients and then their sums, whatever the
    algorithm, and no network carries more than what it is said to."""
    sent_bytes = 2 * 0.5 * 8_030_261_248 * 2
    for gbps in (10, 25, 50):
        assert on_two_machines(gbps).step_time_s.low >= sent_bytes / (gbps * GBIT)


def test_a_slow_network_makes_no_step_faster_than_one_without_waiting() -> None:
    """What is waited for is never below nothing, however little is known of it."""
    free = on_two_machines(1e6).step_time_s.low
    for gbps in (100, 400, 600, 800, 1000, 3200):
        assert on_two_machines(gbps).step_time_s.low >= 0.99 * free
        assert on_two_machines(gbps, num_gpus=256).step_time_s.low >= 0.99 * free


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-grad-op", "hsdp", "zero3"])
def test_no_end_of_an_interval_is_faster_over_a_slower_network(sharding: str) -> None:
    """Nor do links carry more than is stated, nor hide wholly beside their work."""
    asked = {"method": "full", "num_gpus": 64, "max_length": 4096, "gradient_accumulation_steps": 8}
    steps = [
        estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", sharding=sharding, internode_gbps=g, **asked)[0]
        for g in (10, 50, 200, 400, 800, 1600, 3200, 10000)
    ]
    for slower, faster in pairwise(found.step_time_s for found in steps):
        assert slower.low > 0.99 * faster.low
        assert slower.value >= faster.value
        assert slower.high > 0.99 * faster.high


def test_a_network_is_told_to_change_nothing_only_where_no_plan_has_one() -> None:
    asked = {"method": "lora", "tokens": "100M", "gpu": CARD, "max_gpus": 16, "global_batch": 16}
    found = recommend(MODEL, **asked, internode_gbps=400)
    notes = [note for picked in found.front for note in picked.forecast.notes]
    assert max(picked.candidate.num_gpus for picked in found.front) > 8
    assert not any("--internode-gbps changes nothing" in note for note in notes)


def test_as_many_gpus_as_are_asked_for_are_tried() -> None:
    """--num-gpus says how many samples a step has, and that so many GPUs may be rented."""
    asked = {"method": "lora", "tokens": "10M", "gpu": CARD, "num_gpus": 16}
    assert max(picked.candidate.num_gpus for picked in recommend(MODEL, **asked).front) == 16
    assert max(picked.candidate.num_gpus for picked in recommend(MODEL, **asked, max_gpus=4).front) <= 4


def test_zero3_is_taken_where_accumulating_fsdp_holds_whole_gradients() -> None:
    """70B over 64 GPUs: 131 GiB of gradients between micro-batches under FSDP, a 64th of them under ZeRO-3."""
    asked = {"method": "full", "max_length": 4096, "num_gpus": 64, "gpu": CARD}
    once, often = (
        estimate("meta-llama/Llama-3.1-70B", **asked, gradient_accumulation_steps=steps)[0] for steps in (1, 4)
    )
    assert (once.run.sharding, often.run.sharding) == ("fsdp", "zero3")
    assert once.fits is often.fits is True
    assert "--sharding not given: zero3 is the least that fits" in often.notes
    assert often.run_origins["sharding"] == "assumed"


def test_the_tornado_has_the_doubt_of_links_and_none_beyond_their_rate() -> None:
    """What sources differ by in equal collectives is the largest doubt of a job that waits for them."""
    asked = {"method": "full", "max_length": 4096, "num_gpus": 64, "sharding": "fsdp", "internode_gbps": 10}
    found = sweep("meta-llama/Llama-3.1-8B", gpu=CARD, metric="step", tokens="100M", **asked)
    (links,) = [bar for bar in found.bars if bar.name == "time on links"]
    assert links.high == max(bar.high for bar in found.bars if bar.high is not None)
    assert links.low > 0.75 * found.base.step_time_s.value
