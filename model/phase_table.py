"""One run's operations on one device's curves, added up by what the clocks tell apart (`time`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunecast.model.adapter_gaps import gaps_of, no_gaps
from tunecast.model.cold_kernels import is_cold
from tunecast.model.columns import COLUMNS, FLOOR, share_columns
from tunecast.model.context_parallel import room_fracs
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curve_shares import bytes_frac, shares
from tunecast.model.curves import Array, Columns, columns, seconds
from tunecast.model.exposed import asks_late, waits_in_layers
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.hooks import adapter_visits_of, has_hooks, visits_of, waits_for_units, wraps_adapters
from tunecast.model.host import HOST_COLUMNS, UNITS, enters_layer, goes_over_lists, host_issues, with_trainer
from tunecast.model.links import bubble_frac, communication_seconds, host_updates, no_seconds
from tunecast.model.operation import SYNCHRONISATION, Kind, Operation
from tunecast.model.run import Run
from tunecast.model.segments import HEAD, HEAD_PRODUCT, OPTIMIZER_SEGMENT, SEGMENTS, passes_of, segment_of
from tunecast.model.trainer_loop import modules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTable:
    """One run's operations on one device's curves, before in-step corrections: all that the clocks read.

    Forward and backward are per micro-step, the optimizer segment per optimizer step.
    """

    device_s: Array
    """(segments, columns), see `COLUMNS`."""
    launches: Array
    """(segments, host columns), see `HOST_COLUMNS`."""
    communication_s: Array
    """(segments,) on the link in every pass, what hides beside work not yet taken off."""
    meets: Array
    """(segments,) 1 where the host waits for the device at the start, else 0."""
    micro_steps: int
    column_log_variance: Array
    """(columns,) variance of the log of each column's summed seconds, from its curve."""
    once_s: Array = field(default_factory=no_seconds)
    """(segments,) on the link in the last pass only (gradients that accumulated), what hides not yet taken off."""
    blocking_s: Array = field(default_factory=no_seconds)
    """(segments,) on the link in every pass, with nothing to hide behind."""
    ring_s: Array = field(default_factory=no_seconds)
    """(segments,) on the link in every pass, hiding behind attention alone."""
    ring_room_frac: Array = field(default_factory=no_seconds)
    """(segments,) share of the attention's seconds that it hides behind, see `context_parallel.room_fracs`."""
    gap_visits: Array = field(default_factory=no_gaps)
    """(segments, gaps) visits of adapters that are units, in every pass (`adapter_gaps`)."""
    gap_launches: Array = field(default_factory=no_gaps)
    """(segments, gaps) launches in every pass."""
    gap_work_s: Array = field(default_factory=no_gaps)
    """(segments, gaps) device seconds in every pass."""
    asks_late: Array = field(default_factory=no_seconds)
    """(segments,) 1 where collectives are asked for as they are needed (`exposed`), else 0."""
    bubble_frac: Array = field(default_factory=no_seconds)
    """Idle time of a pipeline stage over the time it works in forward and backward."""
    host_update_s: float = 0.0
    """Of `blocking_s`: the update that the host's processors do under offloading, or that waits for paged state."""
    products_waiting_frac: float = 0.0
    """Share of the products' seconds in which they wait for memory, not for arithmetic: bandwidth bounds them there."""


def merged(operations: Sequence[Operation]) -> list[tuple[Operation, float]]:
    """Equal operations as one, with their executions per optimizer step: layers repeat the same few.

    Names count only where a clock tells by them: a kernel's segment, whether a layer is entered with it, whether Python
    goes over the tensors of an update for it, and whether it may find what it reads in a cache.
    """
    counts: dict[tuple[object, ...], float] = {}
    first: dict[tuple[object, ...], Operation] = {}
    for o in operations:
        told_apart = (segment_of(o), enters_layer(o), goes_over_lists(o), is_cold(o.name))
        key = (o.kind, o.phase, o.dtype, o.shape, o.layout, o.bytes, o.flops, o.launches, *told_apart)
        counts[key] = counts.get(key, 0.0) + o.count
        first.setdefault(key, o)
    return [(first[key], count) for key, count in counts.items()]


def _by_curve(
    operations: Sequence[Operation], factors: FactorSet
) -> dict[tuple[str, Kind], list[tuple[Operation, float]]]:
    """Operations by the curve they follow, and their kind; those that move bytes by a kernel without a curve err as all
    of `memory` do."""
    groups: dict[tuple[str, Kind], list[tuple[Operation, float]]] = {}
    for operation, count in merged(operations):
        if operation.kind is not Kind.COMMUNICATION:
            key = curve_key(operation)
            falls_back = operation.kind is Kind.MEMORY and key not in factors.curves
            key = str(Kind.MEMORY) if falls_back else key
            groups.setdefault((key, operation.kind), []).append((operation, count))
    return groups


def rows_by_curve(operations: Sequence[Operation]) -> dict[str, list[int]]:
    """Which operations follow each curve; collectives follow none."""
    found: dict[str, list[int]] = {}
    for row, operation in enumerate(operations):
        if operation.kind is not Kind.COMMUNICATION:
            found.setdefault(curve_key(operation), []).append(row)
    return found


def seconds_each(operations: Sequence[Operation], factors: FactorSet) -> Array:
    """(operations,) device seconds of one execution of each; 0 of collectives."""
    found = np.zeros(len(operations))
    for key, rows in rows_by_curve(operations).items():
        found[rows] = seconds(find_curve(key, factors), columns([operations[row] for row in rows])).seconds
    return found


def meets_of(operations: Sequence[Operation]) -> Array:
    """(segments,) 1 where the host reads a value of the device at the start."""
    reads = {segment_of(o) for o in operations if o.name == SYNCHRONISATION}
    return np.array([float(segment in reads) for segment in range(len(SEGMENTS))])


def idle_fracs(operations: Sequence[Operation], run: Run) -> Array:
    """(segments,) idle over working time of a pipeline stage: it waits while the others fill and drain, which have no
    head. How much of its own segments the head is, its FLOPs say."""
    idle = bubble_frac(run.pp, run.gradient_accumulation_steps, run.pp_interleave)
    if not idle:
        return no_seconds()
    whole, head = no_seconds(), no_seconds()
    for operation in operations:
        segment = segment_of(operation)
        whole[segment] += operation.total_flops
        head[segment] += operation.total_flops * (operation.name == HEAD_PRODUCT)
    others = 1.0 - np.divide(head, whole, out=no_seconds(), where=whole > 0.0)
    others[[OPTIMIZER_SEGMENT, HEAD]] = 0.0
    return np.asarray(idle * others)


def phase_table(operations: Sequence[Operation], factors: FactorSet, *, run: Run) -> PhaseTable:
    """Add up the seconds of all operations by segment and column."""
    micro = run.gradient_accumulation_steps
    passes = passes_of(micro)
    device = np.zeros((len(SEGMENTS), len(COLUMNS)))
    launches, variance = np.zeros((len(SEGMENTS), len(HOST_COLUMNS))), np.zeros(len(COLUMNS))
    products_s = waiting_s = 0.0
    for (key, kind), group in _by_curve(operations, factors).items():
        curve, cols = find_curve(key, factors), columns([o for o, _ in group])
        timed, parts = seconds(curve, cols), shares(curve, cols)
        count, segment = np.array([c for _, c in group]), np.array([segment_of(o) for o, _ in group])
        work_s = timed.seconds * count
        for column, part in zip(share_columns(kind), parts, strict=True):
            np.add.at(device[:, column], segment, work_s * part)
            if part.any() and COLUMNS[column] != FLOOR:
                variance[column] += timed.sum_variance(work_s * part)
        if kind is Kind.GEMM:
            own_s = work_s * (1.0 - parts[1:].sum(axis=0))
            products_s += float(own_s.sum())
            waiting_s += _waiting_seconds(curve, cols, own_s)
        np.add.at(launches, segment, count[:, None] * host_issues([o for o, _ in group], cols))
    meets, counts = meets_of(operations), np.array([[o.count] for o in operations])
    if has_hooks(run):
        launches[:, HOST_COLUMNS.index("hooks")] += visits_of(operations, counts)[0]
    if wraps_adapters(run):
        launches[:, UNITS] += adapter_visits_of(operations, counts, run)[0]
    visits = launched = between_s = no_gaps()
    if waits_for_units(run):
        gaps = gaps_of(operations, counts, run)
        (visits,), (launched,) = gaps.visits_in(), gaps.launches_in()
        (between_s,) = gaps.work_s(seconds_each(operations, factors))
    if run.trainer_loop:
        modules, own = modules_of(operations, counts, run), np.array([micro], dtype=float)
        (launches,), (meets,) = with_trainer(launches[None], meets[None], modules, own, np.array([True]))
    total = device.sum(axis=0)
    return PhaseTable(
        device_s=device / passes[:, None],
        launches=launches / passes[:, None],
        communication_s=communication_seconds(operations, factors, run=run, when="beside") / passes,
        once_s=communication_seconds(operations, factors, run=run, when="once"),
        blocking_s=communication_seconds(operations, factors, run=run, when="blocking") / passes,
        ring_s=communication_seconds(operations, factors, run=run, when="ring") / passes,
        ring_room_frac=room_fracs(run),
        gap_visits=visits / passes[:, None],
        gap_launches=launched / passes[:, None],
        gap_work_s=between_s / passes[:, None],
        asks_late=asks_late(run, waits_in_layers(operations, counts)),
        bubble_frac=idle_fracs(operations, run),
        host_update_s=float(communication_seconds(host_updates(operations), factors, run=run).sum()),
        meets=meets,
        micro_steps=micro,
        products_waiting_frac=waiting_s / products_s if products_s else 0.0,
        column_log_variance=np.divide(variance, total**2, out=np.zeros_like(variance), where=variance > 0.0),
    )


def _waiting_seconds(curve: Curve, cols: Columns, own_s: Array) -> float:
    """Of the products' own seconds, those that they wait for bytes; where the curve sets these apart, they are in the
    column of memory already."""
    return 0.0 if curve.params.get("bytes_apart") else float(own_s @ bytes_frac(curve, cols))
