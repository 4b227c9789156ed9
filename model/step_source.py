"""Where the inventory of a step comes from: the formulas, or a source that the question brings along.

The only other source is a trace of the real code (`tunecast.calibrate.exact_source`), which this layer does not
import: it is given one as a function. It describes one GPU that does everything by itself; what sharding takes
away, keeps whole and sends follows from the same rules as for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.collectives import communication_operations
from tunecast.model.flops import executed_by_dtype, model_flops_per_step
from tunecast.model.inventory import flops_by_dtype, ordered, step_operations
from tunecast.model.memory import MemoryForecast, MemoryOverheads, memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.parallel import is_split
from tunecast.model.parallel_offload import host_operations
from tunecast.model.run import Run
from tunecast.model.sharded_update import own_update
from tunecast.model.sharding import shards_of
from tunecast.model.sharding_copies import LATER_SUMS, copy_operations, sums_whole
from tunecast.model.tape_peaks import Parts, Place
from tunecast.model.trained import trainable_params

PROVEN_UNKNOWN = ("none", "ddp", "zero1", "zero2")
"""Shardings that need no shapes of whole layers: only what is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInventory:
    """One optimizer step on one GPU without sharding."""

    operations: tuple[Operation, ...]
    """Every kernel, the update included, equal ones counted together."""
    places: tuple[tuple[Place, Parts], ...]
    """Everything alive at the peak of every place of the step, ``load`` first."""
    model_flops: float
    """Required FLOPs: no recomputation, causal attention halved where its kernels halve it."""
    trainable_params: int
    notes: tuple[str, ...] = ()


ADDED_WHOLE = (
    "The traced GPU adds gradients of several micro-batches up whole, in their own dtype; what this sharding adds "
    "instead (shares, or fp32) is not in the trace."
)
StepSource = Callable[[Architecture, Run, str], StepInventory]
"""Gives the inventory of a run of an architecture on a platform (``cuda`` or ``cpu``)."""


def operations_of(
    architecture: Architecture, run: Run, *, platform: str = "cuda", source: StepSource | None = None
) -> tuple[Operation, ...]:
    """Everything one GPU executes in one optimizer step, recomputation and collectives included.

    Of a source, gradients of micro-batches are added whole, and the update of a sharded state is the formulas'.
    """
    if source is None:
        return step_operations(architecture, run, platform=platform)
    check_sharding(architecture, run)
    found = source(architecture, run, platform).operations
    if run.num_gpus == 1:
        return ordered([*found, *host_operations(architecture, run)])
    kernels = [operation for operation in found if operation.phase is not Phase.OPTIMIZER]
    update = [operation for operation in found if operation.phase is Phase.OPTIMIZER]
    if shards_of(run).optimizer_state:
        update = list(own_update(architecture, run, platform=platform))
    copies = [operation for operation in copy_operations(architecture, run) if operation.name not in LATER_SUMS]
    sent = [*communication_operations(architecture, run), *host_operations(architecture, run)]
    return ordered([*kernels, *update, *copies, *sent])


def timeline_of(
    architecture: Architecture,
    run: Run,
    overheads: MemoryOverheads | None = None,
    *,
    platform: str = "cuda",
    source: StepSource | None = None,
    workspace_bytes: int = 0,
) -> MemoryForecast:
    """Peak memory of one GPU."""
    places = None
    if source is not None:
        check_sharding(architecture, run)
        places = source(architecture, run, platform).places
    return memory_timeline(
        architecture, run, overheads, platform=platform, whole=places, workspace_bytes=workspace_bytes
    )


def model_flops_of(
    architecture: Architecture, run: Run, *, platform: str = "cuda", source: StepSource | None = None
) -> float:
    """Required FLOPs of one optimizer step of the whole job; by formula where the family has one."""
    if source is None or not architecture.settings:
        return model_flops_per_step(architecture, run)
    return run.num_gpus * source(architecture, run, platform).model_flops


def executed_by_dtype_of(
    architecture: Architecture, run: Run, *, platform: str = "cuda", source: StepSource | None = None
) -> dict[str, float]:
    """FLOPs the kernels of all GPUs run in one optimizer step, recomputation included, by the dtype that multiplies."""
    if source is None:
        return executed_by_dtype(architecture, run)
    counted = flops_by_dtype(source(architecture, run, platform).operations, Kind.GEMM, Kind.ATTENTION)
    return {dtype: run.num_gpus * flops for dtype, flops in counted.items()}


def trainable_params_of(
    architecture: Architecture, run: Run, *, platform: str = "cuda", source: StepSource | None = None
) -> int:
    """Parameters that take gradients."""
    if source is None:
        return trainable_params(architecture, run)
    return source(architecture, run, platform).trainable_params


def notes_of(
    architecture: Architecture, run: Run, *, platform: str = "cuda", source: StepSource | None = None
) -> tuple[str, ...]:
    """What the source has to say about the run."""
    if source is None:
        return ()
    told = () if run.gradient_accumulation_steps == 1 or sums_whole(run) else (ADDED_WHOLE,)
    return (*source(architecture, run, platform).notes, *told)


def check_sharding(architecture: Architecture, run: Run) -> None:
    """Refuse a sharding whose memory needs shapes that only the real code knows, and what splits layers."""
    if is_split(run) or run.offload != "none":
        raise NotSupportedError(
            "--exact traces one GPU that computes every layer by itself, so it knows no --tp, --pp, --cp or --offload; "
            "leave --exact out."
        )
    if run.num_gpus == 1 or not architecture.settings:
        return
    if run.sharding not in PROVEN_UNKNOWN or not run.has_adapters:
        raise NotSupportedError(
            f"--exact of {architecture.name} over {run.num_gpus} GPUs was asked for, but how {architecture.model_type} "
            f"spreads under --sharding {run.sharding} with --method {run.method} is not proven; use one GPU, or "
            "adapters with --sharding ddp, zero1 or zero2."
        )
