"""The collectives of a data-parallel step, and which of them hide behind nothing.

DDP
    all-reduces of buckets beside the backward; the last one is waited for (`buckets`).
ZeRO-1, ZeRO-2
    DeepSpeed sums whole buckets on every GPU and keeps its own part (``allreduce_and_scatter``, on by default as
    ``use_multi_rank_bucket_allreduce``), on the stream that computes unless ``overlap_comm`` is set; the new parameters
    of all GPUs are gathered when the update is done (``all_gather_dp_groups``), before anything else.
ZeRO-3
    weights of a layer are fetched while the one before computes, but the table of tokens is first; gradients are
    reduced in buckets beside the backward, the last one at its end.
FSDP
    the table of tokens (or all of the root: `sharding_root`) and the first layer are gathered before anything can run;
    the other units while the one before computes. Frameworks that wrap the root whole under FSDP2 gather it once more
    when the backward begins. The first layer's gradients and the table's are reduced when the backward is over.
Megatron's distributed optimizer (layers with joined projections, or split by ``--tp``; ``zero1``)
    gradients are scattered beside the backward and new parameters gathered beside the next forward
    (``overlap_grad_reduce`` and ``overlap_param_gather``, as NeMo and Megatron-Bridge set them; assumed), but for the
    bucket of the table of tokens.

Sources: DeepSpeed ``runtime/zero/stage_1_and_2.py`` and ``config.py`` (``overlap_comm_valid``), ``stage3.py``; torch
2.13 ``distributed/fsdp/_fully_shard``, run by the tests; Megatron-Core ``distributed/param_and_grad_buffer.py``.
Left out: what DeepSpeed's prefetch of ZeRO-3 cannot fetch in time (``stage3_prefetch_bucket_size``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tunecast.model.architecture import Architecture, layer_kinds
from tunecast.model.buckets import ddp_buckets, element_buckets, mean
from tunecast.model.joined import STACKS, is_joined
from tunecast.model.memory_static import layer_weight_bytes, root_weight_bytes
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve_parallel import MEGATRON_GPT
from tunecast.model.run import Run
from tunecast.model.sharding import (
    SHARDS,
    by_size,
    gradient_bytes,
    keeps_weights,
    layer_gradient_bytes,
    on_one_machine,
    one_layer_bytes,
    reduction_share,
    shard_gpus,
    shards_of,
)
from tunecast.model.sharding_root import gathered_root, gathers_root_again, left_to_root, trained_root
from tunecast.model.trained import gradient_dtype
from tunecast.model.units import DTYPE_BYTES

MEGATRON_BUCKET_ELEMENTS = 40_000_000
MEGATRON_BUCKET_ELEMENTS_PER_GPU = 1_000_000
"""Megatron-Core ``distributed/distributed_data_parallel.py``: a bucket has at least so many elements, and at least so
many for each GPU that it is spread over."""


def collective(
    name: str, phase: Phase, payload_bytes: float, *, count: float, dtype: str, run: Run, once: bool = False
) -> Operation:
    """`count` collectives over a whole buffer of `payload_bytes` (the size before sharding) per GPU.

    How many bytes cross a link (2 (N-1)/N of it for a ring all-reduce, (N-1)/N for the others) is the
    time model's affair (`links.py`).
    """
    group = shard_gpus(run)
    return Operation(
        name=name,
        kind=Kind.COMMUNICATION,
        phase=phase,
        dtype=dtype,
        bytes=payload_bytes,
        count=count,
        launches=1.0,
        group=group,
        group_per_node=on_one_machine(run, group),
        once=once,
    )


def communication_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """The collectives of one optimizer step on one GPU."""
    if run.num_gpus == 1:
        return []
    if SHARDS[run.sharding].weights:
        return gather_operations(architecture, run)
    whole = gradient_bytes(architecture, run)
    if not whole:
        return []
    if run.sharding == "ddp":
        own = megatron_buckets if run.stack in STACKS else ddp_buckets
        return reductions("all_reduce", own(architecture, run), run)
    if is_megatrons(architecture, run):
        return distributed_optimizer_operations(architecture, run)
    found = reductions("all_reduce", element_buckets(architecture, run, run.reduce_bucket_size), run)
    found = found if run.overlap_comm else [replace(each, blocking=True) for each in found]
    gather = collective("all_gather", Phase.OPTIMIZER, whole, count=1, dtype=gradient_dtype(run), run=run)
    return [*found, replace(gather, blocking=True)]


def reduced_times(run: Run) -> tuple[int, bool]:
    """How often a gradient is reduced in a step, and whether that is once: no stage of a pipeline waits for it then."""
    every = shards_of(run).gradients or run.sync_each_micro_batch
    times = run.gradient_accumulation_steps if every else 1
    return times, times == 1


def reductions(name: str, buckets: tuple[tuple[int, ...], tuple[int, ...]], run: Run) -> list[Operation]:
    """Gradients in buckets that the backward goes on beside, and in those that it ends with."""
    times, once = reduced_times(run)
    dtype, wider = run.reduce_dtype or gradient_dtype(run), reduction_share(run)
    beside, last = (
        collective(name, Phase.BACKWARD, wider * mean(n), count=len(n) * times, dtype=dtype, run=run, once=once)
        for n in buckets
    )
    return [each for each in (beside, replace(last, blocking=True)) if each.count]


def is_megatrons(architecture: Architecture, run: Run) -> bool:
    """Whether Megatron runs the layers: it joins projections, and splits them beside states that it shards.

    It shards no gradients: beside ``zero2`` and ``zero3`` layers are split by DeepSpeed (AutoTP).
    """
    if run.sharding in ("zero2", "zero3"):
        return False
    return run.tp > 1 or is_joined(architecture) or architecture.model_type == MEGATRON_GPT or run.stack in STACKS


def megatron_buckets(architecture: Architecture, run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of the parts of Megatron's buffer of gradients that are reduced at once."""
    most = max(MEGATRON_BUCKET_ELEMENTS, MEGATRON_BUCKET_ELEMENTS_PER_GPU * run.num_gpus)
    return element_buckets(architecture, run, most, past=True)


def distributed_optimizer_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """Gradients to the GPU that updates them, new parameters back, both beside work but for the bucket of the table:
    the backward ends with it, and the forward begins with it."""
    buckets = megatron_buckets(architecture, run)
    beside, first = (
        collective("all_gather", Phase.FORWARD, mean(n), count=len(n), dtype=gradient_dtype(run), run=run, once=True)
        for n in buckets
    )
    beside = replace(beside, bytes=beside.bytes * gathered_share(architecture, run))
    gathers = [each for each in (beside, replace(first, blocking=True)) if each.count]
    return [*reductions("reduce_scatter", buckets, run), *gathers]


def gathered_share(architecture: Architecture, run: Run) -> float:
    """Bytes of the layers' new parameters over those of their gradients: 1, or about half where weights are stored in
    8 bits. The last bucket, which has the table of tokens, is taken whole."""
    if not run.fp8_weights or run.has_adapters:
        return 1.0
    hidden = architecture.hidden_size
    sixteen = replace(run, fp8_weights=False)
    wide, stored = (
        sum(group.count * layer_weight_bytes(group.layer, hidden, each) for group in layer_kinds(architecture))
        for each in (sixteen, run)
    )
    return stored / wide


def gather_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """Weights gathered layer by layer in forward and backward, gradients scattered layer by layer."""

    def gather(phase: Phase, size: float, count: int) -> Operation:
        every = count * gathers_in_step(run, phase)
        return collective("all_gather", phase, size, count=every, dtype=run.dtype, run=run)

    layers = by_size(architecture, run, one_layer_bytes)
    alone = first_alone(architecture, run)
    operations = [gather(Phase.FORWARD, size, 1) for size in alone]
    operations = [replace(each, blocking=True) for each in operations if each.bytes]
    root = gathered_root(architecture, run)
    left = left_to_root(architecture, run)
    operations += [gather(Phase.FORWARD, size, 1) for size in (root.whole - alone[0] - left, left) if size]
    operations += [gather(Phase.FORWARD, size, count) for size, count in without_one(layers, alone[1:])]
    if run.sharding != "fsdp-grad-op":
        operations += [gather(Phase.BACKWARD, size, count) for size, count in layers]
    if gathers_root_again(run):
        operations.append(replace(gather(Phase.BACKWARD, root.whole, 1), blocking=True))
    elif root.entry and root.exit and run.sharding != "fsdp-grad-op":
        operations.append(gather(Phase.BACKWARD, root.entry, 1))
    return operations + reduction_operations(architecture, run)


def gathers_in_step(run: Run, phase: Phase) -> int:
    """How often a unit is gathered for a pass of one kind in a step: for every micro-batch, but that what the backward
    leaves whole is there for the next forward."""
    return 1 if keeps_weights(run) and phase is Phase.FORWARD else run.gradient_accumulation_steps


def first_alone(architecture: Architecture, run: Run) -> tuple[int, ...]:
    """Bytes that a forward cannot begin without: of the root, and of the first layer where nothing runs before it.

    ZeRO-3 fetches module by module: the table, and then the layers while it is looked up.
    """
    if run.sharding == "zero3":
        table = DTYPE_BYTES[run.dtype] * architecture.embedding_params
        return (min(table, root_weight_bytes(architecture, run)),)
    first = architecture.groups[0].layer
    return gathered_root(architecture, run).entry, one_layer_bytes(first, architecture.hidden_size, run)


def without_one(sizes: Iterable[tuple[int, int]], taken: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes with their counts, less one of each size in `taken`."""
    left = [(size, count - taken.count(size)) for size, count in sizes]
    return [(size, count) for size, count in left if count]


def reduction_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """Gradients to the GPU that owns them; hybrid: then across copies."""
    if not gradient_bytes(architecture, run):
        return []
    if run.sharding == "zero3":
        return reductions("reduce_scatter", element_buckets(architecture, run, run.reduce_bucket_size), run)
    times, once = reduced_times(run)
    sizes = [(size, count) for size, count in by_size(architecture, run, layer_gradient_bytes) if size]
    first = layer_gradient_bytes(architecture.groups[0].layer, architecture.hidden_size, run)
    root = trained_root(architecture, run)
    last = [size for size in (first, root.entry) if size]
    found = [(size, count, False) for size, count in without_one(sizes, (first,))]
    found += [(root.exit, 1, False)] if root.exit else []
    operations = []
    dtype, wider = run.reduce_dtype or gradient_dtype(run), reduction_share(run)
    for size, count, waited in [*found, *((size, 1, True) for size in last)]:
        scatter = collective(
            "reduce_scatter", Phase.BACKWARD, size * wider, count=count * times, dtype=dtype, run=run, once=once
        )
        scatter = replace(scatter, blocking=waited)
        operations += [scatter] if run.sharding != "hsdp" else [scatter, across_copies(scatter, run)]
    return operations


def across_copies(scatter: Operation, run: Run) -> Operation:
    """The all-reduce of each GPU's share with its counterparts in the other copies, as many of which are on a machine
    as groups fit there."""
    shards = shard_gpus(run)
    copies, together = run.num_gpus // shards, max(run.gpus_per_node // shards, 1)
    return replace(
        scatter, name="all_reduce", bytes=scatter.bytes / shards, group=copies, group_per_node=min(copies, together)
    )
