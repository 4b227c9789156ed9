"""The stage of a pipeline that decides its time: the one with most work, or one in the middle, which sends both ways.

Stages without virtual ones wait for their sends (`parallel.stage_operations`): over a slow network a middle stage,
which passes activations on and gradients back, takes longer than the last one, which has the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.architecture import Architecture
from tunecast.model.factors import FactorSet
from tunecast.model.inventory import part_operations, step_operations
from tunecast.model.operation import Operation
from tunecast.model.phase_table import phase_table
from tunecast.model.run import Run
from tunecast.model.stages import middle_stages
from tunecast.model.step_source import StepSource, operations_of
from tunecast.model.time import run_clocks, scalars


def timed_operations(
    architecture: Architecture, run: Run, factors: FactorSet, *, platform: str, source: StepSource | None = None
) -> Sequence[Operation]:
    """What a GPU of the slowest stage executes; of a run without stages, what every GPU does."""
    if source is not None:
        return operations_of(architecture, run, platform=platform, source=source)
    stages = stages_timed(architecture, run, platform=platform)
    if len(stages) == 1:
        return stages[0]

    def seconds(operations: Sequence[Operation]) -> float:
        table = phase_table(operations, factors, run=run)
        return run_clocks(table, scalars(factors), synchronous=factors.synchronous).step_s

    return max(stages, key=seconds)


def stages_timed(architecture: Architecture, run: Run, *, platform: str) -> list[Sequence[Operation]]:
    """What a GPU executes of each stage that may take longest: the one with most work first."""
    busiest = step_operations(architecture, run, platform=platform)
    if run.pp < 3 or run.pp_interleave > 1:
        return [busiest]
    middle = (
        part_operations(architecture, run, stage, platform=platform) for stage, _ in middle_stages(architecture, run)
    )
    return [busiest, *middle]
