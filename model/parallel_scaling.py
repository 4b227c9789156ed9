"""How well a job scales: what of its step is not work, which fraction that makes serial, and the classic estimate.

Efficiency is the step without waiting for links or filling a pipeline, over the step: the share of N GPUs that works.
Amdahl's serial fraction follows from it, s = (1/E - 1) / (N - 1) (the Karp-Flatt metric: Karp and Flatt, CACM 33(5),
1990), as a result. The classic estimate goes the other way, from a fraction that the user believes:
speedup = 1 / (s + (1 - s) / N) (Amdahl 1967).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunecast.catalogs.errors import InputError
from tunecast.model.factors import FactorSet
from tunecast.model.links import collective_seconds, crosses_machines, links_of
from tunecast.model.operation import Kind, Operation
from tunecast.model.run import Run
from tunecast.model.time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Amdahl:
    """The classic estimate beside the forecast."""

    serial_fraction: float
    """As the user believes it."""
    speedup: float
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What N GPUs make of N times the work."""

    efficiency: float
    speedup: float
    """efficiency x N: GPUs that would do as much if they never waited."""
    serial_fraction: float
    """Amdahl's, as a result."""
    exposed_communication_s: float
    bubble_s: float
    bound_by: str
    """What costs most: a collective with the link it crosses, ``pipeline bubble``, or ``nothing``."""
    amdahl: Amdahl | None = None


def amdahl_speedup(serial_fraction: float, num_gpus: int) -> float:
    """1 / (s + (1 - s) / N)."""
    return 1.0 / (serial_fraction + (1.0 - serial_fraction) / num_gpus)


def serial_fraction_of(efficiency: float, num_gpus: int) -> float:
    """(1 / E - 1) / (N - 1)."""
    return (1.0 / efficiency - 1.0) / (num_gpus - 1)


def scaling_of(
    timing: StepTime, operations: Sequence[Operation], factors: FactorSet, run: Run, serial_fraction: float | None
) -> Scaling | None:
    """How a job on several GPUs scales; None for one GPU, or where the user gave the speed."""
    waiting = timing.parts_s.get("communication")
    if run.num_gpus == 1 or waiting is None:
        return None
    bubble, step = timing.parts_s.get("bubble", 0.0), timing.step_time_s.value
    efficiency = (step - waiting - bubble) / step
    return Scaling(
        efficiency=efficiency,
        speedup=efficiency * run.num_gpus,
        serial_fraction=serial_fraction_of(efficiency, run.num_gpus),
        exposed_communication_s=waiting,
        bubble_s=bubble,
        bound_by=bound_by(operations, factors, run, waiting, bubble),
        amdahl=classic(serial_fraction, run.num_gpus, step * efficiency),
    )


def bound_by(operations: Sequence[Operation], factors: FactorSet, run: Run, waiting_s: float, bubble_s: float) -> str:
    """The collective that takes most of its link, or the bubble if that is longer than all waiting."""
    if bubble_s > waiting_s:
        return "pipeline bubble"
    sent = [operation for operation in operations if operation.kind is Kind.COMMUNICATION]
    if not sent or waiting_s <= 0:
        return "nothing"
    links = links_of(factors, run, across=crosses_machines(sent))
    totals: dict[str, float] = {}
    for operation in sent:
        where = "between machines" if operation.group > operation.group_per_node else "inside a machine"
        label = f"{operation.name} {where}"
        totals[label] = totals.get(label, 0.0) + collective_seconds(operation, links, run.num_gpus) * operation.count
    return max(totals, key=lambda label: totals[label])


def classic(serial_fraction: float | None, num_gpus: int, unhindered_s: float) -> Amdahl | None:
    """Amdahl's estimate from a fraction that the user gives; `unhindered_s` is the step if nothing were serial."""
    if serial_fraction is None:
        return None
    if not (math.isfinite(serial_fraction) and 0 <= serial_fraction <= 1):
        raise InputError(f"--serial-fraction is {serial_fraction}, but it must be from 0 to 1; type for example 0.05.")
    speedup = amdahl_speedup(serial_fraction, num_gpus)
    return Amdahl(serial_fraction=serial_fraction, speedup=speedup, step_time_s=unhindered_s * num_gpus / speedup)
