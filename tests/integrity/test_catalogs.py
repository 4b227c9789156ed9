"""The shipped data files pass every check, and each check catches the fault it is named after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tunecast.catalogs import integrity as checks
from tunecast.catalogs import integrity_gpus as gpu_checks
from tunecast.catalogs import integrity_rental as rental_checks
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.integrity import MODEL_CHECKS, PRICE_CHECKS, Check
from tunecast.catalogs.integrity_gpus import GPU_CHECKS
from tunecast.catalogs.integrity_rental import RENTAL_CHECKS
from tunecast.catalogs.tables import Row, names, read_rows


def gpu_ids() -> set[str]:
    return {row["canonical_id"] for row in read_rows("gpus.csv")}


def hf_ids() -> set[str]:
    return {row["hf_id"] for row in read_rows("models.csv")}


def family_ids() -> set[str]:
    return {row["family_id"] for row in read_rows("gpu_families.csv")}


def joins(rows: Sequence[Row]) -> list[str]:
    return checks.prices_join_gpus(rows, gpu_ids(), family_ids())


def families(rows: Sequence[Row]) -> list[str]:
    return checks.families_point_at_gpus(rows, gpu_ids())


def aliases(rows: Sequence[Row]) -> list[str]:
    return checks.aliases_point_at_models(rows, hf_ids())


SHIPPED: list[tuple[str, Check]] = [
    *(("gpus.csv", check) for check in GPU_CHECKS),
    *(("models.csv", check) for check in MODEL_CHECKS),
    *(("prices.csv", check) for check in (*PRICE_CHECKS, joins)),
    ("gpu_families.csv", families),
    ("model_aliases.csv", aliases),
    *((name, check) for name, checks_of in RENTAL_CHECKS.items() for check in checks_of),
]


@pytest.mark.parametrize(("name", "check"), SHIPPED)
def test_the_shipped_file_passes(name: str, check: Check) -> None:
    assert check(read_rows(name)) == []


def test_all_the_facts_are_there() -> None:
    """What was collected on 2026-11-20 at least; more rows need no change here."""
    counts = {"gpus.csv": 76, "models.csv": 121, "prices.csv": 519, "gpu_families.csv": 7}
    assert {name: n for name, n in counts.items() if len(read_rows(name)) < n} == {}


def broken(name: str, column: str, key: str, **cells: str) -> list[Row]:
    """The shipped rows with the cells of one row replaced."""
    rows = read_rows(name)
    (index,) = (i for i, row in enumerate(rows) if row[column] == key)
    rows[index] |= cells
    return rows


GPU_FAULTS: list[tuple[Check, str, dict[str, str]]] = [
    (gpu_checks.gpu_ids_unique, "a100-sxm4-80gb", {"canonical_id": "a100-sxm4-40gb"}),
    (gpu_checks.gpu_facts_present, "a100-sxm4-80gb", {"source": ""}),
    (gpu_checks.gpu_facts_present, "a100-sxm4-80gb", {"memory_bandwidth_gbs": "0"}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "a100-sxm4-80gb", {"fp16_fp32acc_tflops": "624"}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "h100-sxm5-80gb", {"fp16_fp32acc_tflops": "756"}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "h100-pcie-80gb", {"fp16_mismatch_reason": ""}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "h100-pcie-80gb", {"fp16_fp32acc_tflops": "1513"}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "gb200-186gb", {"fp16_fp32acc_tflops": "5000"}),
    (gpu_checks.gpu_fp16_agrees_with_clock, "gb300-288gb", {"fp16_mismatch_reason": ""}),
    (gpu_checks.gpu_peaks_dense, "a100-sxm4-80gb", {"flops_per_sm_clk_fp16": "4096"}),
    (gpu_checks.gpu_peaks_dense, "rtx-4090-24gb", {"flops_per_sm_clk_fp16": "1024"}),
    (gpu_checks.gpu_peaks_dense, "a100-sxm4-80gb", {"bf16_fp32acc_tflops": "624"}),
    (gpu_checks.gpu_peaks_dense, "h100-sxm5-80gb", {"fp8_tflops": "3958"}),
    (gpu_checks.gpu_memory_labelled, "a100-sxm4-80gb", {"usable_from": "a100-sxm4-79gb"}),
    (gpu_checks.gpu_memory_labelled, "a100-pcie-80gb", {"usable_gib": ""}),
    (gpu_checks.gpu_memory_labelled, "a100-pcie-80gb", {"usable_gib": "81"}),
    (gpu_checks.gpu_memory_labelled, "a100-pcie-80gb", {"usable_basis": "guessed"}),
    (gpu_checks.gpu_names_decidable, "a100-sxm4-80gb", {"nvml_names": "NVIDIA A100 80GB PCIe"}),
    (gpu_checks.gpu_fp32_agrees_with_clock, "a100-sxm4-80gb", {"fp32_tflops": "39"}),
    (gpu_checks.gpu_fp32_agrees_with_clock, "h100-sxm5-80gb", {"fp32_mismatch_reason": ""}),
    (gpu_checks.gpu_bf16_equals_fp16, "a100-sxm4-80gb", {"bf16_fp32acc_tflops": "156"}),
    (gpu_checks.gpu_estimates_follow_sibling, "a100-sxm4-80gb", {"usable_gib": "80.5"}),
    (gpu_checks.gpu_estimates_follow_sibling, "a100-sxm4-80gb", {"usable_gib": "70"}),
    (gpu_checks.gpu_estimates_follow_sibling, "a100-sxm4-80gb", {"usable_from": "a100-sxm4-40gb"}),
]


@pytest.mark.parametrize(("check", "gpu_id", "cells"), GPU_FAULTS)
def test_a_broken_gpu_row_is_caught_by_name(check: Check, gpu_id: str, cells: dict[str, str]) -> None:
    faults = check(broken("gpus.csv", "canonical_id", gpu_id, **cells))
    assert any(cells.get("canonical_id", gpu_id) in fault for fault in faults)


MODEL_FAULTS: list[tuple[Check, str, dict[str, str]]] = [
    (checks.model_ids_unique, "meta-llama/Llama-3.1-8B", {"hf_id": "META-LLAMA/Llama-3.1-70B"}),
    (checks.model_totals_verified, "meta-llama/Llama-3.1-8B", {"total_params": "8030261249"}),
    (checks.model_totals_verified, "mistralai/Mixtral-8x7B-v0.1", {"active_params": "46702792705"}),
    (checks.model_totals_verified, "meta-llama/Llama-3.1-8B", {"hub_or_public_count": "8030261249"}),
    (checks.model_shapes_consistent, "meta-llama/Llama-3.1-8B", {"intermediate_size": "14337"}),
    (checks.model_shapes_consistent, "Qwen/Qwen2.5-7B", {"qkv_bias": "no"}),
    (checks.model_shapes_consistent, "google/gemma-2-9b", {"num_kv_heads": "7"}),
    (checks.model_shapes_consistent, "google/gemma-2-9b", {"source": ""}),
]


@pytest.mark.parametrize(("check", "hf_id", "cells"), MODEL_FAULTS)
def test_a_broken_model_row_is_caught_by_name(check: Check, hf_id: str, cells: dict[str, str]) -> None:
    faults = check(broken("models.csv", "hf_id", hf_id, **cells))
    assert len(faults) == 1
    assert cells.get("hf_id", hf_id).lower() in faults[0].lower()


PRICE_FAULTS: list[tuple[Check, dict[str, str]]] = [
    (checks.prices_positive, {"usd_per_hour": "0"}),
    (checks.prices_positive, {"usd_per_gpu_hour": "-3.06"}),
    (checks.prices_per_gpu_agree, {"usd_per_gpu_hour": "12.24"}),
    (checks.prices_per_gpu_agree, {"instance_gpus": "6"}),
    (checks.prices_sourced, {"source": ""}),
    (checks.prices_sourced, {"price_type": "auction"}),
    (checks.prices_sourced, {"statistic": "median"}),
    (checks.prices_sourced, {"snapshot_date": "2026-07"}),
    (checks.prices_sourced, {"snapshot_date": "yesterday"}),
    (checks.prices_not_filler, {"provider": "runpod", "usd_per_gpu_hour": "0.5"}),
    (checks.prices_not_filler, {"note": "fixture value, may be old"}),
    (joins, {"gpu_canonical_id": "v100"}),
]


@pytest.mark.parametrize(("check", "cells"), PRICE_FAULTS)
def test_a_broken_price_row_is_caught_by_name(check: Check, cells: dict[str, str]) -> None:
    faults = check(broken("prices.csv", "instance_or_sku", "p3.8xlarge", **cells))
    assert len(faults) == 1
    assert "p3.8xlarge" in faults[0]


def test_an_exact_duplicate_price_is_caught_by_name() -> None:
    rows = read_rows("prices.csv")
    twin = next(row for row in rows if row["instance_or_sku"] == "g5.xlarge")
    (fault,) = checks.prices_unique([*rows, dict(twin)])
    assert "a10g-24gb g5.xlarge us-east-1" in fault


@pytest.mark.parametrize(
    "cells", [{"members": "a100-pcie-40gb"}, {"members": "a100-pcie-40gb;a100"}, {"family_id": "a100-pcie-40gb"}]
)
def test_a_broken_family_is_caught_by_name(cells: dict[str, str]) -> None:
    faults = families(broken("gpu_families.csv", "family_id", "a100-40gb", **cells))
    assert any(cells.get("family_id", "a100-40gb") in fault for fault in faults)


@pytest.mark.parametrize(
    "cells", [{"hf_id": "meta-llama/Llama-3.1-7B"}, {"alias": "openai-community/gpt2"}, {"alias": "QWEN/QwQ-32B"}]
)
def test_a_broken_alias_is_caught_by_name(cells: dict[str, str]) -> None:
    faults = aliases(broken("model_aliases.csv", "alias", "gpt2", **cells))
    assert len(faults) == 1
    assert cells.get("alias", "gpt2").lower() in faults[0].lower()


def test_a_family_declared_twice_is_caught_by_name() -> None:
    rows = read_rows("gpu_families.csv")
    assert families([*rows, dict(rows[0])]) == [f"family {rows[0]['family_id']!r} occurs 2 times"]


def test_two_cards_of_one_driver_name_may_differ_in_sms_or_memory_only() -> None:
    """The two RTX 3080 pass as they are, and fail once both have 68 SMs and 10 GB."""
    same = broken("gpus.csv", "canonical_id", "rtx-3080-12gb", sm_count="68")
    assert gpu_checks.gpu_names_decidable(same) == [], "memory still tells them apart"
    same = broken("gpus.csv", "canonical_id", "rtx-3080-12gb", sm_count="68", memory_marketing_gb="10")
    (fault,) = gpu_checks.gpu_names_decidable(same)
    assert "rtx-3080-12gb" in fault


RENTAL_FAULTS: list[tuple[str, Check, str, dict[str, str]]] = [
    ("interruptions.csv", rental_checks.rental_facts_sourced, "instance=p5.48xlarge", {"source": ""}),
    ("interruptions.csv", rental_checks.rental_facts_sourced, "instance=p5.48xlarge", {"source_date": "2025-06"}),
    ("interruptions.csv", rental_checks.interruptions_are_bands, "instance=p5.48xlarge", {"monthly_low": "20"}),
    ("interruptions.csv", rental_checks.interruptions_are_bands, "instance=p5.48xlarge", {"monthly_high": "0.05"}),
    ("interruptions.csv", rental_checks.interruptions_are_bands, "instance=p5.48xlarge", {"saving_vs_on_demand": "52"}),
    ("interruptions.csv", rental_checks.interruptions_are_bands, "instance=p5.48xlarge", {"instance": "p4d.24xlarge"}),
    ("storage.csv", rental_checks.storage_steps_rise, "kind=network-volume", {"from_gb": "1"}),
    ("storage.csv", rental_checks.storage_steps_rise, "kind=ssd-disk", {"usd_per_gb_month": "0"}),
    ("egress.csv", rental_checks.egress_steps_rise, "provider=aws", {"from_gb": "20"}),
    ("egress.csv", rental_checks.egress_steps_rise, "provider=runpod", {"basis": "placeholder"}),
    ("egress.csv", rental_checks.egress_steps_rise, "provider=runpod", {"usd_per_gb": "-0.1"}),
    ("egress.csv", rental_checks.egress_steps_rise, "provider=vast", {"basis": "stated"}),
    ("networks.csv", rental_checks.networks_positive, "instance=p4d.24xlarge", {"network_gbit_per_s": "0"}),
    ("networks.csv", rental_checks.networks_positive, "instance=p4d.24xlarge", {"instance": "p5.48xlarge"}),
]


@pytest.mark.parametrize(("name", "check", "where", "cells"), RENTAL_FAULTS)
def test_a_broken_rental_fact_is_caught_by_name(name: str, check: Check, where: str, cells: dict[str, str]) -> None:
    column, key = where.split("=")
    rows = read_rows(name)
    row = next(row for row in rows if row[column] == key)
    row |= cells
    faults = check(rows)
    assert len(faults) == 1
    assert cells.get(column, key) in faults[0]


def test_every_family_is_shown_for_its_members_and_never_ranked() -> None:
    from tunecast.catalogs.price_book import shipped_book
    from tunecast.catalogs.prices import PRICE_TYPES

    book = shipped_book()
    for row in read_rows("gpu_families.csv"):
        assert book.offers_for(row["family_id"], 1, PRICE_TYPES) == ()
        listed = {offer.row for offer in book.by_gpu.get(row["family_id"], ())}
        for member in names(row["members"]):
            assert listed <= {job.offer.row for job in book.unranked_offers_for(member)}


def test_the_usable_memory_of_every_gpu_is_known_and_every_forecast_says_whether_it_fits() -> None:
    """One that nobody has reported would get a null answer (``tests/model/test_estimate.py``)."""
    import tunecast

    assert {gpu_id for gpu_id, gpu in load_gpus().items() if gpu.usable_basis == "unknown"} == set()
    forecasts = tunecast.estimate("Qwen/Qwen2.5-0.5B")
    assert all(forecast.fits is not None for forecast in forecasts)
    assert all(forecast.cost_per_million_tokens_usd is None or forecast.offer for forecast in forecasts)
