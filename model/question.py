"""What is asked of every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunecast.model.architecture import Architecture

RUN_OPTIONS_ELSEWHERE = ("tokens", "num_samples", "mean_tokens", "num_train_epochs", "max_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of every device."""

    architecture: Architecture
    options: Mapping[str, Any]
    """Run options and amounts, named as on the command line with underscores."""
    option_origins: Mapping[str, str] = field(default_factory=dict)
    usd_per_gpu_hour: float | None = None
    achieved_tflops: float | None = None
    """Model TFLOP/s per GPU; replaces every step-time term."""
