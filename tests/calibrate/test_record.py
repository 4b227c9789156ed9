"""A record is one file that reads back as it was, and everything else is refused in one sentence."""

import copy
import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunecast.calibrate.record import add_fitted, file_slug, read_record, record_name, write_record
from tunecast.catalogs.errors import InputError

RECORD = {
    "schema": "tunecast.record/1",
    "schema_version": 1,
    "tunecast": "0.1.0",
    "created_at": "2026-01-02T03:04:05Z",
    "duration_s": 12.5,
    "protocol": {"version": 1, "mode": "quick"},
    "hardware": {
        "device": "cuda:0",
        "gpu": "a100-sxm4-80gb",
        "name": "NVIDIA A100-SXM4-80GB",
        "memory_bytes": 85_000_000_000,
        "multiprocessors": 108,
        "compute_capability": "8.0",
        "driver": "550.1",
        "cuda": "12.4",
        "power_limit_w": 400.0,
        "default_power_limit_w": 400.0,
        "max_sm_clock_mhz": 1410.0,
        "max_memory_clock_mhz": 1593.0,
        "ecc": True,
        "mig": False,
        "mig_profile": None,
        "pcie_gen_max": 4,
        "pcie_width_max": 16,
        "nvlink_links": 12,
        "container": True,
        "host": {"cpu": "AMD EPYC", "cores": 16},
    },
    "software": {"torch": "2.13.0", "peft": None},
    "trials": [
        {
            "id": 0,
            "bench": "gemm",
            "params": {"m": 1, "n": 2, "k": 3, "dtype": "bf16", "layout": "nt"},
            "repeats": 2,
            "warmup": 1,
            "outcome": "ok",
            "message": "",
            "samples_s": [0.1, 0.2],
            "warmup_s": [0.5],
            "memory": {"allocated_bytes": 5, "reserved_bytes": None, "process_bytes": None, "at_rest_bytes": None},
            "sensors_before": None,
            "sensors_after": None,
            "extra": {"inner_loops": 4},
        }
    ],
    "flags": ["unstable"],
    "fitted": None,
}


def changed(**parts):
    return {**copy.deepcopy(RECORD), **parts}


def saved(tmp_path, data):
    path = tmp_path / "record.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def refusal(path):
    with pytest.raises(InputError) as caught:
        read_record(path)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_round_trip_and_name(tmp_path):
    path = write_record(RECORD, tmp_path)
    assert read_record(path) == RECORD
    assert re.fullmatch(r"a100-sxm4-80gb_20260102T030405Z_[0-9a-f]{8}\.json", path.name)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_text_has_sorted_keys_and_one_newline_at_the_end(tmp_path):
    text = write_record(RECORD, tmp_path).read_text()
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")
    keys = re.findall(r'^  "(\w+)":', text, re.MULTILINE)
    assert keys == sorted(keys)


def test_the_fit_changes_neither_name_nor_measurements(tmp_path):
    path = write_record(RECORD, tmp_path)
    add_fitted(path, {"factors": {"x": 1.0}})
    again = read_record(path)
    assert again["fitted"] == {"factors": {"x": 1.0}}
    assert {**again, "fitted": None} == RECORD
    assert record_name(again) == path.name


def test_the_hash_follows_the_measurements():
    other = copy.deepcopy(RECORD)
    other["trials"][0]["samples_s"][0] = 0.11
    assert record_name(other) != record_name(RECORD)


def test_measurements_that_were_changed_under_the_same_name_are_refused(tmp_path):
    path = write_record(RECORD, tmp_path)
    path.write_text(path.read_text().replace("12.5", "12.25"))
    assert "rename it" in refusal(path)
    renamed = path.rename(tmp_path / "mine.json")
    assert read_record(renamed)["duration_s"] == 12.25


def test_a_card_in_no_catalog_is_named_as_its_vendor_does():
    unknown = changed(hardware={**RECORD["hardware"], "gpu": None, "name": "NVIDIA Foo 9000 (rev. 2)"})
    assert record_name(unknown).startswith("nvidia-foo-9000-rev.-2_")


@given(st.text(min_size=1, max_size=40))
def test_slugs_are_safe_file_names(device):
    assert re.fullmatch(r"[a-z0-9.-]+", file_slug(device))
    assert not file_slug(device).startswith(".")


def test_missing_file(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "nowhere.json")


def test_folder(tmp_path):
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "hello", '{"schema": ', "\x00\x01"])
def test_not_json(tmp_path, text):
    assert "not JSON" in refusal(saved(tmp_path, text))


def test_an_unfinished_calibration_is_called_one(tmp_path):
    """Its file has a line of JSON for each trial."""
    path = tmp_path / "a100-sxm4-80gb.partial.jsonl"
    path.write_text('{"schema": "tunecast.partial/1"}\n{"key": "a"}\n', encoding="utf-8")
    assert "a calibration that is not finished: the same `tunecast calibrate` command goes on" in refusal(path)


def test_not_utf8(tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(b"\xff\xfe{}")
    assert "not JSON" in refusal(path)


@pytest.mark.parametrize("data", [[], 3, {}, {"schema": "tunecast.forecast/1"}, {"schema": None}])
def test_foreign_json(tmp_path, data):
    assert "not a tunecast record" in refusal(saved(tmp_path, data))


def test_newer_schema_names_the_upgrade(tmp_path):
    message = refusal(saved(tmp_path, changed(schema="tunecast.record/2")))
    assert "newer tunecast" in message
    assert "pip install --upgrade tunecast" in message


def test_nonsense_schema_version(tmp_path):
    told = refusal(saved(tmp_path, changed(schema="tunecast.record/x")))
    assert "unknown schema" in told
    assert told.endswith("; give a file that `tunecast calibrate` wrote.")


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"surprise": 1}, "surprise"),
        ({"duration_s": "long"}, "duration_s"),
        ({"protocol": {"version": 1}}, "protocol.mode"),
        ({"trials": [{**RECORD["trials"][0], "outcome": "fine"}]}, "trials.0.outcome"),
        ({"trials": [{**RECORD["trials"][0], "samples_s": [None]}]}, "trials.0.samples_s.0"),
        ({"trials": [{**RECORD["trials"][0], "samples_s": [-0.1]}]}, "trials.0.samples_s.0"),
        ({"trials": [{**RECORD["trials"][0], "samples_s": [0.0]}]}, "trials.0.samples_s.0"),
        ({"trials": []}, "trials"),
    ],
)
def test_damage_is_located(tmp_path, parts, where):
    assert where in refusal(saved(tmp_path, changed(**parts)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_unwritable_folder_by_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="--out"):
        write_record(RECORD, tmp_path)


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = write_record(RECORD, tmp_path)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        add_fitted(path, {"a": 1})
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
