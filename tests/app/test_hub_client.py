"""Hub ids through the real `huggingface_hub` client, in a process of its own, against a hub on this machine.

The client also asks the hub for things of its own; only what concerns the model is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import LLAMA_PARAMS, fake_hub

pytest.importorskip("huggingface_hub")

Asked = tuple[str, list[str]]


@pytest.fixture
def hub() -> Iterator[Asked]:
    """Address of the hub, and what was asked of it."""
    with fake_hub() as running:
        yield running


def estimate(name: str, address: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command as it is typed, with a cache of its own."""
    asked = ["estimate", name, "--method", "lora", "--max-length", "64", "--gpu", "l40s", "--json"]
    own = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **more}
    return subprocess.run(
        [sys.executable, "-m", "tunecast", *asked],
        env={**os.environ, **own}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_model_of_the_hub_is_forecast_from_its_config_alone(hub: Asked, tmp_path: Path) -> None:
    address, asked = hub
    done = estimate("someone/small-llama", address, tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["total_params"] == LLAMA_PARAMS
    assert "someone/small-llama was read from the hub." in found["notes"]
    assert {request.split()[1] for request in asked if "someone" in request} == {
        "/api/models/someone/small-llama",
        "/someone/small-llama/resolve/main/config.json",
    }


def test_it_is_fetched_once_and_then_serves_without_a_network(hub: Asked, tmp_path: Path) -> None:
    address, asked = hub
    first = estimate("someone/small-llama", address, tmp_path)
    fetched = [request for request in asked if request.startswith("GET") and request.endswith("config.json")]
    again = estimate("someone/small-llama", address, tmp_path)
    assert [r for r in asked if r.startswith("GET") and r.endswith("config.json")] == fetched
    nobody = estimate("someone/small-llama", "http://127.0.0.1:9", tmp_path)
    told_off = estimate("someone/small-llama", address, tmp_path, HF_HUB_OFFLINE="1")
    for done in (again, nobody, told_off):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0]["step_time_s"] == json.loads(first.stdout)[0]["step_time_s"]


def test_code_of_a_repository_is_never_asked_for(hub: Asked, tmp_path: Path) -> None:
    address, asked = hub
    done = estimate("someone/own-code", address, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not [request for request in asked if ".py" in request]
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("someone/gated", "someone/gated is gated on the hub: accept its terms there and type `hf auth login`"),
        ("someone/unknown-token", "someone/unknown-token is gated on the hub"),
        ("someone/missing", "The hub has no public model someone/missing either"),
        ("someone/gone", "The hub has no public model someone/gone either"),
        ("someone/no-config", "someone/no-config has no config.json on the hub"),
        ("someone/broken", "The hub answered 503"),
    ],
)
def test_every_no_is_one_sentence_and_code_2(hub: Asked, tmp_path: Path, name: str, sentence: str) -> None:
    done = estimate(name, hub[0], tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_nobody_there_and_nothing_kept_is_one_sentence(tmp_path: Path) -> None:
    done = estimate("someone/small-llama", "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 2
    assert "cannot be reached from here" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
