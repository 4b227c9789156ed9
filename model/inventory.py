"""The operation inventory: every kind of kernel work of one optimizer step on one GPU, with its count.

The kernels come from the tape (`step.py`), the update from `optimizer.py`, the collectives from
`sharding.py`. Equal kernels are one entry, in order of phase and first appearance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from tunecast.model.architecture import Architecture
from tunecast.model.collectives import communication_operations
from tunecast.model.offloaded_gradients import offloaded_gradients
from tunecast.model.operation import FLASH, HOPPER, NATIVE, Kind, Operation, Phase
from tunecast.model.parallel import (
    beside_products,
    exchange_operations,
    is_split,
    local_architecture,
    local_run,
    placed,
)
from tunecast.model.parallel_offload import DEEPSPEED, host_operations
from tunecast.model.run import Run
from tunecast.model.sharded_update import own_update
from tunecast.model.sharding_copies import copy_operations, sums_whole
from tunecast.model.short_stack import short_stack
from tunecast.model.stacks import FLASH_2, FLASH_3
from tunecast.model.stages import is_uneven, stages_counted
from tunecast.model.step import repetitions, write_step
from tunecast.model.tape import LEAF_SUM, Event

FLASH_LAYOUTS = {FLASH_2: FLASH, FLASH_3: HOPPER}
"""Whose kernels attention runs by, by the implementation."""

PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER)
"""Order of the inventory."""


def as_operation(event: Event, count: int) -> Operation:
    """One kernel of the tape as an inventory entry."""
    assert event.kind is not None
    return Operation(
        name=event.name,
        kind=event.kind,
        phase=event.phase,
        dtype=event.dtype,
        flops=event.flops,
        bytes=float(event.bytes),
        launches=event.launches,
        shape=event.shape,
        layout=event.layout,
        count=float(count),
    )


def merged(events: Iterable[tuple[Event, int]]) -> list[Operation]:
    """Equal kernels added up, in order of first appearance."""
    counts: dict[tuple[object, ...], int] = {}
    samples: dict[tuple[object, ...], Event] = {}
    for event, count in events:
        sizes = (event.flops, event.bytes, event.shape, event.launches)  # a window changes the FLOPs alone
        key = (event.name, event.kind, event.phase, event.dtype, event.layout, *sizes)
        counts[key] = counts.get(key, 0) + count
        samples.setdefault(key, event)
    return [as_operation(samples[key], count) for key, count in counts.items()]


def step_operations(architecture: Architecture, run: Run, *, platform: str = "cuda") -> tuple[Operation, ...]:
    """Everything one GPU executes in one optimizer step, recomputation and collectives included.

    Of a pipeline, the GPU that has most to do: one of the last stage, which has the head, unless it lacks layers.
    `platform` is ``cuda`` or ``cpu``: they differ in 4-bit adapters and in how the optimizer batches.
    """
    if is_split(run):
        return part_operations(architecture, run, busiest_stage(architecture, run, platform), platform=platform)
    return whole_operations(architecture, run, platform=platform)


def busiest_stage(architecture: Architecture, run: Run, platform: str = "cuda") -> int:
    """The stage with most FLOPs: the last one where all have as many layers of every kind."""
    last = run.pp - 1
    alike = len({group.layer for group in architecture.groups}) == 1
    if alike and not is_uneven(architecture.num_layers, run):
        return last
    stages = [stage for stage, _ in stages_counted(architecture, run)]
    work = {stage: total_flops(part_operations(architecture, run, stage, platform=platform)) for stage in stages}
    return max(stages, key=lambda stage: work[stage])


@lru_cache(maxsize=256)
def part_operations(
    architecture: Architecture, run: Run, stage: int, *, platform: str = "cuda"
) -> tuple[Operation, ...]:
    """What one GPU of a pipeline stage executes of a model that several GPUs split."""
    here, local = local_architecture(architecture, run, stage), local_run(run)
    alone = whole_operations(here, local, platform=platform)
    kernels = [each for op in alone for each in beside_products(placed(op, architecture, run), run)]
    return ordered([*kernels, *exchange_operations(architecture, run, stage)])


@lru_cache(maxsize=256)
def whole_operations(architecture: Architecture, run: Run, *, platform: str = "cuda") -> tuple[Operation, ...]:
    """What one GPU executes of a model whose every layer it computes by itself."""
    stack = short_stack(architecture, run)
    tape = write_step(stack.architecture, run, platform)
    kernels = ((e, repetitions(e, stack, run)) for e in tape.events if e.kind is not None)
    operations = merged(kernels)
    kernel = FLASH_LAYOUTS.get(run.attn_implementation, NATIVE if run.fuses("attention") else "")
    if kernel:
        operations = [replace(o, layout=kernel) if o.kind is Kind.ATTENTION else o for o in operations]
    operations = [o for o in operations if o.name != LEAF_SUM or sums_whole(run)]
    operations += spread_operations(architecture, run, platform=platform)
    operations += communication_operations(architecture, run)
    operations += host_operations(architecture, run)
    return ordered(operations)


def spread_operations(architecture: Architecture, run: Run, *, platform: str = "cuda") -> list[Operation]:
    """What depends on how the job is spread, collectives apart: the GPU's update, or what gradients go through that are
    updated in the host, and copies in its own memory."""
    copies = copy_operations(architecture, run)
    if run.offload == "none":
        return [*own_update(architecture, run, platform=platform), *copies]
    return [*copies, *(offloaded_gradients(architecture, run) if run.sharding in DEEPSPEED else ())]


def ordered(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations by phase, in their order inside each."""
    return tuple(sorted(operations, key=lambda operation: PHASES.index(operation.phase)))


def flops_by_dtype(operations: Iterable[Operation], *kinds: Kind) -> dict[str, float]:
    """FLOPs of all executions by the dtype of the arithmetic, of some kinds or of all."""
    found: dict[str, float] = {}
    for operation in operations:
        if operation.flops and (not kinds or operation.kind in kinds):
            found[operation.dtype] = found.get(operation.dtype, 0.0) + operation.total_flops
    return found


def total_flops(operations: Iterable[Operation], *kinds: Kind) -> float:
    """FLOPs of all executions, of some kinds or of all."""
    return sum(operation.total_flops for operation in operations if not kinds or operation.kind in kinds)
