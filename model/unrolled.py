"""What a step allocates and frees, in order, at the model's depth: the tape of a few layers with the middle repeated.

Layers that repeat allocate alike. Of three such turns in a row the middle one has neighbours of its kind on both sides,
so that it says what every further turn allocates and frees: its own tensors, those of the turn before and of the turn
after. Where a tape does not read so, all layers are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.short_stack import ShortStack, short_stack, whole_stack
from tunecast.model.step import write_step
from tunecast.model.tape import Tape
from tunecast.model.tape_parts import Event, Storage
from tunecast.model.tape_peaks import last_uses

TURNS = 3
"""Turns of the repeated layers that are written: the middle one stands for all but the ends."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """Allocations and frees in order."""

    slots: list[int]
    """Which tensor each is about."""
    sizes: list[int]
    """Bytes of an allocation; 0 frees."""
    tensors: int

    def kept(self) -> list[int]:
        """Tensors that are never freed, in the order they were made: gradients, which the update takes."""
        left = dict.fromkeys(slot for slot, size in zip(self.slots, self.sizes, strict=True) if size)
        for slot, size in zip(self.slots, self.sizes, strict=True):
            if not size:
                del left[slot]
        return list(left)


@dataclass(slots=True)
class Section:
    """What events in a row of one turn, or of none, change."""

    turn: int | None
    """Of the written ones; None outside of them."""
    storages: list[Storage]
    sizes: list[int]


def step_changes(architecture: Architecture, run: Run, platform: str) -> Changes | None:
    """The changes of one step without its update; None where a written turn of a loop stands for several."""
    stack = short_stack(architecture, run)
    if stack.times > TURNS:
        deep = stack.deeper().deeper()
        tape = write_step(deep.architecture, run, platform)
        if _has_loops(tape):
            return None
        found = _Unrolled(sections(tape, deep), stack.times).changes()
        if found is not None:
            return found
    tape = write_step(architecture, run, platform)
    return None if _has_loops(tape) else _as_written(sections(tape, whole_stack(architecture)))


def _has_loops(tape: Tape) -> bool:
    return any(event.times > 1 for event in tape.events)


def sections(tape: Tape, stack: ShortStack) -> list[Section]:
    """The changes of a tape, turn by turn of the repeated layers; a storage goes with its last use."""
    start, length = stack.middle.start, len(stack.middle)

    def turn(event: Event) -> int | None:
        inside = event.layer is not None and length and start <= event.layer < start + TURNS * length
        return (event.layer - start) // length if inside and event.layer is not None else None

    dying: dict[int, list[Storage]] = {}
    for storage, index in last_uses(tape).items():
        dying.setdefault(index, []).append(storage)
    found, born, index = [], set(), 0
    for which, events in groupby(tape.events, key=turn):
        section = Section(which, [], [])
        for event in events:
            for storage in event.writes:
                if storage not in born and storage.bytes:
                    born.add(storage)
                    section.storages.append(storage)
                    section.sizes.append(storage.bytes)
            for storage in dying.get(index, ()):
                if storage in born:
                    section.storages.append(storage)
                    section.sizes.append(0)
            index += 1
        found.append(section)
    return found


def _as_written(found: Sequence[Section]) -> Changes:
    """Sections as they are."""
    slots: dict[Storage, int] = {}
    storages = [storage for section in found for storage in section.storages]
    numbered = [slots.setdefault(storage, len(slots)) for storage in storages]
    return Changes(numbered, [size for section in found for size in section.sizes], len(slots))


class _Unrolled:
    """Sections of three turns, with the middle one repeated until there are `times`."""

    def __init__(self, found: Sequence[Section], times: int) -> None:
        self.sections = found
        self.times = times
        self.places: dict[Storage, tuple[int, int, int]] = {}
        """First slot in the first turn, slots from one turn to the next, and the turn: of tensors made in turns."""
        self.slots = 0
        self.out: list[Numbers] = []
        self.sizes: list[Numbers] = []

    def changes(self) -> Changes | None:
        """None where the turns do not change alike."""
        index = 0
        while index < len(self.sections):
            if self.sections[index].turn is None:
                done = self._outside(self.sections[index])
                index += 1
            else:
                done = self._turns(self.sections[index : index + TURNS])
                index += TURNS
            if not done:
                return None
        return Changes(np.concatenate(self.out).tolist(), np.concatenate(self.sizes).tolist(), self.slots)

    def _outside(self, section: Section) -> bool:
        """What is outside of the turns happens once; what it frees of the middle one it frees of all."""
        slots, sizes = [], []
        for storage, size in zip(section.storages, section.sizes, strict=True):
            if storage not in self.places:
                self.places[storage] = (self.slots, 0, -1)
                self.slots += 1
            first, step, turn = self.places[storage]
            copies = range(1, self.times - 1) if turn == 1 else (0 if turn < 2 else self.times - 1,)
            slots += [first + step * copy for copy in copies]
            sizes += [size] * len(copies)
        self._add(slots, sizes)
        return True

    def _turns(self, group: Sequence[Section]) -> bool:
        """The first written turn to run, the middle one as often as it stands for, and the last."""
        turns = [section.turn for section in group]
        made = [[size for size in section.sizes if size] for section in group]
        if turns not in ([0, 1, 2], [2, 1, 0]) or not made[0] == made[1] == made[2]:
            return False
        for section in group:
            new = [s for s, size in zip(section.storages, section.sizes, strict=True) if size]
            for number, storage in enumerate(new):
                self.places[storage] = (self.slots + number, len(new), section.turn or 0)
        self.slots += self.times * len(made[0])
        copies = range(1, self.times - 1)
        for section in group:
            if section.turn != 1:
                if not self._once(section):
                    return False
            elif not self._repeated(section, copies if turns[0] == 0 else copies[::-1]):
                return False
        return True

    def _once(self, section: Section) -> bool:
        """One of the written turns at the ends; its neighbour in the middle is the copy next to it."""
        own, beside = (0, 1) if section.turn == 0 else (self.times - 1, self.times - 2)
        slots = []
        for storage in section.storages:
            first, step, turn = self.places[storage]
            if turn not in (-1, 1, section.turn):
                return False
            slots.append(first + step * (beside if turn == 1 else own))
        self._add(slots, section.sizes)
        return True

    def _repeated(self, section: Section, copies: range) -> bool:
        """The middle turn: every copy changes its own tensors and those of the copies beside it."""
        places = [self.places[storage] for storage in section.storages]
        if any(turn < 0 for *_, turn in places):
            return False  # a tensor from outside can be freed once only
        firsts = np.array([first + step * (turn - 1) for first, step, turn in places], dtype=np.int64)
        steps = np.array([step for _, step, _ in places], dtype=np.int64)
        self.out.append((firsts + np.outer(np.array(copies), steps)).ravel())
        self.sizes.append(np.tile(np.array(section.sizes, dtype=np.int64), len(copies)))
        return True

    def _add(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        self.out.append(np.array(slots, dtype=np.int64))
        self.sizes.append(np.array(sizes, dtype=np.int64))
