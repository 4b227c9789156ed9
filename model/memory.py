"""Memory of one GPU as a timeline: what is alive at each moment of the step, and the largest of them.

What is alive between steps is in `memory_static.py`; what a step adds follows from the tape: a storage
is alive from the kernel that writes it to the last one that reads it. Three views, never mixed:
`allocated` (tensors), `reserved` (what the allocator holds), `process` (with the CUDA context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from tunecast.model.architecture import Architecture, layer_kinds
from tunecast.model.joined import STACKS
from tunecast.model.litgpt import is_litgpt
from tunecast.model.litgpt_head import returned_bytes
from tunecast.model.litgpt_sharding import flat_bytes
from tunecast.model.loading import loading_parts
from tunecast.model.megatron import with_buffer
from tunecast.model.memory_static import layer_packed_bytes, master_ratio, static_parts
from tunecast.model.optimizer import update_scratch_bytes
from tunecast.model.parallel import is_split, local_architecture, local_run
from tunecast.model.parallel_memory import added_bytes, kept_bytes
from tunecast.model.parallel_offload import offloaded
from tunecast.model.replay import replayed_bytes
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run, tokenless
from tunecast.model.sharding import (
    SHARDS,
    Shards,
    communication_bytes,
    first_gather_bytes,
    holds_whole,
    reduction_share,
    shard_gpus,
    shards_of,
    share,
    spared_at_loss,
    sums_wide,
)
from tunecast.model.short_stack import short_stack
from tunecast.model.stages import stages_counted
from tunecast.model.step import of_several, tape_run, write_step
from tunecast.model.tape_peaks import PARTS, Parts, Place, Spot, deep_peaks, largest_by_place, peaks_by_two
from tunecast.model.trained import stored_bytes, trained_dtype, trained_tensors
from tunecast.model.value import Value
from tunecast.model.zero_memory import (
    is_deepspeeds,
    zero_end_places,
    zero_master_bytes,
    zero_parts,
    zero_update_bytes,
)

MOMENTS = ("load", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverheads:
    """What the process holds beyond its tensors; measured or published, never assumed here."""

    fragmentation_frac: Value
    """Reserved beyond allocated, as a fraction of what a step allocates beyond its resting state."""
    context_bytes: Value
    """Process beyond reserved: CUDA context, kernels, library workspaces."""
    replayed_frac: Value | None = None
    """Reserved beyond what a replay of the allocations gives (`replay`), in the same fraction; None where the device's
    own steps, or published runs, do not follow the replay, or nobody has compared them."""
    origins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Peak memory of one GPU."""

    allocated_bytes: int
    """Largest sum of tensors alive (``torch.cuda.max_memory_allocated``)."""
    at_rest_bytes: int
    """Between steps, optimizer state included."""
    peak_moment: str
    parts_bytes: Parts
    """The peak by what it is made of; sums to `allocated_bytes`."""
    moments: Parts
    """Peak of each moment."""
    reserved_bytes: Value | None = None
    process_bytes: Value | None = None
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def stepped_bytes(self) -> int:
        """The peak of a step, which that of loading may be above."""
        return max(self.at_rest_bytes, *(peak for moment, peak in self.moments.items() if moment != "load"))


def step_peaks(architecture: Architecture, run: Run, platform: str = "cuda") -> dict[Place, Parts]:
    """Peaks of a whole step beyond the resting state, the update left out, at the model's depth.

    Memory at one place is linear in depth, and from the first layer of a kind to its last it runs linearly too, so
    that those hold the maximum.
    """
    return taped_peaks(architecture, tape_run(run), platform)


def taped_peaks(architecture: Architecture, run: Run, platform: str) -> dict[Place, Parts]:
    """`step_peaks` of a run that the tape tells from others."""
    several = of_several(architecture, run)
    if several is not None:
        peaks = spot_peaks(architecture, several, platform)
        return largest_by_place({spot: parts for spot, parts in peaks.items() if spot[3] == 0})
    return largest_by_place(spot_peaks(architecture, run, platform))


@lru_cache(maxsize=4096)
def spot_peaks(architecture: Architecture, run: Run, platform: str) -> dict[Spot, Parts]:
    """Peaks of every spot at the model's depth: of a tape with some of its layers, and what further ones add.

    LitGPT makes tensors for every layer before the first one, so that two short tapes tell.
    """
    stack = short_stack(architecture, run)
    tape = write_step(stack.architecture, run, platform)
    if stack.times > 1 and is_litgpt(architecture):
        low, high = replace(stack, times=1), replace(stack.deeper(), times=1)
        deeper = deep_peaks(write_step(high.architecture, run, platform), high)
        return peaks_by_two(deep_peaks(tape, low), deeper, stack.times - 1)
    return deep_peaks(tape, stack)


def update_peak(architecture: Architecture, run: Run, platform: str) -> Parts:
    """Gradients and temporaries while the optimizer runs; in the backward it has one tensor's, which are left out."""
    if run.optimizer_in_backward:
        return dict.fromkeys(PARTS, 0)
    gradients = stored_bytes(trained_tensors(architecture, run), trained_dtype(run))
    scratch = update_scratch_bytes(architecture, run, platform=platform)
    logits = returned_bytes(architecture, run) if is_litgpt(architecture) else 0
    return {**dict.fromkeys(PARTS, 0), "gradients": gradients, "scratch": scratch, "logits": logits}


def sharded(parts: Mapping[str, int], shards: Shards, run: Run, moment: str, packed_bytes: int) -> Parts:
    """One GPU's share of each part; of quantized weights the packed ones are shared out, not their statistics."""
    divided = {
        "weights": shards.weights,
        "adapters": shards.weights,
        "gradients": shards.gradients or (moment == "optimizer" and run.sharding in FSDP),
        "optimizer_state": shards.optimizer_state,
        "scratch": shards.optimizer_state and moment == "optimizer",
    }
    held = {part: share(n, shard_gpus(run)) if divided.get(part) else n for part, n in parts.items()}
    if shards.weights or run.offload == "all":
        stays = 0 if run.offload == "all" else share(packed_bytes, shard_gpus(run))  # they leave with the parameters
        held["quantized"] -= packed_bytes - stays
    return held


def whole_places(architecture: Architecture, run: Run, *, platform: str = "cuda") -> list[tuple[Place, Parts]]:
    """Everything alive at the peak of every place of the step on a GPU that shards nothing, ``load`` first."""
    static = {**dict.fromkeys(PARTS, 0), **static_parts(architecture, run, platform=platform)}
    nothing = dict.fromkeys(PARTS, 0)
    places: list[tuple[Place, Parts]] = [(("load", "outside", False), nothing)]
    places += step_peaks(architecture, run, platform).items()
    places.append((("optimizer", "outside", False), update_peak(architecture, run, platform)))
    return [(place, {part: static[part] + extra[part] for part in PARTS}) for place, extra in places]


def moment_parts(
    architecture: Architecture,
    run: Run,
    *,
    platform: str = "cuda",
    whole: Sequence[tuple[Place, Parts]] | None = None,
) -> list[tuple[str, Parts]]:
    """Everything alive on one GPU at the peak of every place of the step; `whole` stands in for the formulas.

    Of a pipeline, on the stage that needs most.
    """
    if not is_split(run):
        return local_parts(architecture, run, platform=platform, whole=whole)
    stages = [stage_parts(architecture, run, stage, platform) for stage, _ in stages_counted(architecture, run)]
    return max(stages, key=lambda places: max(sum(parts.values()) for _, parts in places))


def stage_parts(architecture: Architecture, run: Run, stage: int, platform: str) -> list[tuple[str, Parts]]:
    """The same for one GPU of a pipeline stage of a model that several GPUs split."""
    here, local = local_architecture(architecture, run, stage), local_run(run)
    kept = kept_bytes(here, local, platform) if run.pp > 1 else 0
    found = []
    for moment, parts in local_parts(here, local, platform=platform):
        added = added_bytes(architecture, run, stage, kept, moment)
        found.append((moment, {part: held + added.get(part, 0) for part, held in parts.items()}))
    return found


def local_parts(
    architecture: Architecture,
    run: Run,
    *,
    platform: str = "cuda",
    whole: Sequence[tuple[Place, Parts]] | None = None,
) -> list[tuple[str, Parts]]:
    """The same for a GPU that computes every layer by itself."""
    places = whole_places(architecture, run, platform=platform) if whole is None else whole
    shards = shards_of(run) if run.num_gpus > 1 else SHARDS["none"]
    packed = sum(group.count * layer_packed_bytes(group.layer, run) for group in layer_kinds(architecture))
    masters = zero_master_bytes(architecture, run)
    spread, deepspeed = tokenless(run), is_deepspeeds(architecture, run)
    widened = (reduction_share(run) if sums_wide(run) else 1) if holds_whole(run) else master_ratio(run)
    found = []
    for (moment, position, _), held in places:
        gradients = held["gradients"] * (1 if moment == "optimizer" else widened)
        extra = {**held, "optimizer_state": held["optimizer_state"] + masters, "gradients": gradients}
        own = sharded(extra, shards, run, moment, packed)
        update = zero_update_bytes(architecture, run, held["scratch"]) if moment == "optimizer" else None
        if update is not None:
            own["gradients"], own["scratch"] = update
        parts = offloaded(own, run, moment)
        if deepspeed:
            parts = zero_parts(architecture, spread, parts, moment)
        elif run.stack in STACKS:
            parts = with_buffer(architecture, spread, parts, moment)
        else:
            parts["communication"] += communication_bytes(architecture, spread, moment, position)
            parts["communication"] -= spared_at_loss(architecture, run) if moment == "loss" else 0
        flat = flat_bytes(architecture, run, moment, position)
        parts["gradients"] += flat[0]
        parts["communication"] += flat[1]
        found.append((moment, parts))
    if deepspeed:
        return [*found, *zero_end_places(architecture, spread, found[0][1])]
    earlier = max((parts["gradients"] for moment, parts in found if moment == "forward"), default=0)
    first = {**found[0][1], "gradients": earlier, "communication": first_gather_bytes(architecture, run)}
    return [*found, ("forward", first)]


def memory_timeline(
    architecture: Architecture,
    run: Run,
    overheads: MemoryOverheads | None = None,
    *,
    platform: str = "cuda",
    whole: Sequence[tuple[Place, Parts]] | None = None,
    workspace_bytes: int = 0,
) -> MemoryForecast:
    """Peak memory of one GPU in a step after the first (optimizer state exists).

    `whole` stands in for the formulas: the parts of an unsharded step, as `whole_places` gives them. `workspace_bytes`
    are the card's (`workspaces.workspace_bytes`), held all the time.
    `reserved` is what a replay of the step's allocations gives where its order is known, else the peak with the
    allocator's usual fragmentation; `process` adds the context to that. Both are None without `overheads`.
    """
    places = moment_parts(architecture, run, platform=platform, whole=whole)
    places = [(moment, {**parts, "workspaces": workspace_bytes}) for moment, parts in places]
    moments = {m: max((sum(parts.values()) for moment, parts in places if moment == m), default=0) for m in MOMENTS}
    peak_moment, parts = max(places, key=lambda place: sum(place[1].values()))
    allocated = sum(parts.values())
    at_rest = sum(places[0][1].values())
    loading = {**dict.fromkeys(parts, 0), **loading_parts(architecture, run)}
    loaded = sum(loading.values())
    moments["load"] = max(moments["load"], loaded)
    reserved = process = None
    if overheads is not None:
        in_order = overheads.replayed_frac is not None and whole is None
        replayed = replayed_bytes(architecture, run, platform, workspace_bytes) if in_order else None
        reserved = at_least(loaded, reserved_value(allocated, at_rest, overheads, replayed))
        process = summed(reserved, overheads.context_bytes)
    if loaded > allocated:
        allocated, peak_moment, parts = loaded, "load", loading
    return MemoryForecast(
        allocated_bytes=allocated,
        at_rest_bytes=at_rest,
        peak_moment=peak_moment,
        parts_bytes=parts,
        moments=moments,
        reserved_bytes=reserved,
        process_bytes=process,
        origins=dict(overheads.origins) if overheads else {},
    )


def reserved_value(
    allocated_bytes: int, at_rest_bytes: int, overheads: MemoryOverheads, replayed: int | None = None
) -> Value:
    """Reserved = replayed, or allocated, + what is measured beyond it x (allocated beyond the resting state), with its
    interval; no less than allocated."""
    transient, beyond, base = allocated_bytes - at_rest_bytes, overheads.fragmentation_frac, allocated_bytes
    if replayed is not None and overheads.replayed_frac is not None:
        beyond, base = overheads.replayed_frac, replayed
    low, value, high = (
        max(base + frac * transient, allocated_bytes) for frac in (beyond.low, beyond.value, beyond.high)
    )
    return Value(value=value, low=low, high=high)


def at_least(least_bytes: int, found: Value) -> Value:
    """The value and both its ends, none below what was held before."""
    low, value, high = (max(float(least_bytes), end) for end in (found.low, found.value, found.high))
    return Value(value=value, low=low, high=high)


def summed(a: Value, b: Value) -> Value:
    """Sum of two quantities whose intervals are taken to move together (the wide, safe reading)."""
    return Value(value=a.value + b.value, low=a.low + b.low, high=a.high + b.high)
