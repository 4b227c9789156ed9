"""Benchmarks of the host: seconds to issue a kernel, seconds to synchronise."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from tunecast.calibrate.bench.timing import Prepared
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

TINY_ELEMENTS = 16
"""Elements of a tensor whose kernel costs next to nothing, so that issuing it is what takes time."""

PACE_KERNELS, PACE_ROUNDS = 100, 3
"""A look at the host's pace: a millisecond or two, so that it can be taken beside every step."""


def launch_pace_s(backend: Backend) -> float:
    """Seconds to issue one kernel now, as ``launch`` issues them: the median of a few short rounds."""
    import torch

    x = torch.zeros(TINY_ELEMENTS, device=backend.torch_device, requires_grad=True)
    return median(_issue(x, PACE_KERNELS, backend)[0] for _ in range(PACE_ROUNDS)) / PACE_KERNELS


def run_launch(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Host seconds to issue ``kernels`` tiny kernels in a row, the device drained before each repetition.

    Each kernel follows autograd's path, as in a training step: an addition to a tensor that needs gradients.
    ``synchronised_s`` in `extra` has the same repetitions with the device drained after.
    """
    import torch

    x = torch.zeros(TINY_ELEMENTS, device=backend.torch_device, requires_grad=True)
    rounds = [_issue(x, spec.params["kernels"], backend) for _ in range(spec.warmup + spec.repeats)]
    issued = tuple(issued_s for issued_s, _ in rounds)
    return TrialResult(
        outcome="ok",
        samples_s=issued[spec.warmup :],
        warmup_s=issued[: spec.warmup],
        extra={"synchronised_s": [drained_s for _, drained_s in rounds[spec.warmup :]]},
    )


def _issue(x: Any, kernels: int, backend: Backend) -> tuple[float, float]:
    backend.synchronize()
    start_s = time.perf_counter()
    for _ in range(kernels):
        x + 1.0
    issued_s = time.perf_counter() - start_s
    backend.synchronize()
    return issued_s, time.perf_counter() - start_s


def prepare_sync(params: dict[str, Any], backend: Backend) -> Prepared:
    """One tiny kernel and one wait for it."""
    import torch

    x = torch.zeros(TINY_ELEMENTS, device=backend.torch_device)

    def issue_and_wait() -> None:
        x.add_(1.0)
        backend.synchronize()

    return Prepared(calls=[issue_and_wait])
