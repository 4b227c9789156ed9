"""A step by ``--exact`` takes what the same step by the formulas does: both streams enter layers and the head alike."""

from __future__ import annotations

from typing import Any

import pytest

import tunecast

SHORT: dict[str, Any] = {"gpu": "h100-sxm5-80gb", "max_length": 256, "trainer_loop": False}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bigscience/bloom-560m", {}),
        ("Qwen/Qwen2.5-0.5B", {"attn_implementation": "eager", "gradient_checkpointing": False}),
        ("Qwen/Qwen2.5-0.5B", {"per_device_train_batch_size": 4}),
        ("Qwen/Qwen3-0.6B", {"method": "full"}),
        ("google/gemma-2-2b", {}),
    ],
)
def test_steps_of_short_rows_take_as_long_as_by_the_formulas(model: str, options: dict[str, Any]) -> None:
    """Bound by the host, which pays for entering layers and starts the loss late or early by the head's product."""
    (formula,) = tunecast.estimate(model, **SHORT, **options)
    (traced,) = tunecast.estimate(model, **SHORT, **options, exact=True)
    assert traced.step_time_s.value == pytest.approx(formula.step_time_s.value, rel=0.01)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bigcode/starcoder2-3b", {"attn_implementation": "eager", "gradient_checkpointing": False, "max_length": 512}),
        (
            "Qwen/Qwen2.5-0.5B",
            {"method": "full", "loss_type": "linear_ce", "precision": "fp16-autocast", "dtype": "bf16"},
        ),
        (
            "Qwen/Qwen2.5-0.5B",
            {"method": "full", "loss_type": "chunked_ce", "precision": "fp16-autocast", "dtype": "bf16"},
        ),
        ("Qwen/Qwen2.5-0.5B", {"method": "full", "loss_type": "chunked_nll", "dtype": "fp32"}),
    ],
)
def test_dropped_weights_and_heads_cast_for_every_chunk_have_the_traced_peak(
    model: str, options: dict[str, Any]
) -> None:
    """StarCoder2 drops attention weights; autocast keeps copies of fp32 leaves alone, others are cast every time."""
    asked = {"gpu": "h100-sxm5-80gb", "max_length": 1024, **options}
    (formula,) = tunecast.estimate(model, **asked)
    (traced,) = tunecast.estimate(model, **asked, exact=True)
    assert formula.memory.allocated_bytes.value == pytest.approx(traced.memory.allocated_bytes.value, rel=0.002)
