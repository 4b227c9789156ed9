"""Products for seconds on end: what a card multiplies at once its power limit has settled its clock.

Benchmarks of milliseconds end before a card's controller has averaged its power, and are faster: an H200 has a product
of 8,192 at 810 TFLOP/s in them and at 671 for as long as it is kept at it (results/validation/gpu/profiles).
"""

from __future__ import annotations

from tunecast.calibrate.bench.math_ops import prepare_gemm
from tunecast.calibrate.bench.timing import inner_loops_for, loop_over, per_call
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

WINDOW_S = 0.1
"""Of one repetition, at least: as long as drivers average power over."""


def run_lasting(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Seconds of one product in windows of `WINDOW_S` that follow each other; those of the warm-up are apart.

    The last of the warm-up is asked for by itself: sensors are read when its work is issued, on a card long at work.
    """
    prepared = prepare_gemm(spec.params, backend)
    loops = inner_loops_for(prepared.calls, backend, WINDOW_S)
    window = loop_over(prepared.calls, loops)
    first, _ = backend.timed(window, repeats=0, warmup=max(spec.warmup - 1, 0))
    last, samples = backend.timed(window, repeats=spec.repeats, warmup=1)
    return per_call(prepared, loops, (*first, *last), samples, backend)
