"""Many plans of one model on many devices at once: step time and memory by arrays, for screening.

The numbers are those of `estimate.forecast` (a test compares them); what it adds for an answer, intervals and
origins above all, is left to it. Three facts make the screen fast:

- kernels do not depend on how a job is spread, so plans of one shape share their inventory (`step.tape_run`);
- all micro-batches after the first are equal, so everything that is summed over a step is affine in their number
  from the second on;
- the operations are the same on every device, so curves are evaluated for all devices together (`engine_tables`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tunecast.catalogs.errors import InputError
from tunecast.model.adapter_gaps import side_by_side
from tunecast.model.architecture import Architecture
from tunecast.model.collectives import communication_operations
from tunecast.model.curves import Array
from tunecast.model.engine_memory import Fit, Flags, fits_on, memory_of
from tunecast.model.engine_split import one_by_one
from tunecast.model.engine_tables import Counted, Work, add_up, counted, on_devices
from tunecast.model.exposed import asks_late
from tunecast.model.factors import FactorSet
from tunecast.model.hooks import has_hooks, waits_for_units, wraps_adapters
from tunecast.model.host import with_trainer
from tunecast.model.inventory import spread_operations, step_operations
from tunecast.model.links import WHEN
from tunecast.model.on_device import job_factors
from tunecast.model.operation import Operation, Phase
from tunecast.model.paging import paging_seconds
from tunecast.model.parallel_memory import most_in_flight
from tunecast.model.parallel_network import most_bridged
from tunecast.model.rows import held_run, likely_runs, packing_of, unpacked_rows
from tunecast.model.run import Run, tokenless
from tunecast.model.segments import SEGMENTS, passes_of
from tunecast.model.sharding_copies import sums_whole
from tunecast.model.step import tape_run
from tunecast.model.tape import LEAF_SUM
from tunecast.model.target import Target
from tunecast.model.time import HOST_COLUMNS, Stack, communication_seconds, scalars, step_seconds

Rows = npt.NDArray[np.int64]
LINK_FACTORS = ("link_", "node_")
"""Beginnings of the names of the factors that collectives depend on."""
TAPES_AT_ONCE = 64
"""Runs of so many different tapes are screened together; 256 are remembered."""
_BUT_MICRO = attrgetter(*(each.name for each in fields(Run) if each.name != "gradient_accumulation_steps"))
VARIANTS = 3
"""Of a step: with one micro-batch, with two, and what each further one adds."""
KEPT_BODIES = 64
"""Whose tables are kept: rows of one run are timed on one card after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Every plan on every device."""

    step_s: Array
    """(devices, runs) seconds of one optimizer step of the whole job."""
    allocated_bytes: Array
    """(runs,) peak of one GPU's tensors, without the card's workspaces."""
    process_bytes: Array
    """(devices, runs) memory of one GPU's process; NaN where the device has no such view."""
    fit_probability: Array
    """(devices, runs) probability that the run fits into the usable memory; NaN where that is unknown."""
    fit_probability_uncached: Array
    """(devices, runs) the same had the allocator cached nothing: no replay of it gives more (`market.refined_fit`)."""
    too_large: Flags
    """(devices, runs) whether the process exceeds the usable memory even without cached blocks: the verdict ``no``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plans:
    """Runs as rows: which shared pieces each is put together from."""

    micro: Array
    body: Rows
    spread: Rows
    link: Rows
    bodies: tuple[Run, ...]
    needed: tuple[frozenset[int], ...]
    """Numbers of micro-batches that each body occurs with, 3 for all from there on."""
    spreads: tuple[Run, ...]
    links: tuple[Run, ...]


def screen(
    architecture: Architecture,
    runs: Sequence[Run],
    targets: Sequence[Target],
    options: Mapping[str, Any] | None = None,
) -> Screen:
    """Step time and memory of every run on every target; all targets are of one platform.

    A run is taken as it is: whether a device has its dtype, its memory, or grouped products (`Run.loops_experts`), is
    for the caller to ask. What else a device decides (`run.BY_CARD`) is left at its default; paging is worked out here.
    `options` may say how machines are joined (``internode_gbps``) and how long samples are, which are then rows of
    their own (`rows`).
    """
    platform = targets[0].platform
    assert all(target.platform == platform for target in targets), "devices of one platform"
    step_s = np.empty((len(targets), len(runs)))
    allocated, fit = np.empty(len(runs)), Fit.empty(len(targets), len(runs))

    kinds, members = kinds_of(runs, apart=packing_of(options or {}) is False)

    def at_lengths(kind: Run, run: Run) -> tuple[Run, ...]:
        """The kind at every likely length of the rows of `run`, which is of it but has all of its micro-batches."""
        likely = likely_runs(run, unpacked_rows(run, options or {}))
        return tuple(replace(kind, max_length=timed.max_length) for timed in likely)

    for part in tape_groups(kinds):
        here = [kinds[place] for place in part]
        memory = memory_of(architecture, [held_run(run, options or {}) for run in here], platform)
        for own in factor_groups(here, apart=most_bridged() + 1 if (options or {}).get("nvlink") else 2):
            group, places = [here[row] for row in own], [members[part[row]] for row in own]
            sizes, columns = [len(each) for each in places], np.concatenate(places)
            allocated[columns] = np.repeat(memory.allocated_bytes[own], sizes)
            factors = [job_factors(target, architecture, group[0], options) for target in targets]
            if is_plain(group[0]):
                micro = np.array([runs[column].gradient_accumulation_steps for column in columns], dtype=float)
                kind = np.repeat(np.arange(len(group)), sizes)
                timed = [at_lengths(run, runs[where[0]]) for run, where in zip(group, places, strict=True)]
                found = [
                    step_seconds_of(architecture, at, kind, micro, factors, platform) for at in zip(*timed, strict=True)
                ]
            else:
                timed = [at_lengths(runs[column], runs[column]) for column in columns]
                found = [one_by_one(architecture, at, factors, platform) for at in zip(*timed, strict=True)]
            step_s[:, columns] = np.mean(found, axis=0)
            repeated = memory.of(np.repeat(own, sizes))
            for device, (target, known) in enumerate(zip(targets, factors, strict=True)):
                paging_s = paging_seconds(architecture, group, memory.stepped_bytes[own], target, known)
                step_s[device, columns] += np.repeat(paging_s, sizes)
                fits_on(fit, device, columns, repeated, target, known)
    return Screen(
        step_s=step_s,
        allocated_bytes=allocated,
        process_bytes=fit.process_bytes,
        fit_probability=fit.probability,
        fit_probability_uncached=fit.probability_uncached,
        too_large=fit.too_large,
    )


def seconds_at_lengths(
    architecture: Architecture,
    run: Run,
    lengths: Sequence[int],
    target: Target,
    options: Mapping[str, Any] | None = None,
) -> Array:
    """(lengths,) seconds of one optimizer step of the run with rows of so many tokens, on one device; state that is
    paged out is left out."""
    factors = [job_factors(target, architecture, run, options)]
    runs = [replace(run, max_length=length, paged_bytes=0) for length in lengths]
    if not is_plain(run):
        return np.asarray(one_by_one(architecture, runs, factors, target.platform)[0])
    kinds, members = kinds_of(runs)
    kind = np.empty(len(runs), dtype=np.int64)
    for number, places in enumerate(members):
        kind[places] = number
    micro = np.full(len(runs), float(run.gradient_accumulation_steps))
    return np.asarray(step_seconds_of(architecture, kinds, kind, micro, factors, target.platform)[0])


def kinds_of(runs: Sequence[Run], *, apart: bool = False) -> tuple[list[Run], list[Rows]]:
    """Runs that differ in more than how many micro-batches follow the third, or those in flight, and for each the
    places of its runs; `apart` where how long a step waits for its longest rows depends on their number."""
    kinds: list[Run] = []
    members: dict[tuple[Any, ...], list[int]] = {}
    for place, run in enumerate(runs):
        micro = min(run.gradient_accumulation_steps, max(3, most_in_flight(run)))
        exactly = run.gradient_accumulation_steps if apart else micro
        places = members.setdefault((exactly, _BUT_MICRO(run)), [])
        if not places:
            kinds.append(_with_micro(run, micro))
        places.append(place)
    return kinds, [np.array(places, dtype=np.int64) for places in members.values()]


def tape_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Runs in parts of few tapes, so that a tape serves memory and time before it is forgotten."""
    by_tape: dict[Run, list[int]] = {}
    for row, run in enumerate(runs):
        by_tape.setdefault(tape_run(run), []).append(row)
    tapes = list(by_tape.values())
    parts = [tapes[first : first + TAPES_AT_ONCE] for first in range(0, len(tapes), TAPES_AT_ONCE)]
    return [[row for rows in part for row in rows] for part in parts]


def factor_groups(runs: Sequence[Run], *, apart: int = 2) -> list[list[int]]:
    """Runs for which a device has one set of factors: they differ in size and number only, from `apart` GPUs on."""
    groups: dict[Run, list[int]] = {}
    for row, run in enumerate(runs):
        key = replace(
            run,
            max_length=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing=True,
            num_gpus=min(run.num_gpus, apart) if run.num_gpus <= run.gpus_per_node else 2 * run.gpus_per_node,
        )
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def is_plain(run: Run) -> bool:
    """Whether every GPU runs the whole step on samples of its own: only then do plans share kernels."""
    return run.tp == run.pp == run.cp == 1 and run.offload == "none"


def step_seconds_of(
    architecture: Architecture,
    kinds: Sequence[Run],
    kind: Rows,
    micro: Array,
    factors: Sequence[FactorSet],
    platform: str,
) -> Array:
    """(devices, runs) seconds of one optimizer step of `micro` micro-batches; the runs share their factors.

    `kind` says which of `kinds` (`kinds_of`) each run is. NaN where collectives cannot be timed on a device (nobody
    says how its machines are joined).
    """
    plans = _plans(kinds, kind, micro)
    works = [
        on_devices(_body(architecture, body, needed, platform), factors)
        for body, needed in zip(plans.bodies, plans.needed, strict=True)
    ]
    spreads = [_spread(architecture, run, factors, platform) for run in plans.spreads]
    links = np.array([_link_seconds(architecture, run, factors) for run in plans.links])
    whole = np.array([sums_whole(_with_micro(run, 2)) for run in kinds])[kind]
    launches = _both([w.launches for w in works], plans.body, whole, plans.micro)
    launches += _by_micro(np.array([w.launches for w in spreads]), plans.micro, plans.spread)
    visits = _by_micro(np.array([w.visits[:VARIANTS] for w in works]), plans.micro, plans.body)
    launches[:, :, HOST_COLUMNS.index("hooks")] += visits * np.array([has_hooks(run) for run in kinds])[kind][:, None]
    adapters = _by_micro(np.array([w.adapter_visits[:VARIANTS] for w in works]), plans.micro, plans.body)
    wrapped = np.array([wraps_adapters(run) for run in kinds])[kind]
    launches[:, :, HOST_COLUMNS.index("units")] += adapters * wrapped[:, None]
    meets = np.maximum(
        np.array([w.meets for w in works])[plans.body], np.array([w.meets for w in spreads])[plans.spread]
    )
    driven = np.array([run.trainer_loop for run in kinds])[kind]
    modules = _by_micro(np.array([w.modules[:VARIANTS] for w in works]), plans.micro, plans.body)
    launches, meets = with_trainer(launches, meets, modules, plans.micro, driven)
    meet = np.array([waits_for_units(run) for run in kinds])[kind][:, None, None]

    passes = passes_of(plans.micro)
    gapless = np.zeros((len(micro), len(SEGMENTS), 1))

    def in_gaps(each: Sequence[Array]) -> Array:
        if not meet.any():
            return gapless
        found = _both(side_by_side(each), plans.body, whole, plans.micro) * meet
        return np.asarray(found / passes[:, :, None])

    visited, launched = in_gaps([w.gap_visits for w in works]), in_gaps([w.gap_launches for w in works])
    waits = np.array([w.waits for w in works])[plans.body]
    late = np.array([[asks_late(run, waiting) for waiting in (False, True)] for run in kinds])[kind, waits.astype(int)]
    found = np.empty((len(factors), len(micro)))
    for device, own in enumerate(factors):
        beside, once, blocking, ring = (
            _by_micro(links[:, device, when], plans.micro, plans.link) for when in range(len(WHEN))
        )
        work_s = _both([w.device_s[device] for w in works], plans.body, whole, plans.micro)
        work_s += _by_micro(np.array([w.device_s[device] for w in spreads]), plans.micro, plans.spread)
        stack = Stack(
            device_s=work_s / passes[:, :, None],
            launches=launches / passes[:, :, None],
            communication_s=beside / passes,
            once_s=once,
            blocking_s=blocking / passes,
            ring_s=ring / passes,
            ring_room_frac=np.zeros((len(micro), len(SEGMENTS))),
            gap_visits=visited,
            gap_launches=launched,
            gap_work_s=in_gaps([w.gap_work_s[device] for w in works]),
            asks_late=late,
            bubble_frac=np.zeros((len(micro), len(SEGMENTS))),
            meets=meets,
            micro_steps=plans.micro,
        )
        found[device] = step_seconds(stack, scalars(own), synchronous=own.synchronous)
    return found


def _by_micro(variants: Array, micro: Array, which: Rows) -> Array:
    """Totals of a step of `micro` micro-batches: those of one, else those of two and as much more per further one.

    `variants` is (kinds, 3, ...): of one micro-batch, of two, and what each further one adds; `which` is each run's.
    """
    shape = (len(micro), *(1,) * (variants.ndim - 2))
    further = np.maximum(micro - 2, 0).reshape(shape)
    found = variants[which, np.where(micro == 1, 0, 1)]
    found += further * variants[which, 2]
    return found


def _with_micro(run: Run, micro: int) -> Run:
    return replace(run, gradient_accumulation_steps=micro)


def _plans(kinds: Sequence[Run], kind: Rows, micro: Array) -> _Plans:
    bodies: dict[Run, int] = {}
    spreads: dict[Run, int] = {}
    links: dict[Run, int] = {}
    pieces: dict[Run, tuple[int, int, int]] = {}
    needed: list[set[int]] = []
    rows = []
    for run in kinds:
        base = _with_micro(run, 1)
        if base not in pieces:
            body = _with_micro(tape_run(run), 1)
            link = tokenless(base)
            spread = link if base.sharding != "none" else tokenless(body)
            pieces[base] = (
                bodies.setdefault(body, len(bodies)),
                spreads.setdefault(spread, len(spreads)),
                links.setdefault(link, len(links)),
            )
            needed += [set() for _ in range(len(bodies) - len(needed))]
        rows.append(pieces[base])
        needed[pieces[base][0]].add(min(run.gradient_accumulation_steps, 3))
    body_row, spread_row, link_row = np.array(rows, dtype=np.int64)[kind].T
    return _Plans(
        micro=micro,
        body=body_row,
        spread=spread_row,
        link=link_row,
        bodies=tuple(bodies),
        needed=tuple(map(frozenset, needed)),
        spreads=tuple(spreads),
        links=tuple(links),
    )


def _spread(architecture: Architecture, run: Run, factors: Sequence[FactorSet], platform: str) -> Work:
    """The update and copies of sharding, in the variants of `_by_micro`."""
    one, two, three = (
        spread_operations(architecture, _with_micro(run, micro), platform=platform) for micro in range(1, VARIANTS + 1)
    )
    return add_up([*one, *two], _variant_counts(one, two, three), factors, run)


def _variant_counts(one: Sequence[Operation], two: Sequence[Operation], three: Sequence[Operation]) -> Array:
    """(operations of one micro-batch and of two, variants of `_by_micro`) counts.

    Micro-batches after the first have equal kernels, so that two and three differ in counts alone.
    """
    counts = np.zeros((len(one) + len(two), VARIANTS))
    counts[: len(one), 0] = [o.count for o in one]
    counts[len(one) :, 1] = [o.count for o in two]
    if three:
        counts[len(one) :, 2] = [after.count - before.count for before, after in zip(two, three, strict=True)]
    return counts


def _both(parts: Sequence[Array] | Array, body: Rows, whole: Flags, micro: Array) -> Array:
    """Totals of bodies, gradients added to whole ones only where they are."""
    each = np.asarray(parts)
    rest, sums = each[:, :VARIANTS], each[:, VARIANTS:]
    return _by_micro(np.concatenate([rest, rest + sums]), micro, body + len(each) * whole)


def _kernels(architecture: Architecture, run: Run, platform: str) -> list[Operation]:
    found = step_operations(architecture, run, platform=platform)
    return [operation for operation in found if operation.phase is not Phase.OPTIMIZER]


@lru_cache(maxsize=KEPT_BODIES)
def _body(architecture: Architecture, body: Run, needed: frozenset[int], platform: str) -> Counted:
    """Kernels of forward and backward in the variants of `_by_micro`, and then gradients added to whole ones in them.

    `needed` has the numbers of micro-batches that occur, 3 for all from there on; other variants stay 0.
    """
    one, two, three = (
        _kernels(architecture, _with_micro(body, micro), platform) if micros & needed else []
        for micro, micros in ((1, {1}), (2, {2, 3}), (3, {3}))
    )
    counts = _variant_counts(one, two, three)
    is_sum = np.array([o.name == LEAF_SUM for o in (*one, *two)])[:, None]
    return counted([*one, *two], np.concatenate([counts * ~is_sum, counts * is_sum], axis=1), body)


def _link_seconds(architecture: Architecture, run: Run, factors: Sequence[FactorSet]) -> Array:
    """(devices, kinds of `WHEN`, variants, segments) seconds on the link, what hides beside work not yet taken off."""
    runs = [_with_micro(run, micro) for micro in (1, 2, 3)]
    operations = [communication_operations(architecture, each) for each in runs]
    known: dict[tuple[tuple[str, float], ...], Array] = {}
    found = []
    for own in factors:
        key = tuple((name, f.value) for name, f in own.factors.items() if name.startswith(LINK_FACTORS))
        if key not in known:
            known[key] = _one_link(operations, runs, own)
        found.append(known[key])
    return np.array(found)


def _one_link(operations: Sequence[Sequence[Operation]], runs: Sequence[Run], factors: FactorSet) -> Array:
    """`_link_seconds` of one device; NaN where its links are unknown."""
    try:
        one, two, three = (
            np.array([communication_seconds(ops, factors, run=each, when=when) for when in WHEN])
            for ops, each in zip(operations, runs, strict=True)
        )
    except InputError:
        return np.full((len(WHEN), len(runs), len(SEGMENTS)), np.nan)
    return np.stack([one, two, three - two], axis=1)
