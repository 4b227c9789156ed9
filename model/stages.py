"""How layers are dealt out to the stages of a pipeline, evenly or with fewer at the ends.

Where the stages do not divide the layers, those in the middle have as many as an even share rounded up, and the first
and last ones fewer: Llama 3.1 405B's 126 layers over 16 stages are 7, 8, ... 8, 7, since the table of tokens and the
head are work and memory of the ends (arXiv 2407.21783, section 3.3.2; Megatron's
``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``). Of an odd number the last one lacks
more.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from tunecast.model.architecture import Architecture, Layer
from tunecast.model.run import Run

FIRST_STAGE = 0


def stage_layers(num_layers: int, stages: int) -> tuple[int, int, int]:
    """Layers of the first, of every middle and of the last stage; below 1 where the ends cannot lack so many."""
    middle = -(-num_layers // stages)
    lacking = middle * stages - num_layers
    if stages == 1:
        return num_layers, num_layers, num_layers
    return middle - lacking // 2, middle, middle - (lacking - lacking // 2)


def stage_range(num_layers: int, stages: int, stage: int) -> tuple[int, int]:
    """First layer of a stage, and the first that is no longer its own."""
    first, middle, last = stage_layers(num_layers, stages)
    if stage == FIRST_STAGE:
        return 0, first if stages > 1 else num_layers
    if stage == stages - 1:
        return num_layers - last, num_layers
    start = first + (stage - 1) * middle
    return start, start + middle


def is_uneven(num_layers: int, run: Run) -> bool:
    """Whether stages have different numbers of layers."""
    return num_layers % run.pp > 0


def stages_counted(architecture: Architecture, run: Run) -> tuple[tuple[int, int], ...]:
    """Stages that differ, each with how many are like it: first, the kinds of those in the middle, last."""
    if run.pp == 1:
        return ((FIRST_STAGE, 1),)
    return ((FIRST_STAGE, 1), *middle_stages(architecture, run), (run.pp - 1, 1))


@lru_cache(maxsize=256)
def middle_stages(architecture: Architecture, run: Run) -> tuple[tuple[int, int], ...]:
    """Of the stages between the ends one of each kind, with how many have as many layers of every kind."""
    layers = [group.layer for group in architecture.groups for _ in range(group.count)]
    found: dict[frozenset[tuple[Layer, int]], list[int]] = {}
    for stage in range(1, run.pp - 1):
        own = Counter(layers[slice(*stage_range(architecture.num_layers, run.pp, stage))])
        found.setdefault(frozenset(own.items()), []).append(stage)
    return tuple((stages[0], len(stages)) for stages in found.values())
