"""A clock on transformers' Trainer for the scripts that set its steps beside something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import transformers

WARMUP_STEPS = 3


class Stopwatch(transformers.TrainerCallback):
    """Seconds of `clock` from the end of the warm-up to the end of the last step; at both, `wait` waits for the
    device."""

    def __init__(self, wait: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.wait, self.clock = wait, clock
        self.begun_s, self.seconds, self.steps = 0.0, 0.0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember both moments."""
        if state.global_step in (WARMUP_STEPS, state.max_steps):
            self.wait()
        now = self.clock()
        if state.global_step == WARMUP_STEPS:
            self.begun_s = now
        if state.global_step > WARMUP_STEPS:
            self.seconds, self.steps = now - self.begun_s, state.global_step - WARMUP_STEPS

    def step_s(self) -> float:
        """Mean seconds of a step after the warm-up."""
        return self.seconds / self.steps
