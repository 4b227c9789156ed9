"""Options of the whole run that change nothing, or say two things, get a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunecast import estimate, recommend
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.written import write_plan

MODEL = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_steps": 10, "num_train_epochs": 5}, "--max-steps and --num-train-epochs both say"),
        (
            {"tokens": "1M", "owned": True, "electricity_usd_per_kwh": 0.3, "usd_per_gpu_hour": 2.0},
            "--usd-per-gpu-hour is a rent",
        ),
        (
            {"tokens": "1M", "owned": True, "electricity_usd_per_kwh": 0.3, "billing_granularity_s": 3600},
            "--billing-granularity-s is about rented machines",
        ),
        ({"tokens": "1M", "phase_min": 1}, "--phase-min is 1, which is no NAME=X"),
        ({"tokens": "1M", "phase_rate": [1]}, "--phase-rate is"),
        ({"fused_kernels": [1]}, "--fused-kernels is"),
    ],
)
def test_two_that_contradict_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        estimate(MODEL, gpu="l40s", method="lora", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "full", "merge": True}, "--merge changes nothing"),
        ({"egress_usd_per_gb": 0.09}, "--egress-usd-per-gb changes nothing"),
        ({"prepare": True, "dataset_gb": 100.0}, "bytes for each of"),
    ],
)
def test_what_changes_nothing_or_cannot_be_is_told(options: dict[str, Any], says: str) -> None:
    for given, told in ((options, True), ({}, False)):
        notes = estimate(MODEL, gpu="l40s", tokens="1M", **{"method": "lora", **given})[0].notes
        assert any(says in note for note in notes) is told


def test_a_base_in_gptq_is_downloaded_as_it_is_stored() -> None:
    """About 5.7 GB of 8 billion parameters: 4 bits and scales of the layers, 16 bits of the table and the head."""
    asked: dict[str, Any] = {"gpu": "l40s", "method": "qlora", "tokens": "1M"}
    whole, stored = (
        estimate("meta-llama/Llama-3.1-8B", **asked, **more)[0] for more in ({}, {"quant_method": "gptq-4bit"})
    )
    assert whole.phases_h is not None
    assert stored.phases_h is not None
    assert stored.phases_h["download"] / whole.phases_h["download"] == pytest.approx(5.7 / 16.1, rel=0.05)


def test_rental_tasks_of_cards_that_need_rocm_are_refused_by_name(tmp_path: Path) -> None:
    found = recommend(MODEL, gpu="mi300x-192gb", method="lora", tokens="10M", max_length=512)
    with pytest.raises(NotSupportedError, match="image with PyTorch for ROCm"):
        write_plan(found, [("axolotl", tmp_path / "a.yaml"), ("dstack", tmp_path / "d.yaml")], "cheapest")
    assert not list(tmp_path.iterdir())
