"""Products for seconds on end: what a card multiplies at once its power limit has settled its clock.

Benchmarks of milliseconds end before a card's controller has averaged its power, and are faster: an H200 has a product
of 8,192 at 810 TFLOP/s in them and at 671 for as long as it is kept at it (results/validation/gpu/profiles).
"""

from __future__ import annotations

import math

from tunecast.calibrate.bench.math_ops import prepare_gemm
from tunecast.calibrate.bench.timing import loop_over, wall_seconds
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

WINDOW_S = 0.1
"""Of one repetition, at least: as long as drivers average power over."""
MOST_CALLS = 10_000
"""In a window: calls of 10 microseconds, less than a product of any size takes."""


def run_lasting(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Seconds of one product in windows of `WINDOW_S` that follow each other; those of the warm-up are apart."""
    prepared = prepare_gemm(spec.params, backend)
    wall_seconds(prepared.calls[0], backend)  # loads kernels
    loops = math.ceil(WINDOW_S / max(wall_seconds(prepared.calls[0], backend), WINDOW_S / MOST_CALLS))
    window = loop_over(prepared.calls, loops)
    first, _ = backend.timed(window, repeats=0, warmup=max(spec.warmup - 1, 0))
    last, samples = backend.timed(window, repeats=spec.repeats, warmup=1)
    return TrialResult(
        outcome="ok",
        samples_s=tuple(seconds / loops for seconds in samples),
        warmup_s=tuple(seconds / loops for seconds in (*first, *last)),
        memory=backend.memory(),
        extra={"inner_loops": loops, "buffers": len(prepared.calls)},
    )
