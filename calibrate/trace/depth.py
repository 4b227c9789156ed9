"""From two shallow traces to the exact trace of a deep model.

Where the kinds of layers repeat (all equal, a few dense ones and then experts, one global after five local ones), the
stream of N layers is that of a few with a unit of the pattern repeated, and every place's memory is linear in the
number of units. The optimizer phase alone is not (its kernels batch tensors of all layers), so it is traced by itself
over all parameters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from tunecast.calibrate.trace import hf
from tunecast.calibrate.trace.direct import trace_depth, trace_update
from tunecast.calibrate.trace.ledger import Peak
from tunecast.calibrate.trace.refusals import NEEDED, reason_of
from tunecast.calibrate.trace.result import Place, TensorSpec, Trace, timeline
from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError
from tunecast.model.architecture import Architecture
from tunecast.model.host import SCORES
from tunecast.model.operation import FLASH, Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import HEAD_PRODUCT

Told = Callable[[str], None]

MICRO_BATCHES = 2
"""Micro-batches that are traced: the first makes the gradients, all later ones add to them."""
LAYER_IN_NAME = re.compile(r"(?<=\.)\d+(?=\.)")
"""The first number in a parameter's path: its layer, whatever the family calls the list of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Kinds of layers that repeat: after `start` layers, `units` times `period` of them, and a part of a unit."""

    start: int
    period: int
    units: int
    rest: int
    """Layers of the last, incomplete unit."""

    @property
    def fewest(self) -> int:
        """Units of the shallower trace: the first and the last two layers of a deep model are in different ones."""
        return 3 if self.period == 1 else 2

    @property
    def repeated(self) -> range:
        """Layers of the deeper trace's unit that stands for all in the middle."""
        return range(self.start + self.period, self.start + 2 * self.period)

    def depth(self, units: int) -> int:
        """Layers of a trace with so many units."""
        return self.start + units * self.period + self.rest

    def unit_of(self, layer: int | None) -> str:
        """Where a layer of the deeper trace is: ``outside``, ``below`` the repeated unit, ``repeated`` or ``above``."""
        if layer is None:
            return "outside"
        return "repeated" if layer in self.repeated else "below" if layer < self.repeated.start else "above"

    def shifts(self, where: str) -> range:
        """How far layers of the deeper trace are moved for the whole model; the repeated unit to many places."""
        more = (self.units - self.fewest - 1) * self.period
        return {"repeated": range(0, more + 1, self.period), "above": range(more, more + 1)}.get(where, range(1))


def find_pattern(kinds: Sequence[Hashable]) -> Pattern | None:
    """The pattern whose traces are shallowest; None when tracing all layers costs no more than two shallow traces."""
    depth, best, cost = len(kinds), None, len(kinds)
    for period in range(1, depth // 3 + 1):
        start = next((i + 1 for i in range(depth - period - 1, -1, -1) if kinds[i] != kinds[i + period]), 0)
        units, rest = divmod(depth - start, period)
        found = Pattern(start=start, period=period, units=units, rest=rest)
        both = found.depth(found.fewest) + found.depth(found.fewest + 1)
        if units > found.fewest + 1 and both < cost:
            best, cost = found, both
    return best


def trace_extended(architecture: Architecture, run: Run, *, platform: str = "cuda") -> Trace:
    """The trace at the architecture's depth, from shallow ones when it is deeper than they are."""
    trace = trace_micro_batches(architecture, run, platform=platform)
    return replace(trace, stream=tuple(repeat_micro_batches(trace.stream, run.gradient_accumulation_steps)))


def trace_micro_batches(
    architecture: Architecture, run: Run, *, platform: str = "cuda", told: Told = lambda _: None
) -> Trace:
    """The trace with at most `MICRO_BATCHES` micro-batches in its stream; memory is that of the whole run.

    `told` hears what is traced next.
    """
    traced_run = replace(run, gradient_accumulation_steps=min(run.gradient_accumulation_steps, MICRO_BATCHES))
    pattern = find_pattern(hf.kinds_of_layers(architecture, run))
    if pattern is None:
        told(f"tracing all {architecture.num_layers} layers")
        whole = real_trace(architecture, traced_run, architecture.num_layers, platform)
        return with_kernels(whole, run)
    shallow, deeper = (pattern.depth(units) for units in (pattern.fewest, pattern.fewest + 1))
    told(f"tracing 1 of 3: {shallow} of {architecture.num_layers} layers")
    low = real_trace(architecture, traced_run, shallow, platform)
    told(f"tracing 2 of 3: {deeper} of {architecture.num_layers} layers")
    high = real_trace(architecture, traced_run, deeper, platform)
    told("tracing 3 of 3: the update")
    return with_kernels(extend(low, high, pattern, traced_run, platform=platform), run)


def real_trace(architecture: Architecture, run: Run, num_layers: int, platform: str) -> Trace:
    """The trace at a depth; what transformers, PEFT or bitsandbytes refuse in words of their own is told in a sentence
    (adapters on Mamba's maps, checkpointing of a family that has none)."""
    try:
        return trace_depth(architecture, run, num_layers, platform=platform)
    except TunecastError:
        raise
    except Exception as error:  # other people's code, on any model of theirs
        if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
            raise InputError(
                f"The real training code is traced here, but {error.name} is not installed; type: pip install "
                '"tunecast[calibrate]"'
            ) from error
        raise NotSupportedError(
            f"The real code of {architecture.name} does not train so: {reason_of(error)}"
        ) from error


def with_kernels(trace: Trace, run: Run) -> Trace:
    """The trace with the kernels of its attention named where they are not what ``sdpa`` runs."""
    if run.attn_implementation != "flash_attention_2":
        return trace
    named = (replace(op, layout=FLASH) if op.kind is Kind.ATTENTION else op for op in trace.stream)
    return replace(trace, stream=tuple(named))


def with_names(trace: Trace, architecture: Architecture, run: Run) -> Trace:
    """The trace with the products named that the host's time is told by: the output head's in the forward, where its
    last segment begins, and that of scores, which attention without a fused kernel enters a layer by."""
    head_dims = {group.layer.attention.head_dim for group in architecture.groups}

    def named(op: Operation) -> Operation:
        if op.kind is not Kind.GEMM or op.phase is Phase.BACKWARD:
            return op
        if op.phase is Phase.FORWARD and op.layer is None and op.shape[1] == architecture.vocab_size:
            return replace(op, name=HEAD_PRODUCT)
        rows, columns, depth = op.shape[:3] if len(op.shape) == 4 else (0, 0, 0)
        scored = rows == columns == run.max_length and depth in head_dims and op.layout == "nt"
        return replace(op, name=SCORES) if scored else op

    return replace(trace, stream=tuple(map(named, trace.stream)))


def extend(low: Trace, high: Trace, pattern: Pattern, run: Run, *, platform: str = "cuda") -> Trace:
    """Extrapolate traces of `Pattern.fewest` units and of one more to all units."""
    steps = pattern.units - pattern.fewest
    trained = tuple(_repeat_specs(high.trained, pattern))
    rest_parts = _linear(low.rest_parts, high.rest_parts, steps)
    update, update_peak = trace_update(trained, run, rest_parts, platform=platform)
    peaks = {**_extend_peaks(low.peaks, high.peaks, pattern), Place(moment="optimizer"): update_peak}
    loaded_bytes = low.memory.loaded_bytes + steps * (high.memory.loaded_bytes - low.memory.loaded_bytes)
    layers = (op for op in high.stream if op.phase is not Phase.OPTIMIZER)
    return Trace(
        stream=(*_repeat_layers(layers, pattern), *update),
        memory=timeline(peaks, rest_parts, loaded_bytes),
        trainable_params=low.trainable_params + steps * (high.trainable_params - low.trainable_params),
        total_params=low.total_params + steps * (high.total_params - low.total_params),
        trained=trained,
        peaks=peaks,
        rest_parts=rest_parts,
    )


def _linear(low: dict[str, int], high: dict[str, int], steps: int) -> dict[str, int]:
    return {part: low[part] + steps * (high[part] - low[part]) for part in low}


def _extend_peaks(low: dict[Place, Peak], high: dict[Place, Peak], pattern: Pattern) -> dict[Place, Peak]:
    """Places of the deep model: ends and their neighbours, between which memory runs linearly."""
    steps, period = pattern.units - pattern.fewest, pattern.period
    split = pattern.start + (pattern.fewest - 1) * period
    extended: dict[Place, Peak] = {}
    for place, peak in low.items():
        if place.moment == "optimizer":
            continue
        moves = [0] if place.layer is None or place.layer < split else [1]
        if place.layer is not None and place.layer in pattern.repeated and place.layer < split:
            moves = [0, 1]  # a unit in the middle stands for the second and for the second last one
        for move in moves:
            shift = 0 if place.layer is None else move * period
            twin = replace(place, layer=place.layer + shift) if place.layer is not None else place
            target = replace(place, layer=place.layer + shift * steps) if place.layer is not None else place
            parts = _linear(peak.parts, high[twin].parts, steps)
            extended[target] = Peak(bytes=sum(parts.values()), parts=parts)
    return extended


def _repeat_layers(stream: Iterator[Operation], pattern: Pattern) -> Iterator[Operation]:
    """The repeated unit in each pass, upwards in forward, downwards in backward."""
    for unit, block in itertools.groupby(stream, key=lambda op: pattern.unit_of(op.layer)):
        operations = list(block)
        shifts = pattern.shifts(unit)
        for shift in shifts if operations[0].phase is Phase.FORWARD else reversed(shifts):
            yield from (
                op if op.layer is None or not shift else replace(op, layer=op.layer + shift) for op in operations
            )


def _repeat_specs(trained: Sequence[TensorSpec], pattern: Pattern) -> Iterator[TensorSpec]:
    for unit, block in itertools.groupby(trained, key=lambda spec: pattern.unit_of(_layer_of(spec.name))):
        specs = list(block)
        for shift in pattern.shifts(unit):
            yield from (replace(spec, name=_moved(spec.name, shift)) for spec in specs)


def _moved(name: str, shift: int) -> str:
    """A parameter's name in a layer further up."""
    return LAYER_IN_NAME.sub(lambda found: str(int(found.group()) + shift), name, count=1)


def _layer_of(name: str) -> int | None:
    found = LAYER_IN_NAME.search(name)
    return int(found.group()) if found else None


def repeat_micro_batches(stream: Sequence[Operation], micro_batches: int) -> Iterator[Operation]:
    """Repeat the second of two micro-batches until there are as many as asked for."""
    for part, times in counted_micro_batches(stream, micro_batches):
        for _ in range(times):
            yield from part


def counted_micro_batches(
    stream: Sequence[Operation], micro_batches: int
) -> tuple[tuple[Sequence[Operation], int], ...]:
    """A stream of at most two micro-batches in stretches, with how often each runs among `micro_batches`."""
    starts = [
        index
        for index, op in enumerate(stream)
        if op.phase is Phase.FORWARD and (index == 0 or stream[index - 1].phase is Phase.BACKWARD)
    ]
    update = next(index for index, op in enumerate(stream) if op.phase is Phase.OPTIMIZER)
    last = starts[-1]
    return ((stream[:last], 1), (stream[last:update], micro_batches - len(starts) + 1), (stream[update:], 1))
