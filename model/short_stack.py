"""Which layers of a model are written on a tape, and which of those stand for more of their kind.

Layers come in a row of equal ones, or in a pattern that repeats (three with a window and one without), perhaps after
some of another kind. Of such a row, or such a pattern, one turn is written between two equal neighbours and stands for
all turns; layers before and after are written as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from operator import or_

from tunecast.model.architecture import Architecture, Layer, LayerGroup
from tunecast.model.run import Run
from tunecast.model.trained import adapter_tensors


@dataclass(frozen=True, slots=True)
class ShortStack:
    """A model of fewer layers whose tape tells that of all."""

    architecture: Architecture
    """With the layers that are written."""
    middle: range
    """Those of them that stand for several, one turn of the pattern."""
    times: int
    """For how many each of these stands; 1 where all layers are written."""

    def copies(self, layer: int | None) -> int:
        """For how many layers a written one stands; 1 for what is outside of the layers."""
        return self.times if layer in self.middle else 1

    def deeper(self) -> ShortStack:
        """The same with one turn of the pattern more written out."""
        layers = layers_of(self.architecture)
        turn = layers[self.middle.start : self.middle.stop]
        longer = _with_layers(self.architecture, [*layers[: self.middle.start], *turn, *layers[self.middle.start :]])
        return replace(self, architecture=longer, times=self.times - 1)


def whole_stack(architecture: Architecture) -> ShortStack:
    """Every layer written."""
    return ShortStack(architecture, range(0), 1)


def short_stack(architecture: Architecture, run: Run) -> ShortStack:
    """The fewest layers whose tape tells that of all: what is equal and treated equally is written once."""
    return _short(architecture, _checkpointed(architecture.num_layers, run), _passing_gradients(architecture, run))


def layers_of(architecture: Architecture) -> list[Layer]:
    """Every layer of a model in order."""
    return [group.layer for group in architecture.groups for _ in range(group.count)]


def _checkpointed(num_layers: int, run: Run) -> tuple[bool, ...]:
    """Whether each layer keeps its input alone."""
    return tuple(run.checkpoints_layer(index) for index in range(num_layers))


def _passing_gradients(architecture: Architecture, run: Run) -> tuple[bool, ...]:
    """Whether each layer trains or one before it does: only then are there gradients of what it hands on. Where
    checkpoints make all of them, or what is outside of the layers, it is no matter."""
    counts = [(group.count, not run.has_adapters or bool(adapter_tensors(group.layer, run)))
              for group in architecture.groups]  # fmt: skip
    return tuple(accumulate((trains for count, trains in counts for _ in range(count)), or_))


@lru_cache(maxsize=256)
def _short(architecture: Architecture, checkpointed: tuple[bool, ...], passing: tuple[bool, ...]) -> ShortStack:
    layers = layers_of(architecture)
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    kinds = [(numbers[layer], gradients) for layer, gradients in zip(layers, passing, strict=True)]
    turn = most_repeated(kinds, checkpointed)
    if turn is None:
        return whole_stack(architecture)
    start, length, times = turn
    left = layers[: start + length] + layers[start + length * times :]
    return ShortStack(_with_layers(architecture, left), range(start, start + length), times)


def most_repeated(kinds: Sequence[object], checkpointed: Sequence[bool]) -> tuple[int, int, int] | None:
    """(first, length, times) of the turn in a row of layers whose repetition spares most; None where none repeats.

    The layer before the turn is of the kind of its last one and the layer after it of its first one, so that every
    repetition has equal neighbours. Which layers are `checkpointed` goes by their index: those behind the turn move
    forward, and must be treated there as they were.
    """
    both = list(zip(kinds, checkpointed, strict=True))
    best, spared_most = None, 0
    for length in range(1, len(both) // 2):
        for start, stop in _alike(both, length):
            times = (stop - start - 2) // length
            spared = (times - 1) * length
            after = start + 1 + length
            if spared > spared_most and all(
                now == before for now, before in zip(checkpointed[after:], checkpointed[after + spared :], strict=False)
            ):
                best, spared_most = (start + 1, length, times), spared
    return best


def _alike(kinds: Sequence[object], length: int) -> list[tuple[int, int]]:
    """Stretches (start, stop) in which every kind is that of `length` before it."""
    found, start = [], 0
    for index in range(length, len(kinds) + 1):
        if index == len(kinds) or kinds[index] != kinds[index - length]:
            found.append((start, index))
            start = index - length + 1
    return found


def _with_layers(architecture: Architecture, layers: Sequence[Layer]) -> Architecture:
    """The model with these layers: one for all models that differ in the number of their layers alone."""
    groups = tuple(LayerGroup(layer=layer, count=len(list(same))) for layer, same in groupby(layers))
    return replace(architecture, groups=groups)
