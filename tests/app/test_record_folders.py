"""``--record`` of a folder, and ``--gpu all`` beside records: the two commands that the README shows one after the
other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus

ROOT = Path(__file__).resolve().parents[2]
RECORD = next((ROOT / "results" / "records").glob("cpu_*.json"))
RUN = {"method": "lora", "max_length": 256}
MODEL = "HuggingFaceTB/SmolLM2-135M"


def test_a_folder_stands_for_its_records(tmp_path: Path) -> None:
    shutil.copy(RECORD, tmp_path)
    (forecast,) = tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    (same,) = tunecast.estimate(MODEL, gpu="cpu", records=[RECORD], **RUN)
    assert forecast.step_time_s == same.step_time_s


def test_all_means_the_devices_of_the_records_too(tmp_path: Path) -> None:
    shutil.copy(RECORD, tmp_path)
    found = [forecast.gpu for forecast in tunecast.estimate(MODEL, gpu="all", records=[tmp_path], **RUN)]
    assert set(found) >= {"cpu", "l40s-48gb"}
    assert set(found) <= {"cpu", *load_gpus()}


def test_a_card_that_is_not_asked_for_is_still_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="measured on cpu, which is not among the devices asked for"):
        tunecast.estimate(MODEL, gpu="l40s", records=[RECORD], **RUN)


def test_two_records_of_one_device_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder without records"):
        tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    shutil.copy(RECORD, tmp_path / "one.json")
    shutil.copy(RECORD, tmp_path / "two.json")
    with pytest.raises(InputError, match=r"one\.json and .*two\.json are both records of cpu"):
        tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
