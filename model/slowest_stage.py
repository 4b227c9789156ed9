"""The stage of a pipeline that decides its time: the one with most work, or one in the middle, which sends both ways.

Stages without virtual ones wait for their sends (`parallel.stage_operations`): over a slow network a middle stage,
which passes activations on and gradients back, takes longer than the last one, which has the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.architecture import Architecture
from tunecast.model.factors import FactorSet
from tunecast.model.inventory import part_operations
from tunecast.model.operation import Operation
from tunecast.model.run import Run
from tunecast.model.step_source import StepSource, operations_of
from tunecast.model.time import step_time

MIDDLE_STAGE = 1


def timed_operations(
    architecture: Architecture, run: Run, factors: FactorSet, *, platform: str, source: StepSource | None = None
) -> Sequence[Operation]:
    """What a GPU of the slowest stage executes; of a run without stages, what every GPU does."""
    found = operations_of(architecture, run, platform=platform, source=source)
    if run.pp < 3 or run.pp_interleave > 1:
        return found
    middle = part_operations(architecture, run, MIDDLE_STAGE, platform=platform)
    return max((found, middle), key=lambda operations: step_time(operations, factors, run=run).step_time_s.value)
