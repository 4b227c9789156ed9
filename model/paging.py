"""Paged optimizer state that does not fit beside the rest on a card: it crosses PCIe twice in every step.

bitsandbytes keeps it in CUDA managed memory, which the driver moves to the host when the card is full (Dettmers et al.
2023, arXiv 2305.14314, section 3, "Paged Optimizers"; bitsandbytes docs, explanations on optimizers: no overhead while
all fits, else what is evicted is copied). Assumed: what exceeds the room beside PyTorch's memory goes out and comes
back once a step, at the rate of PCIe, one direction after the other, with nothing to hide behind. A driver that evicts
by least recent use moves all of the state as soon as some of it does not fit, because an update walks through it in
one order; both directions at once would take half. The interval reaches from one to the other (`timing.linked`). Left
out: the driver's own pages, the CUDA context, the cache of PyTorch's allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.links import communication_seconds
from tunecast.model.optimizer import optimizer_state_bytes
from tunecast.model.optimizer_bnb import BITSANDBYTES
from tunecast.model.parallel import is_split
from tunecast.model.parallel_offload import host_operations, with_host
from tunecast.model.resolve import Resolved
from tunecast.model.run import Run
from tunecast.model.sharding import shard_gpus, shards_of
from tunecast.model.step_source import StepSource, timeline_of
from tunecast.model.target import Target
from tunecast.model.units import MIB, gib

NEGLIGIBLE_BYTES = 64 * MIB
"""Less than this is not told, and costs a few milliseconds."""


def is_paged(run: Run) -> bool:
    """Whether the optimizer's state lives in managed memory."""
    return run.optim in BITSANDBYTES and BITSANDBYTES[run.optim].paged


def paged_state_bytes(architecture: Architecture, run: Run) -> int:
    """State of one GPU in managed memory: what an optimizer that cannot page allocates beyond what this one does."""
    apart = optimizer_state_bytes(architecture, run, platform="cpu") - optimizer_state_bytes(architecture, run)
    return apart // shard_gpus(run) if shards_of(run).optimizer_state else apart


def can_page(run: Run, target: Target) -> bool:
    """Whether state of this run leaves this device when it does not fit, as far as anything says how much fits."""
    return target.platform == "cuda" and target.usable_bytes is not None and run.offload == "none" and is_paged(run)


def overflow_bytes(architecture: Architecture, run: Run, target: Target, source: StepSource | None = None) -> int:
    """Paged state of one GPU that does not fit beside the rest on a device; 0 for less than `NEGLIGIBLE_BYTES`, where
    nothing says how much fits, and where it is `uncounted`."""
    if not can_page(run, target) or uncounted(architecture, run):
        return 0
    held = timeline_of(architecture, run, source=source).stepped_bytes
    return _beyond(paged_state_bytes(architecture, run), held, target)


def uncounted(architecture: Architecture, run: Run) -> str:
    """Runs whose paging is not worked out, in words; empty for the others."""
    if is_split(run):
        return "with --tp, --pp and --cp"
    return f"of {architecture.name}, which has no formulas" if architecture.settings else ""


def _beyond(state: int, held: int, target: Target) -> int:
    moved = state - max(int(target.usable_bytes or 0) - held, 0)
    return moved if moved >= NEGLIGIBLE_BYTES else 0


def paging_on_card(
    resolved: Resolved, architecture: Architecture, target: Target, source: StepSource | None = None
) -> Resolved:
    """The run with `Run.paged_bytes` as it is on this device."""
    run = resolved.run
    if not can_page(run, target):
        return resolved
    what = uncounted(architecture, run)
    if what:
        note = f"What of the paged optimizer state goes to the host and back is not counted {what}."
        return replace(resolved, notes=(*resolved.notes, note))
    moved = overflow_bytes(architecture, run, target, source)
    if not moved:
        return resolved
    fits = paged_state_bytes(architecture, run) - moved
    note = (
        f"Of {gib(fits + moved):.1f} GiB of paged optimizer state {gib(fits):.1f} GiB fit beside the rest; the "
        f"other {gib(moved):.1f} GiB go to each GPU's host and come back in every step, over PCIe (assumed; the "
        "interval reaches to all of it)."
    )
    return replace(
        resolved,
        run=replace(run, paged_bytes=moved),
        origins={**resolved.origins, "paged_bytes": "assumed"},
        notes=(*resolved.notes, note),
    )


def paging_seconds(
    architecture: Architecture, runs: Sequence[Run], allocated_bytes: Array, target: Target, factors: FactorSet
) -> Array:
    """(runs,) seconds that paged state adds to a step on one device; NaN where it moves at an unknown rate."""
    extra = np.zeros(len(runs))
    for row, run in enumerate(runs):
        if not can_page(run, target) or uncounted(architecture, run):
            continue
        moved = _beyond(paged_state_bytes(architecture, run), int(allocated_bytes[row]), target)
        if moved:
            extra[row] = _seconds(architecture, replace(run, paged_bytes=moved), target, factors)
    return extra


def _seconds(architecture: Architecture, run: Run, target: Target, factors: FactorSet) -> float:
    """Of `Run.paged_bytes` in one step."""
    known = with_host(factors, architecture, run, target.gpu)
    try:
        return float(communication_seconds(host_operations(architecture, run), known, run=run).sum())
    except InputError:
        return math.nan
