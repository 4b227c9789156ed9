"""Seconds of one optimizer step: operations through efficiency curves, on two clocks.

The host issues kernels, the device executes them. Both clocks run through the whole step: forward, its head
(`segments.py`), then recompute and backward together (they alternate layer by layer), once for every micro-step of
gradient accumulation, then the optimizer. Inside each segment the kernels are taken as evenly mixed,
so that a segment ends on the device when it has worked off its backlog, or when the host has issued
the last kernel, whichever is later. The host's lead is carried from segment to segment. The clocks
meet where the code reads a value from the device: at the start of a segment that has such a read
(transformers looks at the attention mask in every forward), and at the end of the step, where the
trainer reads the loss and the gradient norm. The Trainer also reads the loss after every backward, and then
keeps the host for a while in which the device has nothing to do (`trainer_loop.py`).

On a device that is its own host (`FactorSet.synchronous`, a CPU) the two times add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from tunecast.model.adapter_gaps import VISITS_OF_A_MAP, side_by_side, stands_still
from tunecast.model.columns import CACHED, scales
from tunecast.model.columns import COLUMNS as COLUMNS
from tunecast.model.columns import FLOOR as FLOOR
from tunecast.model.curve_names import curve_key as curve_key
from tunecast.model.curve_names import find_curve as find_curve
from tunecast.model.curves import Array
from tunecast.model.exposed import EXPOSED, EXPOSED_LATE
from tunecast.model.factors import FactorSet
from tunecast.model.host import HOST_COLUMNS as HOST_COLUMNS
from tunecast.model.host import UNITS, WALKED, host_seconds
from tunecast.model.links import communication_seconds as communication_seconds
from tunecast.model.operation import Kind, Operation
from tunecast.model.passes import Passes
from tunecast.model.phase_table import PhaseTable, phase_table
from tunecast.model.run import Run
from tunecast.model.segments import FORWARD, HEAD, passes_of, told
from tunecast.model.slow_host import LOG_STEP as LOG_STEP
from tunecast.model.slow_host import host_steps as host_steps
from tunecast.model.slow_host import with_slow_host
from tunecast.model.step_seconds import StepTime as StepTime
from tunecast.model.trainer_loop import walk_log_sd
from tunecast.model.value import at_least_to, lognormal

ROUNDED = 1e-12
"""Share of a step that its parts may miss by their rounding."""
ATTENTION = COLUMNS.index(str(Kind.ATTENTION))
COMPUTE = (str(Kind.GEMM), str(Kind.ATTENTION))
SCALES = {f"scale.{column}": [place] for place, column in enumerate(COLUMNS)}
SCALES[f"scale.{Kind.MEMORY}"].append(COLUMNS.index(CACHED))
"""Factors that multiply columns of the device's seconds, and which (`columns.scales`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where the two clocks stood."""

    step_s: float
    device_s: float
    """Seconds the device was busy, communication that it waited for included."""
    host_s: float
    """Seconds the host was busy: it issued, or the Trainer kept it."""
    exposed_communication_s: float
    segments_s: tuple[float, ...]
    """Seconds between the ends of segments on the device, all micro-steps summed; they and the overhead sum up."""
    bubble_s: float
    """Seconds in which the pipeline fills and drains, part of the forward and backward segments."""
    trainer_s: float
    """Seconds in which the Trainer keeps the host and the device has no work, part of the segments."""
    units_s: float
    """Seconds in which the device waits for the host between adapters that are units of FSDP."""

    @property
    def paused_s(self) -> float:
        """Seconds in which either keeps the host."""
        return self.trainer_s + self.units_s


def scalars(factors: FactorSet) -> dict[str, float]:
    """All scalar factors by name."""
    return {name: factor.value for name, factor in factors.factors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Several phase tables as one, run by run in front, so that a fit moves all their clocks at once."""

    device_s: Array
    launches: Array
    communication_s: Array
    meets: Array
    micro_steps: Array
    once_s: Array
    blocking_s: Array
    ring_s: Array
    ring_room_frac: Array
    gap_visits: Array
    gap_launches: Array
    gap_work_s: Array
    """(runs, segments, gaps), as many as the run with most has; in every pass."""
    asks_late: Array
    """(runs, segments) 1 or 0."""
    bubble_frac: Array

    @property
    def passes(self) -> Array:
        """(runs, segments): how often each segment runs in an optimizer step."""
        return passes_of(self.micro_steps)


def stacked(tables: Sequence[PhaseTable]) -> Stack:
    """Tables of several runs, in order."""
    return Stack(
        device_s=np.array([t.device_s for t in tables]),
        launches=np.array([t.launches for t in tables]),
        communication_s=np.array([t.communication_s for t in tables]),
        meets=np.array([t.meets for t in tables]),
        micro_steps=np.array([t.micro_steps for t in tables], dtype=float),
        once_s=np.array([t.once_s for t in tables]),
        blocking_s=np.array([t.blocking_s for t in tables]),
        ring_s=np.array([t.ring_s for t in tables]),
        ring_room_frac=np.array([t.ring_room_frac for t in tables]),
        gap_visits=side_by_side([t.gap_visits for t in tables]),
        gap_launches=side_by_side([t.gap_launches for t in tables]),
        gap_work_s=side_by_side([t.gap_work_s for t in tables]),
        asks_late=np.array([t.asks_late for t in tables]),
        bubble_frac=np.array([t.bubble_frac for t in tables]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Seconds per pass of every (run, segment) on each clock.

    ``once`` is what of the waiting comes once a step, in all; ``lead`` how far the host may run ahead: a full launch
    queue of this segment's kernels; ``walks`` what the Trainer does while the device has no work; ``stands`` how long
    the device waits for the host in segments where both meet at every map (`adapter_gaps`), whose ``host`` is 0:
    ``issue`` has what the host issues in all of them.
    """

    busy: Array
    host: Array
    wait: Array
    once: Array
    lead: Array
    walks: Array
    stands: Array
    issue: Array


def _load(stack: Stack, values: Mapping[str, float], *, synchronous: bool) -> _Load:
    scale = scales(values)
    issue = host_seconds(values, synchronous=synchronous)
    walks, issue[WALKED] = stack.launches[:, :, WALKED] * issue[WALKED], 0.0
    work, host = stack.device_s @ scale, stack.launches @ issue
    visits = stack.launches[:, :, UNITS] * issue[UNITS]
    meets = stack.gap_visits.sum(axis=2) > 0.0
    link = values.get("scale.link", 1.0)
    wait, once = exposed_communication(stack, work, values, link)
    wait = wait + exposed_ring(stack, stack.device_s[:, :, ATTENTION] * scale[ATTENTION], link)
    lead = np.full_like(work, np.inf)
    if "launch_queue_depth" in values:
        issued = stack.launches[:, :, : HOST_COLUMNS.index("calls")].sum(axis=2)
        full = (work + wait) * values["launch_queue_depth"] / np.maximum(issued, 1.0)
        lead = np.where(issued > 0.0, full, np.inf)
    return _Load(
        busy=work + wait,
        host=np.where(meets, 0.0, host),
        wait=wait,
        once=once,
        lead=np.where(meets, 0.0, lead),
        walks=walks,
        stands=waits_in_gaps(stack, work, host - visits, visits),
        issue=host,
    )


def waits_in_gaps(stack: Stack, work: Array, launches_s: Array, visits_s: Array) -> Array:
    """(runs, segments): seconds per pass in which the device waits for the host between adapters (`adapter_gaps`).

    `launches_s` and `visits_s` are the host's seconds of a segment; a gap has as much of them as of its launches and
    visits.
    """

    def parts(whole: Array, of: Array) -> Array:
        every = of.sum(axis=2, keepdims=True)
        return np.asarray(whole[:, :, None] * np.divide(of, every, out=np.zeros_like(of), where=every > 0.0))

    waits = np.zeros(work.shape)
    runs = np.flatnonzero(stack.gap_visits.any(axis=(1, 2)))
    if len(runs):
        unscaled, visits = stack.device_s[runs].sum(axis=2), stack.gap_visits[runs]
        slower = np.divide(work[runs], unscaled, out=np.ones_like(unscaled), where=unscaled > 0.0)
        waits[runs] = stands_still(
            stack.gap_work_s[runs] * slower[:, :, None],
            parts(launches_s[runs], stack.gap_launches[runs]),
            parts(visits_s[runs], visits),
            visits / VISITS_OF_A_MAP,
        )
    return waits


def exposed_communication(
    stack: Stack, work: Array, values: Mapping[str, float], link: float = 1.0
) -> tuple[Array, Array]:
    """(runs, segments): seconds per pass that a step is longer for links; of these, what comes once a step, in all.

    A step is longer by a share of all that runs beside work (`exposed`), or by what is longer than that work, whichever
    is more. What comes in every pass runs beside that pass's work; what comes once, beside that of the last pass as
    well; what blocks, beside nothing. The head's work is beside what the forward sends.
    """
    beside = work.copy()
    beside[:, FORWARD] += work[:, HEAD]
    share = np.where(stack.asks_late > 0.0, values.get(EXPOSED_LATE, 1.0), values.get(EXPOSED, 1.0))

    def longer(sent: Array) -> Array:
        return np.asarray(np.maximum(share * sent, sent - beside))

    always = longer(link * stack.communication_s)
    last = longer(link * (stack.communication_s + stack.once_s)) - always
    return np.asarray(always + last / stack.passes + link * stack.blocking_s), last


def exposed_ring(stack: Stack, attention_s: Array, link: float = 1.0) -> Array:
    """(runs, segments): seconds per pass that attention waits for keys, values and gradients that go around."""
    return np.asarray(np.maximum(link * stack.ring_s - stack.ring_room_frac * attention_s, 0.0))


def _segment_ends(stack: Stack, load: _Load, *, synchronous: bool) -> tuple[Array, Array]:
    """(runs, segments): device seconds between the ends of segments, micro-steps summed, and of these the seconds in
    which a pipeline fills and drains. Neither the update nor what comes once a step is waited for stage by stage."""
    passes = Passes(
        busy=load.busy,
        issue=load.host,
        queue=load.lead,
        meets=stack.meets,
        micro_steps=stack.micro_steps,
        synchronous=synchronous,
    )
    worked = passes.seconds() + stack.passes * (load.walks + load.stands)
    idle = stack.bubble_frac * np.maximum(worked - load.once, 0.0)
    return worked + idle, idle


def step_seconds(stack: Stack, values: Mapping[str, float], *, synchronous: bool) -> Array:
    """Seconds of one optimizer step of each run."""
    spent, _ = _segment_ends(stack, _load(stack, values, synchronous=synchronous), synchronous=synchronous)
    return np.asarray(spent.sum(axis=1) + values.get("step_overhead_s", 0.0))


def run_clocks(table: PhaseTable, values: Mapping[str, float], *, synchronous: bool) -> Clocks:
    """The two clocks through one step.

    ``values`` are scalar factors: ``scale.<column>``, ``scale.link``, ``host_s_per_launch``,
    ``scale.host_<host column>``, ``step_overhead_s``, the shares of `exposed`, ``launch_queue_depth``; absent ones are
    neutral.
    """
    stack = stacked([table])
    load = _load(stack, values, synchronous=synchronous)
    ends, idle = _segment_ends(stack, load, synchronous=synchronous)
    spent, passes = ends[0], stack.passes[0]
    return Clocks(
        step_s=float(spent.sum()) + values.get("step_overhead_s", 0.0),
        device_s=float(passes @ load.busy[0]),
        host_s=float(passes @ (load.issue + load.walks)[0]),
        exposed_communication_s=float(passes @ load.wait[0]),
        bubble_s=float(idle.sum()),
        trainer_s=float(passes @ load.walks[0]),
        units_s=float(passes @ load.stands[0]),
        segments_s=tuple(float(end) for end in spent),
    )


def log_gradient(
    stack: Stack,
    values: Mapping[str, float],
    names: Sequence[str],
    *,
    synchronous: bool,
    by: Mapping[str, float] | None = None,
) -> Array:
    """(runs, names): central differences of log(step seconds) by log of each named factor, moved `by` as much."""
    steps = {name: LOG_STEP for name in names} | dict(by or {})
    of_columns = [name for name in names if name in SCALES]
    slopes = _column_slopes(stack, values, of_columns, steps, synchronous=synchronous) if of_columns else {}

    def at(name: str, moved_by: float) -> Array:
        moved = {**values, name: values.get(name, 1.0) * float(np.exp(moved_by))}
        return np.asarray(np.log(step_seconds(stack, moved, synchronous=synchronous)))

    for name in names:
        if name not in slopes:
            slopes[name] = (at(name, steps[name]) - at(name, -steps[name])) / (2 * steps[name])
    return np.stack([slopes[name] for name in names], axis=1)


def _column_slopes(
    stack: Stack, values: Mapping[str, float], names: Sequence[str], steps: Mapping[str, float], *, synchronous: bool
) -> dict[str, Array]:
    """Of the scale of each column, what `log_gradient` says; all are moved side by side, each in runs of its own."""
    moves = [(name, sign * steps[name]) for name in names for sign in (1.0, -1.0)]
    device_s = np.repeat(stack.device_s[None], len(moves), axis=0)
    for moved, (name, by) in zip(device_s, moves, strict=True):
        moved[..., SCALES[name]] *= np.exp(by)
    side_by_side = {
        each.name: np.concatenate([getattr(stack, each.name)] * len(moves))
        for each in fields(stack)
        if each.name != "device_s"
    }
    together = Stack(device_s=device_s.reshape(-1, *stack.device_s.shape[1:]), **side_by_side)
    logs = np.log(step_seconds(together, values, synchronous=synchronous)).reshape(len(names), 2, -1)
    return {name: (up - down) / (2 * steps[name]) for name, (up, down) in zip(names, logs, strict=True)}


def log_sd_parts(table: PhaseTable, factors: FactorSet) -> dict[str, float]:
    """Standard deviations of log(step time): of the curves, of the fitted factors, and of steps left out."""
    values, stack = scalars(factors), stacked([table])
    by_kind = log_gradient(stack, values, [f"scale.{c}" for c in COLUMNS], synchronous=factors.synchronous)[0]
    parts = {"curves": float(np.sqrt(by_kind**2 @ table.column_log_variance)), "left-out steps": factors.step_log_sd}
    if factors.step_params:
        covariance = np.array(factors.step_covariance)
        own = host_steps(factors.step_params, covariance)
        slope = log_gradient(stack, values, factors.step_params, synchronous=factors.synchronous, by=own)[0]
        parts["factors"] = float(np.sqrt(max(slope @ covariance @ slope, 0.0)))
    return parts


def slow_host_values(table: PhaseTable, factors: FactorSet) -> dict[str, float]:
    """The scalar factors with those of the host as slow as the upper end of what it may take for this step."""
    launches = passes_of(table.micro_steps) @ table.launches

    def host_s(values: Mapping[str, float]) -> float:
        return float(launches @ host_seconds(values, synchronous=factors.synchronous))

    return with_slow_host(scalars(factors), factors.step_params, np.array(factors.step_covariance), host_s)


def _parts(table: PhaseTable, clocks: Clocks, values: dict[str, float]) -> dict[str, float]:
    passes = passes_of(table.micro_steps)
    by_kind = passes @ table.device_s * scales(values)
    by_kind[COLUMNS.index(str(Kind.MEMORY))] += by_kind[COLUMNS.index(CACHED)]
    parts = {c: float(by_kind[i]) for i, c in enumerate(COLUMNS) if by_kind[i] > 0 and c != CACHED}
    overhead_s = values.get("step_overhead_s", 0.0)
    update_s = table.host_update_s * values.get("scale.link", 1.0)
    parts["communication"] = max(clocks.exposed_communication_s - update_s, 0.0)
    waited_s = clocks.step_s - (clocks.device_s + clocks.bubble_s + clocks.paused_s + overhead_s)
    parts["host"] = (waited_s if waited_s > ROUNDED * clocks.step_s else 0.0) + update_s
    seldom = {"bubble": clocks.bubble_s, "trainer": clocks.trainer_s, "units": clocks.units_s}
    parts |= {"overhead": overhead_s} | {name: part for name, part in seldom.items() if part}
    return parts


def _bound_by(clocks: Clocks, parts: dict[str, float], bytes_share: float, *, synchronous: bool) -> str:
    """What to improve first: the host when it issues for longer than the device works and than a pipeline's bubble,
    else the largest share. `bytes_share` of the products' seconds is bandwidth's.

    The host's share is the wait for its launches and for the update that it does under offloading.
    """
    compute = sum(parts.get(column, 0.0) for column in COMPUTE) - bytes_share * parts.get(str(Kind.GEMM), 0.0)
    floor = parts.get(FLOOR, 0.0)
    bandwidth = clocks.device_s - clocks.exposed_communication_s - compute - floor
    waiting = {"communication": parts["communication"], "pipeline bubble": clocks.bubble_s}
    shares = {
        "compute": compute,
        "bandwidth": bandwidth,
        FLOOR: floor,
        **waiting,
        "host": parts["host"] + clocks.paused_s,
    }
    if clocks.host_s - clocks.trainer_s > max(clocks.device_s, clocks.bubble_s) and not synchronous:
        return "host"
    return max(shares, key=lambda name: shares[name])


def step_time(operations: Sequence[Operation], factors: FactorSet, *, run: Run) -> StepTime:
    """Seconds of one optimizer step of the whole job, with its 80% interval.

    The interval joins independent log-normal errors: of the curves at these shapes, of the fitted in-step
    factors (it grows with the distance from the measured steps), what remained on steps left out of the
    fit, and of the Trainer's own time. Where both clocks are close, the host may still decide (`slow_host`).
    """
    table, values = phase_table(operations, factors, run=run), scalars(factors)
    clocks = run_clocks(table, values, synchronous=factors.synchronous)
    slow = run_clocks(table, slow_host_values(table, factors), synchronous=factors.synchronous)
    spread = log_sd_parts(table, factors) | {"trainer": walk_log_sd(factors) * clocks.trainer_s / clocks.step_s}
    log_sd = float(np.sqrt(sum(part**2 for part in spread.values())))
    parts = _parts(table, clocks, values)
    phases = told(clocks.segments_s) | {"overhead": parts["overhead"]}
    return StepTime(
        step_time_s=at_least_to(slow.step_s, lognormal(clocks.step_s, log_sd)),
        slow_host_s=slow.step_s,
        parts_s=parts,
        phases_s=phases,
        device_s=clocks.device_s,
        host_s=clocks.host_s,
        bound_by=_bound_by(clocks, parts, table.products_waiting_frac, synchronous=factors.synchronous),
        log_sd=log_sd,
        log_sd_parts=spread,
    )
