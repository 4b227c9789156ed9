"""The note on adapters' traffic: the bytes behind it by hand, and seconds that a forecast of the change repeats."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tunecast
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind
from tunecast.model.resolve import resolve_run

MODEL = "meta-llama/Llama-3.1-8B"
SHAPE: dict[str, Any] = {"max_length": 2048, "per_device_train_batch_size": 4}


def moved(**options: Any) -> float:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {"method": "lora", **SHAPE, **options}).run
    return sum(op.total_bytes for op in step_operations(architecture, run) if op.kind is Kind.MEMORY)


def test_fp32_adapters_move_what_their_casts_read_and_write() -> None:
    """Input of a map, k wide: read in 2 bytes and written in 4 by the cast of the forward, of the recomputation, and
    the gradient read in 4 and written in 2 once: at least 18 k bytes a token beside the sums, for each adapted map."""
    tokens, layers = 4 * 2048, 32
    inputs = layers * tokens * (6 * 4096 + 14336)
    assert moved() - moved(adapter_dtype="bf16") > 0.9 * 18 * inputs


def test_the_note_says_what_each_change_would_take() -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", method="lora", **SHAPE)
    (note,) = [note for note in found.notes if note.startswith("adapters'")]
    found_there = re.findall(r"([0-9.]+) (m?s) with (--[a-z-]+ [^ ]+?)(?:,? |,?$)", note)
    told = {change: float(time) * {"s": 1.0, "ms": 1e-3}[unit] for time, unit, change in found_there}
    assert "--adapter-dtype bf16" in told
    assert "--fused-kernels lora" in told
    for change, step_s in told.items():
        flag, value = change.removeprefix("--").split()
        (after,) = tunecast.estimate(
            MODEL, gpu="h100-sxm5-80gb", method="lora", **SHAPE, **{flag.replace("-", "_"): value}
        )
        assert after.step_time_s.value == pytest.approx(step_s, rel=0.01)
        assert after.step_time_s.value < found.step_time_s.value


@pytest.mark.parametrize(
    "options", [{"method": "full"}, {"method": "lora", "stack": "unsloth", "lora_target_modules": "q_proj"}]
)
def test_where_there_is_little_to_save_nothing_is_said(options: dict[str, Any]) -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **SHAPE, **options)
    assert not any(note.startswith("adapters'") for note in found.notes)


def test_a_table_of_cards_does_not_say_so() -> None:
    found = tunecast.estimate(MODEL, gpu=["h100-sxm5-80gb", "l40s-48gb"], method="lora", **SHAPE)
    assert not any(note.startswith("adapters'") for forecast in found for note in forecast.notes)
