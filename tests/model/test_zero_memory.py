"""What ZeRO holds on each GPU, against what DeepSpeed held in two and in four processes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunecast.model import zero_memory
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

RunOf = Callable[..., Run]
RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "deepspeed_peaks.json").read_text("utf-8")
)
"""By scripts/deepspeed_peaks.py."""
CONSTANTS = {
    "stage3_max_live_parameters": "LIVE_ELEMENTS",
    "stage3_prefetch_bucket_size": "PREFETCH_ELEMENTS",
    "stage3_param_persistence_threshold": "PERSISTENT_ELEMENTS",
}
"""DeepSpeed's option by the name of its own value here."""
CACHED = (zero_memory.gathered_bytes, zero_memory.persistent_bytes, zero_memory.gathered_at_table_bytes)


def forecast_of(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> MemoryForecast:
    for option, name in CONSTANTS.items():
        if option in case["zero"]:
            monkeypatch.setattr(zero_memory, name, case["zero"][option])
    for cached in CACHED:
        cached.cache_clear()
    architecture = architecture_from_config(RECORD["config"], "zero")
    bucket = {name: size for name, size in case["zero"].items() if name == "reduce_bucket_size"}
    return memory_timeline(architecture, resolve_run(architecture, {**case["options"], **bucket}).run, platform="cpu")


@pytest.fixture(autouse=True)
def forget() -> Any:
    """Sizes that a test set are not kept."""
    yield
    for cached in CACHED:
        cached.cache_clear()


@pytest.mark.parametrize("name", RECORD["cases"])
def test_what_deepspeed_holds_at_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RECORD["cases"][name]
    found = forecast_of(case, monkeypatch)
    most = max(each["at_rest_bytes"] for each in case["by_process"])
    assert found.at_rest_bytes == pytest.approx(most, rel=0.003)


@pytest.mark.parametrize("name", RECORD["cases"])
def test_what_deepspeed_holds_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU that holds most: what lies in the first layers goes to the first GPU, and is reduced last.

    Where few weights may be live at once, the table of this small model is much of them."""
    case = RECORD["cases"][name]
    found = forecast_of(case, monkeypatch)
    most = max(each["at_rest_bytes"] + each["step_bytes"] for each in case["by_process"])
    assert found.allocated_bytes == pytest.approx(most, rel=0.065 if "few live" in name else 0.01)


def test_a_smaller_bucket_is_less_memory(run_of: RunOf) -> None:
    """Buckets have their full size however little trains: 2 bytes an element, at rest too in ZeRO-3."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    for sharding, moments in (("zero2", ("backward",)), ("zero3", ("load", "forward", "backward"))):
        options = {"num_gpus": 8, "sharding": sharding, "max_length": 512, "lora_target_modules": "q_proj", "lora_r": 8}
        whole, small = (
            memory_timeline(llama, run_of(llama, **options, reduce_bucket_size=size)) for size in (500_000_000, "auto")
        )
        for moment in moments:
            assert whole.moments[moment] - small.moments[moment] == 2 * (500_000_000 - 4096**2)
