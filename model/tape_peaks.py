"""Peaks of a tape: what is alive at its largest at every place of the step, and the same at the depth of a model.

A storage is alive from the kernel that writes it to the last one that reads it. Layers that repeat are written once in
the middle of a `short_stack`, and what each further one adds follows from that: a layer put in below it keeps what the
backward of the layers above still needs, one put in above it what outlives its own backward (gradients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunecast.model.operation import Phase
from tunecast.model.short_stack import ShortStack
from tunecast.model.tape import Storage, Tape
from tunecast.model.tape_parts import Event

PARTS = (
    "weights",
    "quantized",
    "adapters",
    "gradients",
    "optimizer_state",
    "activations",
    "logits",
    "scratch",
    "communication",
    "workspaces",
)
"""``activations`` include checkpoints and their gradients, ``logits`` all of vocabulary width, ``scratch``
dequantized weights and temporaries of the update, ``communication`` whatever sharding keeps whole, ``workspaces`` what
a card keeps for matrix products (`workspaces`)."""

Parts = dict[str, int]
Place = tuple[str, str, bool]
"""Moment, and position of the layer (first, second, second last, last or outside, else as `positions_in` counts it)
with whether it is the backward: autocast's copies of weights die in between, so the two grow differently with depth."""
Spot = tuple[str, str, Phase, int, bool]
"""Moment, position of the layer, phase, micro-batch, and whether the layers have had their turn: what is alive there
grows evenly with depth. A chunk of the loss made again does not see those copies, gradients of the layers are there
from the second micro-batch on, and what the forward kept goes from the head's backward to the embedding's."""


BEFORE, AFTER = " before", " after"
"""Words behind the number of layers in the positions that only patterns have."""


def last_uses(tape: Tape) -> dict[Storage, int]:
    """Index of the last event that touches each storage; gradients live until the update."""
    last: dict[Storage, int] = {}
    for index, event in enumerate(tape.events):
        for storage in event.reads:
            last[storage] = index
        for storage in event.writes:
            last[storage] = index
    for tensor in tape.grads.values():
        if tensor.storage is not None:
            last[tensor.storage] = len(tape.events)
    return last


def layer_position(layer: int | None, depth: int) -> tuple[str, ...]:
    """Names of a layer's place by which tapes of different depth compare."""
    if layer is None:
        return ("outside",)
    names = {0: "first", 1: "second"}.get(layer), {1: "last", 2: "second last"}.get(depth - layer)
    return tuple(name for name in names if name)


def positions_in(stack: ShortStack, layer: int | None) -> tuple[str, ...]:
    """Names of the places that a written layer stands for: those of `layer_position`, and the first and the last
    layers of every kind, by how many layers are before or after.

    What is alive while layers of one kind run goes up or down evenly from the first of them to the last.
    """
    depth = stack.architecture.num_layers
    names = layer_position(layer, depth)
    if layer is None:
        return names
    start, stop = (stack.middle.start, stack.middle.stop) if stack.middle else (depth // 2, depth // 2)
    before = (f"{layer}{BEFORE}",) if 1 < layer < stop else ()
    after = (f"{depth - 1 - layer}{AFTER}",) if start <= layer < depth - 2 else ()
    return (*names, *before, *after)


def is_early(position: str) -> bool:
    """Whether a position is counted from the first layer."""
    return position in ("first", "second") or position.endswith(BEFORE)


def layers_before(position: str, num_layers: int) -> int | None:
    """Layers before one of `positions_in` that only patterns have; None for every other position."""
    if position.endswith(BEFORE):
        return int(position.removesuffix(BEFORE))
    return num_layers - 1 - int(position.removesuffix(AFTER)) if position.endswith(AFTER) else None


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What a layer in the middle makes and something outside its own pass still uses."""

    part: str
    n_bytes: int
    in_forward: bool
    """Whether its forward makes it, not its backward."""
    micro_batch: int
    last: int
    """Place of the last event that uses it; the number of events where it stays."""
    user: Event | None
    """That event."""

    def below(self, index: int) -> bool:
        """Whether a layer far below what runs at `index` has it there: what only the layer above it used is gone."""
        if not self.in_forward:
            return False
        if self.user is None or self.user.micro_batch != self.micro_batch:
            return self.last >= index
        if self.user.phase is Phase.FORWARD and self.user.layer is not None:
            return False
        return self.user.layer is not None or self.last >= index

    def above(self, index: int) -> bool:
        """Whether a layer far above what runs at `index` has it still: what only the layer below it used is gone."""
        by_neighbour = self.user is not None and self.user.layer is not None
        if by_neighbour and self.user is not None and self.user.micro_batch == self.micro_batch:
            return False
        return self.last >= index


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest of what is alive at one spot."""

    total: int
    so_far: int
    """Storages that came and went before it."""
    index: int
    """Place of its event."""


Turn = tuple[str, int | None, Phase, int, bool]
"""Moment, layer, phase, micro-batch, and whether the layers have had their turn."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A tape by what is alive on it."""

    peaks: dict[Turn, Peak]
    parts: dict[int, Parts]
    """Alive after so many changes."""
    lasting: list[Lifetime]
    """Of the layers in the middle."""
    given: list[Lifetime]
    """Of masks and tables that a layer in the middle is the last one to use: the copies of that one use them later."""


def alive_on(tape: Tape, middle: range) -> Alive:
    """The peak of every spot of a tape, and what its layers in the `middle` leave to others."""
    last = last_uses(tape)
    dying: dict[int, list[Storage]] = {}
    for storage, index in last.items():
        dying.setdefault(index, []).append(storage)
    total, born = 0, set()
    changes: list[tuple[str, int]] = []
    peaks: dict[Turn, Peak] = {}
    passed: set[tuple[Phase, int]] = set()
    lasting: list[Lifetime] = []
    given: list[Lifetime] = []
    for index, event in enumerate(tape.events):
        for storage in event.writes:
            if storage not in born:
                born.add(storage)
                changes.append((storage.part, storage.bytes))
                total += storage.bytes
                if event.layer in middle and (found := _lifetime(storage, event, last[storage], tape)) is not None:
                    lasting.append(found)
                if event.layer is None and (found := _given(storage, event, last[storage], tape, middle)) is not None:
                    given.append(found)
        turn = (event.phase, event.micro_batch)
        if event.layer is not None:
            passed.add(turn)
        spot = (event.moment, event.layer, event.phase, event.micro_batch, turn in passed)
        if spot not in peaks or total > peaks[spot].total:
            peaks[spot] = Peak(total, len(changes), index)
        for storage in dying.get(index, ()):
            if storage in born:
                changes.append((storage.part, -storage.bytes))
                total -= storage.bytes
    return Alive(peaks, alive_after(changes, {peak.so_far for peak in peaks.values()}), lasting, given)


def _lifetime(storage: Storage, event: Event, last: int, tape: Tape) -> Lifetime | None:
    """How long a storage of a layer in the middle lives; None where its own pass is the only one to use it."""
    user = tape.events[last] if last < len(tape.events) else None
    own = (event.layer, event.micro_batch, event.phase is Phase.FORWARD)
    if user is not None and (user.layer, user.micro_batch, user.phase is Phase.FORWARD) == own:
        return None
    return Lifetime(storage.part, storage.bytes, event.phase is Phase.FORWARD, event.micro_batch, last, user)


def _given(storage: Storage, event: Event, last: int, tape: Tape, middle: range) -> Lifetime | None:
    """How long a mask or table from the forward lives that a layer in the middle is the last one to use; None for all
    else, gradients among them, which go from layer to layer."""
    user = tape.events[last] if last < len(tape.events) else None
    if event.phase is not Phase.FORWARD or user is None or user.layer not in middle:
        return None
    return Lifetime(storage.part, storage.bytes, True, event.micro_batch, last, user)


def deep_peaks(tape: Tape, stack: ShortStack) -> dict[Spot, Parts]:
    """Bytes alive beyond the resting state at the peak of every spot, by part, of the model that a short stack stands
    for, from its tape.

    Turns of the pattern in the middle are equal, so that memory at one spot grows evenly with their number. What is
    made outside of them must not depend on it (`peaks_by_two` where it does).
    """
    alive = alive_on(tape, stack.middle)
    further = stack.times - 1
    found: dict[Spot, Parts] = {}
    for (moment, layer, phase, micro_batch, after), peak in alive.peaks.items():
        for position in positions_in(stack, layer):
            parts = dict(alive.parts[peak.so_far])
            for each in alive.lasting:
                if _is_there(each, position, phase, micro_batch, after, peak.index):
                    parts[each.part] += further * each.n_bytes
            for each in alive.given if further and position.endswith(AFTER) and layer in stack.middle else ():
                if each.micro_batch == micro_batch and phase is not Phase.FORWARD and peak.index > each.last:
                    parts[each.part] += each.n_bytes  # copies below, of the layer that uses it, have yet to run
            found[moment, position, phase, micro_batch, after] = parts
    return found


def peaks_by_two(low: Mapping[Spot, Parts], high: Mapping[Spot, Parts], steps: int) -> dict[Spot, Parts]:
    """Peaks `steps` turns beyond `low`, linear through `high`, a tape with one turn more."""
    return {
        spot: {part: n_bytes + steps * (high[spot][part] - n_bytes) for part, n_bytes in parts.items()}
        for spot, parts in low.items()
    }


def _is_there(each: Lifetime, position: str, phase: Phase, micro_batch: int, after: bool, index: int) -> bool:
    """Whether a further layer has what this is in its like in the middle, at an event of a spot."""
    if each.micro_batch != micro_batch:
        return each.micro_batch < micro_batch and each.last >= index
    forward = phase is Phase.FORWARD
    early = is_early(position) or (position == "outside" and after is not forward)
    if early:
        return not forward and each.above(index)
    return each.below(index)


def alive_after(changes: Sequence[tuple[str, int]], wanted: set[int]) -> dict[int, Parts]:
    """Bytes alive by part after so many changes, for the numbers of them that are wanted."""
    alive, done = dict.fromkeys(PARTS, 0), 0
    found = {}
    for so_far in sorted(wanted):
        for part, n_bytes in changes[done:so_far]:
            alive[part] += n_bytes
        done = so_far
        found[so_far] = dict(alive)
    return found


def largest_by_place(peaks: Mapping[Spot, Parts]) -> dict[Place, Parts]:
    """Of the spots of each place, the one where most is alive."""
    found: dict[Place, Parts] = {}
    for (moment, position, phase, *_), parts in peaks.items():
        place = (moment, position, phase is Phase.BACKWARD)
        if place not in found or sum(parts.values()) > sum(found[place].values()):
            found[place] = parts
    return found
