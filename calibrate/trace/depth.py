"""From two shallow traces to the exact trace of a deep model.

Where all layers are equal, the stream of N layers is the stream of three with its middle layer
repeated, and every place's memory is linear in the depth. The optimizer phase alone is not (its
kernels batch tensors of all layers), so it is traced by itself over all parameters. A model of several
kinds of layers is traced at its full depth.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tunecast.calibrate.trace import hf
from tunecast.calibrate.trace.direct import trace_depth, trace_update
from tunecast.calibrate.trace.ledger import Peak
from tunecast.calibrate.trace.result import Place, TensorSpec, Trace, timeline
from tunecast.model.architecture import Architecture
from tunecast.model.operation import Operation, Phase
from tunecast.model.run import Run

Told = Callable[[str], None]

SHALLOW = 3
"""Fewest layers with a first, a middle and a last one."""
MIDDLE = 1
"""The middle layer of a `SHALLOW` trace."""
MICRO_BATCHES = 2
"""Micro-batches that are traced: the first makes the gradients, all later ones add to them."""
LAYER_IN_NAME = re.compile(r"(?<=\.)\d+(?=\.)")
"""The first number in a parameter's path: its layer, whatever the family calls the list of layers."""


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
    depth = architecture.num_layers
    every = run.checkpoint_every if run.gradient_checkpointing else 1
    if depth <= SHALLOW + 1 or every > 1 or not hf.layers_alike(architecture):
        told(f"tracing all {depth} layers")
        return trace_depth(architecture, traced_run, depth, platform=platform)
    traces = []
    for index, shallow in enumerate((SHALLOW, SHALLOW + 1)):
        told(f"tracing {index + 1} of 3: {shallow} of {depth} layers")
        traces.append(trace_depth(architecture, traced_run, shallow, platform=platform))
    told("tracing 3 of 3: the update")
    return extend(*traces, depth, traced_run, platform=platform)


def extend(low: Trace, high: Trace, num_layers: int, run: Run, *, platform: str = "cuda") -> Trace:
    """Extrapolate traces of `SHALLOW` and `SHALLOW` + 1 layers to `num_layers`."""
    steps = num_layers - SHALLOW
    trained = tuple(_repeat_specs(low.trained, num_layers))
    rest_parts = _linear(low.rest_parts, high.rest_parts, steps)
    update, update_peak = trace_update(trained, run, rest_parts, platform=platform)
    peaks = {**_extend_peaks(low.peaks, high.peaks, num_layers), Place(moment="optimizer"): update_peak}
    loaded_bytes = low.memory.loaded_bytes + steps * (high.memory.loaded_bytes - low.memory.loaded_bytes)
    layers = (op for op in low.stream if op.phase is not Phase.OPTIMIZER)
    return Trace(
        stream=(*_repeat_layers(layers, num_layers), *update),
        memory=timeline(peaks, rest_parts, loaded_bytes),
        trainable_params=low.trainable_params + steps * (high.trainable_params - low.trainable_params),
        total_params=low.total_params + steps * (high.total_params - low.total_params),
        trained=trained,
        peaks=peaks,
        rest_parts=rest_parts,
    )


def _linear(low: dict[str, int], high: dict[str, int], steps: int) -> dict[str, int]:
    return {part: low[part] + steps * (high[part] - low[part]) for part in low}


def _extend_peaks(low: dict[Place, Peak], high: dict[Place, Peak], num_layers: int) -> dict[Place, Peak]:
    """Places of the deep model: ends and their neighbours, between which memory runs linearly."""
    deeper = {0: 0, MIDDLE: MIDDLE, SHALLOW - 1: SHALLOW}
    extended: dict[Place, Peak] = {}
    for place, peak in low.items():
        if place.moment == "optimizer":
            continue
        twins = [(place, place)]
        if place.layer is not None:
            twins = [(replace(place, layer=deeper[place.layer]), replace(place, layer=_moved(place.layer, num_layers)))]
        if place.layer == MIDDLE:
            twins.append((replace(place, layer=SHALLOW - 1), replace(place, layer=num_layers - 2)))
        for twin, target in twins:
            parts = _linear(peak.parts, high[twin].parts, num_layers - SHALLOW)
            extended[target] = Peak(bytes=sum(parts.values()), parts=parts)
    return extended


def _moved(layer: int, num_layers: int) -> int:
    """Where a layer of the shallow trace is in the deep one."""
    return num_layers - 1 if layer == SHALLOW - 1 else layer


def _repeat_layers(stream: Iterator[Operation], num_layers: int) -> Iterator[Operation]:
    """The middle layer's block repeated in each pass, upwards in forward, downwards in backward."""
    for layer, block in itertools.groupby(stream, key=lambda op: op.layer):
        operations = list(block)
        if layer is None:
            yield from operations
        elif layer != MIDDLE:
            yield from (replace(op, layer=_moved(layer, num_layers)) for op in operations)
        else:
            middle = range(MIDDLE, num_layers - 1)
            forward = operations[0].phase is Phase.FORWARD
            for index in middle if forward else reversed(middle):
                yield from (replace(op, layer=index) for op in operations)


def _repeat_specs(trained: Sequence[TensorSpec], num_layers: int) -> Iterator[TensorSpec]:
    for layer, block in itertools.groupby(trained, key=lambda spec: _layer_of(spec.name)):
        specs = list(block)
        for target in _targets(layer, num_layers):
            yield from (replace(spec, name=LAYER_IN_NAME.sub(str(target), spec.name, count=1)) for spec in specs)


def _targets(layer: int | None, num_layers: int) -> Iterable[int | None]:
    """Where a layer of the shallow trace is in the deep one, the middle one many times."""
    if layer is None:
        return (None,)
    return range(MIDDLE, num_layers - 1) if layer == MIDDLE else (_moved(layer, num_layers),)


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
