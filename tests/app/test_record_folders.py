"""``--record`` of a folder, and ``--gpu all`` beside records: the two commands that the README shows one after the
other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tunecast
from tunecast.calibrate.fitted_records import record_files
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


def test_a_folder_stands_for_its_records_of_what_is_asked_for(tmp_path: Path) -> None:
    """A folder keeps what was calibrated at any time; a file was named for what is asked."""
    shutil.copy(RECORD, tmp_path)
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["hardware"]["gpu"] = "mock:l4-24gb#0"  # whatever it measured
    (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
    (forecast,) = tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    (same,) = tunecast.estimate(MODEL, gpu="cpu", records=[RECORD], **RUN)
    assert forecast.step_time_s == same.step_time_s
    with pytest.raises(InputError, match="not among the devices asked for"):
        tunecast.estimate(MODEL, gpu="l40s", records=[tmp_path], **RUN)


def test_a_record_without_a_fit_of_a_card_that_is_not_asked_for_is_no_hindrance(tmp_path: Path) -> None:
    shutil.copy(RECORD, tmp_path)
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["hardware"]["gpu"], other["fitted"] = "l40s-48gb", None
    (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
    assert tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    with pytest.raises(InputError, match="not fitted yet"):
        tunecast.estimate(MODEL, gpu="l40s", records=[tmp_path], **RUN)


def test_two_records_of_one_device_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder without records"):
        tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    shutil.copy(RECORD, tmp_path / "one.json")
    shutil.copy(RECORD, tmp_path / "two.json")
    both = [tmp_path / "one.json", tmp_path / "two.json"]
    with pytest.raises(InputError, match=r"one\.json and .*two\.json are both records of cpu"):
        tunecast.estimate(MODEL, gpu="cpu", records=both, **RUN)


def test_of_a_folder_the_newest_calibration_of_a_device_counts(tmp_path: Path) -> None:
    """A second calibration into the same folder, `calibrate`'s own default: whatever the files are called."""
    older = json.loads(RECORD.read_text(encoding="utf-8")) | {"created_at": "2020-01-01T00:00:00Z"}
    (tmp_path / "z-older.json").write_text(json.dumps(older), encoding="utf-8")
    shutil.copy(RECORD, tmp_path / "a-newer.json")
    (tmp_path / "notes.json").write_text("{}", encoding="utf-8")
    assert [path.name for path in record_files([tmp_path])] == ["a-newer.json", "notes.json"]
    (tmp_path / "notes.json").unlink()
    (forecast,) = tunecast.estimate(MODEL, gpu="cpu", records=[tmp_path], **RUN)
    assert "measured:a-newer.json" in forecast.origins.values()


def test_a_record_without_whole_steps_takes_the_process_from_the_priors(tmp_path: Path) -> None:
    """A short or full-of-memory calibration has rates but no reading of a step: fits is still said, and by what."""
    record = json.loads(next((ROOT / "results" / "records").glob("h100*.json")).read_text(encoding="utf-8"))
    record["fitted"]["memory_overhead_bytes"] = {}
    short = tmp_path / "short.json"
    short.write_text(json.dumps(record), encoding="utf-8")
    (own,) = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", records=[short], **RUN)
    (prior,) = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", **RUN)
    assert own.verdict == "fits"
    assert own.memory.process_bytes is not None
    assert prior.memory.process_bytes is not None
    assert own.memory.process_bytes.value == prior.memory.process_bytes.value
    assert any("the priors say it" in note for note in own.notes)
    assert not any("the priors say it" in note for note in prior.notes)
