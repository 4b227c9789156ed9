"""Step times of runs whose layers, sequences or state are split, on many devices: such plans share no kernels, so each
is added up by itself, for all devices at once, and the slowest of its stages decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunecast.catalogs.errors import InputError
from tunecast.model.adapter_gaps import no_gaps, side_by_side
from tunecast.model.architecture import Architecture
from tunecast.model.context_parallel import room_fracs
from tunecast.model.curves import Array
from tunecast.model.engine_tables import Work, add_up
from tunecast.model.exposed import asks_late
from tunecast.model.factors import FactorSet
from tunecast.model.hooks import has_hooks, waits_for_units, wraps_adapters
from tunecast.model.host import with_trainer
from tunecast.model.links import WHEN, Links, communication_when, crosses_machines, links_of, seconds_on
from tunecast.model.operation import Kind, Operation
from tunecast.model.phase_table import idle_fracs
from tunecast.model.run import Run
from tunecast.model.segments import SEGMENTS, passes_of
from tunecast.model.slowest_stage import stages_timed
from tunecast.model.time import HOST_COLUMNS, Stack, scalars, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage that may be the slowest of its run."""

    column: int
    run: Run
    work: Work
    idle: Array
    """(segments,), see `phase_table.idle_fracs`."""
    on_links: tuple[tuple[Operation, ...], ...]
    """By `WHEN`."""


def one_by_one(architecture: Architecture, runs: Sequence[Run], factors: Sequence[FactorSet], platform: str) -> Array:
    """(devices, runs) seconds of one optimizer step, those of the slowest stage of each run; NaN as in
    `engine.step_seconds_of`."""
    stages = [
        _stage(column, run, operations, factors)
        for column, run in enumerate(runs)
        for operations in stages_timed(architecture, run, platform=platform)
    ]
    micro = np.array([stage.run.gradient_accumulation_steps for stage in stages], dtype=float)
    passes = passes_of(micro)
    launches = np.array([stage.work.launches[0] for stage in stages])
    visits = np.array([stage.work.visits[0] for stage in stages])
    launches[:, :, HOST_COLUMNS.index("hooks")] += visits * np.array([has_hooks(each.run) for each in stages])[:, None]
    adapters = np.array([stage.work.adapter_visits[0] for stage in stages])
    wrapped = np.array([wraps_adapters(each.run) for each in stages])
    launches[:, :, HOST_COLUMNS.index("units")] += adapters * wrapped[:, None]
    meets = np.array([stage.work.meets for stage in stages])
    driven = np.array([stage.run.trainer_loop for stage in stages])
    launches, meets = with_trainer(
        launches, meets, np.array([stage.work.modules[0] for stage in stages]), micro, driven
    )
    idle = np.array([stage.idle for stage in stages])

    def gaps(each: Sequence[Array]) -> Array:
        own = [found if waits_for_units(stage.run) else no_gaps() for found, stage in zip(each, stages, strict=True)]
        return side_by_side(own) / passes[:, :, None]

    columns = [stage.column for stage in stages]
    found = np.full((len(factors), len(runs)), -np.inf)
    known: list[dict[Links, Array]] = [{} for _ in stages]
    for device, own in enumerate(factors):
        links = np.array([_link_seconds(*each, own) for each in zip(stages, known, strict=True)])
        stack = Stack(
            device_s=np.array([stage.work.device_s[device, 0] for stage in stages]) / passes[:, :, None],
            launches=launches / passes[:, :, None],
            communication_s=links[:, WHEN.index("beside")] / passes,
            once_s=links[:, WHEN.index("once")],
            blocking_s=links[:, WHEN.index("blocking")] / passes,
            ring_s=links[:, WHEN.index("ring")] / passes,
            ring_room_frac=np.array([room_fracs(stage.run) for stage in stages]),
            gap_visits=gaps([stage.work.gap_visits[0] for stage in stages]),
            gap_launches=gaps([stage.work.gap_launches[0] for stage in stages]),
            gap_work_s=gaps([stage.work.gap_work_s[device, 0] for stage in stages]),
            asks_late=np.array([asks_late(stage.run, stage.work.waits) for stage in stages]),
            bubble_frac=idle,
            meets=meets,
            micro_steps=micro,
        )
        spent_s = step_seconds(stack, scalars(own), synchronous=own.synchronous)
        for column, taken_s in zip(columns, spent_s, strict=True):
            if np.isnan(taken_s) or taken_s > found[device, column]:
                found[device, column] = taken_s
    return found


def _stage(column: int, run: Run, operations: Sequence[Operation], factors: Sequence[FactorSet]) -> _Stage:
    counts = np.array([[operation.count] for operation in operations], dtype=float)
    collectives = [o for o in operations if o.kind is Kind.COMMUNICATION]
    on_links = tuple(tuple(o for o in collectives if communication_when(o) == when) for when in WHEN)
    work = add_up(operations, counts, factors, run)
    return _Stage(column=column, run=run, work=work, idle=idle_fracs(operations, run), on_links=on_links)


def _link_seconds(stage: _Stage, known: dict[Links, Array], factors: FactorSet) -> Array:
    """(kinds of `WHEN`, segments) seconds on one device's links; NaN where they are unknown."""
    every = [o for collectives in stage.on_links for o in collectives]
    if not every:
        return np.zeros((len(WHEN), len(SEGMENTS)))
    try:
        links = links_of(factors, stage.run, across=crosses_machines(every))
    except InputError:
        return np.full((len(WHEN), len(SEGMENTS)), np.nan)
    if links not in known:
        known[links] = np.array([seconds_on(links, each, stage.run.num_gpus) for each in stage.on_links])
    return known[links]
