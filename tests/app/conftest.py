"""Hand-made forecasts for tests of what is printed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.forecast import Forecast, MemoryView
from tunecast.model.run import Run
from tunecast.model.units import GIB
from tunecast.model.value import Value, lognormal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
"""No test asks the real hub; `huggingface_hub` reads this when it is imported."""


def make_forecast(gpu: str = "a100-sxm4-80gb", **changes: Any) -> Forecast:
    """A 70B QLoRA forecast with round numbers."""
    architecture = load_architecture("meta-llama/Llama-3.1-70B")
    run = Run(method="qlora", lora_r=16, lora_target_modules=("q_proj", "v_proj"), bnb_4bit_quant_type="nf4")
    forecast = Forecast(
        model=architecture.name,
        gpu=gpu,
        architecture=architecture,
        run=run,
        run_origins={"method": "cli", "max_length": "assumed"},
        fits=True,
        fit_probability=0.97,
        verdict="fits",
        model_flops_per_step=2.8e14,
        executed_flops_per_step=4.1e14,
        trainable_params=207_093_760,
        total_params=architecture.total_params,
        memory=MemoryView(
            allocated_bytes=lognormal(41.5 * GIB, 0.02),
            reserved_bytes=lognormal(42.5 * GIB, 0.02),
            process_bytes=lognormal(43.0 * GIB, 0.02),
            usable_bytes=79.1 * GIB,
            peak_moment="loss",
            parts_bytes={"weights": 38.0 * GIB, "logits": 3.5 * GIB},
        ),
        step_time_s=Value(value=2.5, low=2.0, high=3.0),
        tokens_per_s=Value(value=409.6, low=341.3, high=512.0),
        mfu=0.36,
        hfu=0.53,
        bound_by="compute",
        time_parts_s={"gemm": 2.0, "host": 0.5},
        total_time_h=Value(value=10.0, low=8.0, high=12.0),
        cost_usd=Value(value=15.0, low=12.0, high=18.0),
        cost_per_million_tokens_usd=Value(value=1.5, low=1.2, high=1.8),
        offer={"provider": "runpod", "price_type": "on-demand", "usd_per_gpu_hour": 1.5},
        origins={"gemm.bf16": "published"},
        notes=("training only",),
    )
    return replace(forecast, **changes)


@pytest.fixture
def make() -> Callable[..., Forecast]:
    """The maker of forecasts, for tests that change fields."""
    return make_forecast
