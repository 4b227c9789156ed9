"""Interruptions, storage, transfer out and networks, against the figures of their sources and hand arithmetic."""

from __future__ import annotations

import pytest

from tunecast.catalogs.rental_facts import (
    egress_tiers,
    egress_usd_per_gb,
    interruptions,
    node_network_bytes_per_s,
    storage_tiers,
    storage_usd_per_gb_month,
)
from tunecast.catalogs.tables import read_rows


@pytest.mark.parametrize(
    ("instance", "region", "band"),
    [
        ("p4de.24xlarge", "us-east-1", (0.0, 0.05)),
        ("g6e.xlarge", "us-east-1", (0.05, 0.10)),
        ("g4dn.xlarge", "us-east-1", (0.15, 0.20)),
        ("p5.48xlarge", "us-east-1", (0.20, None)),
        ("p5.48xlarge", "us-west-2", (0.05, 0.10)),
    ],
)
def test_interruption_bands_of_aws(instance: str, region: str, band: tuple[float, float | None]) -> None:
    found = interruptions("aws", instance, region)
    assert found is not None
    assert (found.monthly_low, found.monthly_high) == band
    assert interruptions("AWS", instance, region + "b") == found


def test_an_interruption_rate_that_nobody_states_is_unknown() -> None:
    assert interruptions("runpod", "NVIDIA A40", "global") is None
    assert interruptions("aws", "p5.48xlarge", "eu-west-1") is None
    found = interruptions("aws", "p5.48xlarge", "us-west-2")
    assert found is not None
    assert found.source_date == "2025-06-28"


def test_storage_by_kind_and_by_role() -> None:
    assert storage_usd_per_gb_month("runpod", "volume-disk-stopped") == 0.20
    assert storage_usd_per_gb_month("runpod") == 0.10
    assert storage_usd_per_gb_month("gcp", "disk") == storage_usd_per_gb_month("gcp", "balanced-disk") == 0.10
    assert storage_usd_per_gb_month("gcp", "object") == 0.02
    assert storage_usd_per_gb_month("lambda", "disk") is None
    assert storage_usd_per_gb_month("gcp", "tape") is None


def test_a_network_volume_is_cheaper_above_a_terabyte_for_that_part_only() -> None:
    """2,000 GB: 1,000 at 0.07 and 1,000 at 0.05 is 0.06 on average."""
    assert storage_usd_per_gb_month("runpod", "network-volume", 1000) == pytest.approx(0.07)
    assert storage_usd_per_gb_month("runpod", "network-volume", 2000) == pytest.approx(0.06)
    assert [tier.from_gb for tier in storage_tiers("runpod", "network")] == [0, 1000]


@pytest.mark.parametrize(
    ("provider", "gb", "usd"),
    [
        ("aws", 100.0, 0.0),
        ("aws", 201.0, 101 * 0.09),
        ("aws", 20480.0, (10240 - 100) * 0.09 + 10240 * 0.085),
        ("gcp", 2048.0, 1024 * 0.12 + 1024 * 0.11),
        ("azure", 200_000.0, 10140 * 0.0875 + 40960 * 0.083 + 102400 * 0.07 + (200_000 - 153600) * 0.05),
        ("runpod", 500.0, 0.0),
        ("oci", 10240.0, 0.0),
    ],
)
def test_egress_is_the_sum_of_its_steps(provider: str, gb: float, usd: float) -> None:
    rate = egress_usd_per_gb(provider, gb)
    assert rate is not None
    assert rate * gb == pytest.approx(usd)


@pytest.mark.parametrize(("provider", "gb"), [("lambda", 10.0), ("vast", 10.0), ("oci", 20000.0), ("nowhere", 1.0)])
def test_egress_that_nobody_states_is_unknown_not_free(provider: str, gb: float) -> None:
    assert egress_usd_per_gb(provider, gb) is None


def test_placeholders_say_so() -> None:
    assert "placeholder" in egress_tiers("lambda")[0].note


def test_networks_in_bytes_per_second() -> None:
    """3,200 Gbit/s is 400 GB/s."""
    assert node_network_bytes_per_s("aws", "p5.48xlarge") == pytest.approx(400e9)
    assert node_network_bytes_per_s("aws", "p3.16xlarge") is None


@pytest.mark.parametrize("name", ["interruptions.csv", "storage.csv", "egress.csv", "networks.csv"])
def test_every_fact_has_a_source_and_a_day(name: str) -> None:
    for row in read_rows(name):
        assert row["source"]
        assert len(row["source_date"]) == len("2026-01-01")
