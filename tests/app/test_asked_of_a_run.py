"""What is typed beside a watched run, and names that are no words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.forecast_table import of_this
from tunecast.run_validation import forecast_anew, validate_run

ROOT = Path(__file__).resolve().parents[2]
RECORD = next((ROOT / "results" / "records").glob("h100*.json"))
RUNS = sorted((ROOT / "results" / "validation" / "callback").rglob("*_run_*.json"))


def test_a_run_record_says_itself_what_ran_on_which_card(tmp_path: Path) -> None:
    assert RUNS
    with pytest.raises(InputError, match="says what ran on which card; leave --config and --gpu out"):
        validate_run(RUNS[0], gpu="h100", config="nofile.yaml")


def test_a_run_is_forecast_anew_from_records_of_its_own_device() -> None:
    record: dict[str, Any] = json.loads(RUNS[0].read_text(encoding="utf-8"))
    gpu = record["hardware"]["gpu"]
    with pytest.raises(
        InputError, match=rf"The run was on {gpu}, and --record has h100-sxm5-80gb; give a record of {gpu}"
    ):
        forecast_anew(record, [RECORD])


@pytest.mark.parametrize("device", [0, 1, ["cuda:0"]])
def test_a_device_is_a_name(device: Any) -> None:
    for ask in (
        lambda: tunecast.calibrate_device(device),
        lambda: tunecast.measure("Qwen/Qwen2.5-0.5B", device=device),
    ):
        with pytest.raises(InputError, match='it is a name: "cuda:0"'):
            ask()


def test_a_version_keeps_its_suffix() -> None:
    assert of_this("torch 2.13.0+cpu on cpu", "cpu") == "torch 2.13.0+cpu on this device"
