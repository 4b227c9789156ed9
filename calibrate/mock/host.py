"""What the host spends to issue each operation of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tunecast.calibrate.mock.physics import HostPhysics, Physics, generator
from tunecast.calibrate.mock.queues import Seconds
from tunecast.model.operation import Kind, Operation, Phase

PYTHON_PHASES = (Phase.FORWARD, Phase.RECOMPUTE)
"""Phases in which Python modules run; backward is the C++ engine."""


def operator_seconds(physics: Physics, op: Operation) -> float:
    """Mean cost of issuing one operation: dispatch, further launches, and the module around a product."""
    host = physics.host
    phase = host.phase_factor[op.phase.value]
    cost = host.operator_s * host.kind_factor[op.kind.value] * phase * _variety(physics, op.name)
    cost += host.launch_s * max(0.0, op.launches - 1.0)
    if op.kind is Kind.GEMM and op.phase in PYTHON_PHASES:
        cost += host.module_s * phase
    return cost


def _variety(physics: Physics, name: str) -> float:
    """How much more or less than others of its kind this operator costs; the same in every phase."""
    normal = float(generator("operator", physics.root, name).standard_normal())
    return math.exp(physics.host.variety * normal)


def bare_seconds(host: HostPhysics, kind: Kind) -> float:
    """Issuing one operator in a tight loop without autograd and modules, as microbenchmarks do."""
    return 0.7 * host.operator_s * host.kind_factor[kind.value]


def layer_seconds(physics: Physics, layer: Sequence[Operation]) -> float:
    """Issuing one decoder layer forward: its operations and the Python around them."""
    return physics.host.layer_s + sum(operator_seconds(physics, op) * op.count for op in layer)


def layer_entries(stream: Sequence[Operation]) -> list[int]:
    """Positions at which Python enters a layer, forward or to recompute it."""
    entries: list[int] = []
    place: tuple[int | None, Phase | None] = (None, None)
    for index, op in enumerate(stream):
        here = (op.layer, op.phase)
        if here != place and op.layer is not None and op.phase in PYTHON_PHASES:
            entries.append(index)
        place = here
    return entries


def jitter(physics: Physics, length: int) -> Seconds:
    """Factor of every launch with mean 1: caches, branch prediction, interpreter.

    Always the same for one mock, and the same at the start of a longer stream.
    """
    log_sd = physics.host.jitter
    normal = generator("host jitter", physics.root).standard_normal(length)
    factors: Seconds = np.exp(log_sd * normal - 0.5 * log_sd**2)
    return factors
