"""Which prices may compete, which row is current, and what a whole job pays."""

from __future__ import annotations

from datetime import date

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.prices import (
    PRICE_TYPES,
    current_offers,
    gpu_families,
    load_prices,
    offers_for,
    parse_offers,
    unranked_offers_for,
)
from tunecast.catalogs.tables import Row

AWS_V100: Row = {
    "provider": "aws",
    "tier": "",
    "gpu_canonical_id": "v100-sxm2-16gb",
    "gpu_as_listed": "V100",
    "instance_or_sku": "p3.8xlarge",
    "offer_sku": "p3.8xlarge",
    "region": "us-east-1",
    "gpu_count": "4",
    "instance_gpus": "4",
    "vcpu": "32",
    "ram_gib": "244",
    "price_type": "on-demand",
    "statistic": "list",
    "usd_per_hour": "12.24",
    "usd_per_gpu_hour": "3.06",
    "snapshot_date": "2026-07-20",
    "source": "a price list",
    "note": "",
    "why_not_rankable": "",
}
ONE_GPU: dict[str, str] = {"gpu_count": "1", "instance_gpus": "1", "usd_per_hour": "2", "usd_per_gpu_hour": "2"}


def test_runpods_filler_price_never_ranks() -> None:
    for gpu_id in load_gpus():
        for job in offers_for(gpu_id, 1, PRICE_TYPES):
            assert (job.offer.provider, job.offer.usd_per_gpu_hour) != ("runpod", 0.5)
    fillers = [j.offer for j in unranked_offers_for("rtx-3090-24gb") if j.offer.provider == "runpod"]
    assert [(o.usd_per_hour, o.why_not_rankable[:6]) for o in fillers] == [(0.5, "filler")]


def test_undated_and_fixture_rows_and_families_never_rank() -> None:
    for gpu_id in [*load_gpus(), *gpu_families()]:
        for job in offers_for(gpu_id, 1, PRICE_TYPES):
            assert len(job.offer.snapshot_date) == len("2026-01-01")
            assert "fixture value" not in job.offer.note
            assert job.offer.gpu_id not in gpu_families()


def test_the_newest_row_of_an_offer_is_its_price() -> None:
    """RunPod's H100 SXM rose through autumn: 3.49 in September, 3.99 on 10 October and on 9 November."""
    runpod = [j.offer for j in offers_for("h100-sxm5-80gb") if j.offer.provider == "runpod"]
    assert [(o.usd_per_hour, o.snapshot_date) for o in runpod] == [(3.99, "2026-11-09")]
    history = sorted((o.snapshot_date, o.usd_per_hour) for o in load_prices() if o.key == runpod[0].key)
    assert history == [("2026-09-29", 3.49), ("2026-10-07", 3.49), ("2026-10-10", 3.99), ("2026-11-09", 3.99)]


def test_every_offer_is_current_once_and_with_its_latest_day() -> None:
    latest: dict[tuple[object, ...], str] = {}
    for offer in load_prices():
        latest[offer.key] = max(latest.get(offer.key, ""), offer.snapshot_date)
    assert {o.key: o.snapshot_date for o in current_offers()} == latest
    assert len(current_offers()) == len(latest)


def test_the_order_of_rows_does_not_decide_which_is_current() -> None:
    older, newer = AWS_V100, {**AWS_V100, "snapshot_date": "2026-08-01", "usd_per_hour": "8", "usd_per_gpu_hour": "2"}
    for rows in ([older, newer], [newer, older]):
        assert [o.usd_per_hour for o in current_offers(parse_offers(rows))] == [8.0]


def test_a_current_row_without_a_shape_takes_it_from_its_history() -> None:
    newer = {**AWS_V100, "snapshot_date": "2026-08-01", "vcpu": "", "ram_gib": ""}
    assert [(o.vcpu, o.ram_gib) for o in current_offers(parse_offers([AWS_V100, newer]))] == [(32, 244)]


@pytest.mark.parametrize(
    ("num_gpus", "instances", "paid", "usd_per_hour"),
    [(1, 1, 4, 12.24), (4, 1, 4, 12.24), (5, 2, 8, 24.48), (16, 4, 16, 48.96)],
)
def test_a_job_pays_whole_instances(num_gpus: int, instances: int, paid: int, usd_per_hour: float) -> None:
    (job,) = offers_for("v100-sxm2-16gb", num_gpus, offers=parse_offers([AWS_V100]))
    assert (job.instances, job.gpus_paid) == (instances, paid)
    assert job.usd_per_hour == pytest.approx(usd_per_hour)
    assert any("paid for" in note for note in job.notes) == (paid > num_gpus)


@pytest.mark.parametrize(("num_gpus", "instances"), [(1, 1), (3, 1), (8, 1), (9, 2)])
@pytest.mark.parametrize("provider", ["runpod", "vast"])
def test_runpod_and_vast_scale_to_eight_gpus_at_the_per_gpu_price(provider: str, num_gpus: int, instances: int) -> None:
    row = {**AWS_V100, **ONE_GPU, "provider": provider}
    (job,) = offers_for("v100-sxm2-16gb", num_gpus, offers=parse_offers([row]))
    assert (job.instances, job.gpus_paid, job.usd_per_hour) == (instances, num_gpus, 2.0 * num_gpus)
    assert any("one-GPU listing" in note for note in job.notes) == (num_gpus > 1)


def test_other_one_gpu_machines_do_not_scale() -> None:
    (job,) = offers_for("v100-sxm2-16gb", 4, offers=parse_offers([{**AWS_V100, **ONE_GPU, "provider": "lambda"}]))
    assert (job.instances, job.usd_per_hour) == (4, 8.0)
    assert any("4 separate machines" in note for note in job.notes)


def test_a_per_gpu_rate_of_a_machine_sold_whole_is_paid_whole() -> None:
    """Oracle's BM.GPU.H100.8 is listed at 10 USD per GPU: one GPU's worth of work still rents eight."""
    (oci,) = (j for j in offers_for("h100-sxm5-80gb", 1) if j.offer.provider == "oci")
    assert (oci.gpus_paid, oci.usd_per_hour) == (8, 80.0)


def test_the_whole_job_decides_the_order() -> None:
    """One machine of 8 at 3 per GPU beats two of 4 at 3.06, and for one GPU the smaller machine wins."""
    big = {**AWS_V100, "instance_or_sku": "p3.16xlarge", "offer_sku": "p3.16xlarge", "gpu_count": "8"}
    big |= {"instance_gpus": "8", "usd_per_hour": "24", "usd_per_gpu_hour": "3"}
    offers = parse_offers([AWS_V100, big])
    order = [[j.offer.sku for j in offers_for("v100-sxm2-16gb", n, offers=offers)] for n in (1, 8)]
    assert order == [["p3.8xlarge", "p3.16xlarge"], ["p3.16xlarge", "p3.8xlarge"]]


def test_only_the_purchase_kinds_that_were_asked_for() -> None:
    assert {j.offer.price_type for j in offers_for("a100-sxm4-80gb")} == {"on-demand"}
    assert {j.offer.price_type for j in offers_for("a100-sxm4-80gb", 1, ("spot", "community"))} == {"spot", "community"}
    with pytest.raises(InputError, match="Unknown purchase kind 'preemptible'"):
        offers_for("a100-sxm4-80gb", 1, ("preemptible",))
    with pytest.raises(InputError, match="at least 1 GPU"):
        offers_for("a100-sxm4-80gb", 0)


def test_lowest_asks_and_medians_of_a_marketplace_stay_apart() -> None:
    """Vast.ai, H100 SXM: lowest ask 2.14 on 4 October, median 2.40 on 19 October (4.00 nine days before)."""
    vast = {j.offer.statistic: j for j in offers_for("h100-sxm5-80gb", 1, ("marketplace",))}
    assert vast["lowest-ask"].offer.usd_per_hour == pytest.approx(2.1356)
    assert (vast["median"].offer.usd_per_hour, vast["median"].offer.snapshot_date) == (2.4024, "2026-10-19")
    assert "lowest ask, not typical" in vast["lowest-ask"].notes


def test_an_ambiguous_listing_is_shown_for_each_card_it_may_mean() -> None:
    for gpu_id in ("h100-pcie-80gb", "h100-sxm5-80gb"):
        shown = [j.offer for j in unranked_offers_for(gpu_id) if j.offer.gpu_id == "h100-80gb"]
        assert [(o.provider, o.rankable) for o in shown] == [("paperspace", False)]


def test_a10g_costs_what_the_known_case_says() -> None:
    """Case E of the project's documents: one A10G at about 1 USD per hour."""
    cheapest = offers_for("a10g-24gb")[0]
    assert (cheapest.offer.provider, cheapest.offer.sku) == ("aws", "g5.xlarge")
    assert cheapest.usd_per_hour == pytest.approx(1.0, rel=0.02)


def test_age_counts_from_the_snapshot() -> None:
    (offer,) = parse_offers([AWS_V100])
    assert offer.age_days(date(2026, 7, 20)) == 0
    assert offer.age_days(date(2026, 8, 20)) == 31
    (monthly,) = parse_offers([{**AWS_V100, "snapshot_date": "2026-07"}])
    assert monthly.age_days(date(2026, 7, 20)) == 19


def test_no_price_is_an_empty_answer() -> None:
    assert offers_for("mi350x-288gb", 8, PRICE_TYPES) == ()
