"""What sharding makes a GPU copy inside its own memory, around the collectives: bytes that no link sees.

==========  ======================================================================================================
DDP         every gradient scaled into its bucket, and back when the bucket is reduced
FSDP1       the gradients of a unit joined into one flat gradient (the backward of ``split``), which is divided before
            it is reduced, and a GPU's share after; weights are views of what is gathered
FSDP2       a GPU's shard into the buffer of the all-gather, the whole copied out of it (``split_with_sizes_copy``);
            gradients laid out for the reduction in its dtype (``chunk_cat``), divided in fp16 alone; whole gradients
            of several micro-batches are held and added in that dtype
ZeRO-1, -2  every gradient into its bucket, the bucket divided, one that several GPUs update flattened again and a
            GPU's own part copied back, and into its buffer
ZeRO-3      every gradient into its bucket, the bucket ordered by owner and divided, a GPU's own part kept
Megatron    the reduced buffer scaled once
==========  ======================================================================================================

Where shards are stored in a wider dtype than they are gathered in, a shard is cast before every gather. Where every
micro-batch is reduced, gradients add up in shards and not whole.

Sources: torch 2.13 ``nn/parallel/distributed.py`` with ``csrc/distributed/c10d/reducer.cpp``,
``distributed/fsdp/_runtime_utils.py``, ``distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param.py``,
run by the tests in two and four processes; DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``, ``stage3.py``,
``partition_parameters.py``, recorded in two (``tests/fixtures/deepspeed_copies.json``); Megatron-Core
``distributed/param_and_grad_buffer.py``, read. Left out: weights that ZeRO-3 fetches several at a time, which are
copied before and after (how many depends on what is live); smaller buckets (``auto`` of the Trainer's DeepSpeed file),
above which a gradient is reduced where it is. What offloading adds is in `offloaded_gradients`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tunecast.model.architecture import Architecture
from tunecast.model.buckets import filled
from tunecast.model.collectives import gathers_in_step, is_megatrons, reduced_times
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run
from tunecast.model.sharding import (
    by_size,
    layer_gradient_bytes,
    one_layer_bytes,
    reduction_share,
    shard_gpus,
    shards_of,
    sums_wide,
)
from tunecast.model.sharding_root import gathered_root, gathers_root_again, left_to_root, trained_root
from tunecast.model.trained import Trained, by_dtype, gradient_dtype, trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

SHARD_SUM = "shard.sum"
WIDE_SUM = "fsdp.add"
LATER_SUMS = (SHARD_SUM, WIDE_SUM)
"""Gradients of later micro-batches that are not added as one GPU alone adds them."""
SUM_MOVES = 3
"""Sizes moved where a gradient is added to what is there."""
COPIED_BY = ("ddp", "fsdp", "zero", "megatron", "shard")
"""What the names of these copies begin with."""
Unit = tuple[int, int]
"""Bytes, and how many units have so many."""


def copies_for_others(name: str) -> bool:
    """Whether an operation of this name is one of these copies."""
    return name.partition(".")[0] in COPIED_BY


def copy_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """Copies of one optimizer step on one GPU, beside the update's."""
    run = with_stage(run)
    if run.sharding == "none":
        return []
    if run.sharding in FSDP:
        version = fsdp1_copies if run.fsdp_version == 1 else fsdp2_copies
        return [*version(architecture, run), *shard_sums(architecture, run)]
    if is_megatrons(architecture, run):
        return scaled_buffer(architecture, run)
    if run.sharding == "ddp":
        return bucket_copies(architecture, run)
    return [*zero_copies(architecture, run), *shard_sums(architecture, run)]


def copied(name: str, phase: Phase, n_bytes: float, *, count: float, dtype: str, launches: float = 1.0) -> Operation:
    """`count` copies that read and write so many bytes together."""
    return Operation(
        name=name, kind=Kind.MEMORY, phase=phase, dtype=dtype, bytes=float(n_bytes), count=count, launches=launches
    )


def stage_of(run: Run) -> str:
    """Whose rules DeepSpeed follows: on one GPU, where nothing is sharded, those of ZeRO-2, and of ZeRO-3 where
    parameters are offloaded."""
    if run.sharding != "none":
        return run.sharding
    return "zero3" if run.offload == "all" else "zero2"


def with_stage(run: Run) -> Run:
    """The run as DeepSpeed shards it where it offloads, on one GPU too."""
    return run if run.offload == "none" or run.sharding != "none" else replace(run, sharding=stage_of(run))


def sums_shards(run: Run) -> bool:
    """Whether gradients of later micro-batches are added to a GPU's share, and not to whole ones."""
    run = with_stage(run)
    return run.gradient_accumulation_steps > 1 and shards_of(run).gradients


def sums_whole(run: Run) -> bool:
    """Whether gradients of later micro-batches are added to whole ones as autograd makes them."""
    return not sums_shards(run) and not sums_wide(run)


def shard_sums(architecture: Architecture, run: Run) -> list[Operation]:
    """Shares of gradients added to those of the micro-batches before: a part of each, of ZeRO-2 some of them whole,
    of FSDP1 one of a unit."""
    if not sums_shards(run):
        return []
    own, later, gpus = trained_dtype(run), run.gradient_accumulation_steps - 1, shard_gpus(run)
    if run.sharding in FSDP and run.fsdp_version == 1:
        stored = DTYPE_BYTES[own] / DTYPE_BYTES[gradient_dtype(run)]
        return [
            copied(SHARD_SUM, Phase.BACKWARD, SUM_MOVES * stored * size / gpus, count=later * count, dtype=own)
            for size, count in trained_units(architecture, run)
        ]
    sizes = Counter((tensor.bytes_in(own), tensor.dtype or own) for tensor in trained_tensors(architecture, run))
    parts = 1 if run.sharding == "zero2" else gpus
    return [
        copied(SHARD_SUM, Phase.BACKWARD, SUM_MOVES * size / parts, count=later * count * parts / gpus, dtype=dtype)
        for (size, dtype), count in sizes.items()
    ]


def bucket_copies(architecture: Architecture, run: Run) -> list[Operation]:
    """DDP: into the bucket and back, a kernel per tensor each way."""
    times, _ = reduced_times(run)
    own = gradient_dtype(run)
    sizes = Counter((tensor.bytes_in(own), tensor.dtype or own) for tensor in trained_tensors(architecture, run))
    return [
        copied(name, Phase.BACKWARD, 2 * size, count=times * count, dtype=dtype)
        for (size, dtype), count in sizes.items()
        for name in ("ddp.to_bucket", "ddp.from_bucket")
    ]


def scaled_buffer(architecture: Architecture, run: Run) -> list[Operation]:
    """Megatron: gradients multiplied by one over the GPUs before they are summed."""
    size = sum(tensor.bytes_in(gradient_dtype(run)) for tensor in trained_tensors(architecture, run))
    size *= reduction_share(run)
    times, _ = reduced_times(run)
    return [copied("megatron.scale", Phase.BACKWARD, 2 * size, count=times, dtype=gradient_dtype(run))] if size else []


def trained_units(architecture: Architecture, run: Run) -> list[Unit]:
    """Gradient bytes of every unit that FSDP reduces: layers, and all that is outside them."""
    root = trained_root(architecture, run)
    units = [*by_size(architecture, run, layer_gradient_bytes), *((size, 1) for size in root)]
    return [(size, count) for size, count in units if size]


def gathered_units(architecture: Architecture, run: Run) -> Iterator[tuple[Phase, Unit]]:
    """What is gathered in a micro-batch, unit by unit."""
    layers, root = by_size(architecture, run, one_layer_bytes), gathered_root(architecture, run)
    alone = left_to_root(architecture, run)
    for unit in (*((size, 1) for size in (root.entry, root.exit - alone, alone) if size), *layers):
        yield Phase.FORWARD, unit
    if run.sharding == "fsdp-grad-op":
        return
    again = root.entry if gathers_root_again(run) or root.exit else 0
    for unit in (*([(again, 1)] if again else []), *layers):
        yield Phase.BACKWARD, unit


def shard_casts(architecture: Architecture, run: Run) -> list[Operation]:
    """A GPU's shard of every unit cast to what is gathered, where it is stored wider."""
    stored, sent = DTYPE_BYTES[trained_dtype(run)], DTYPE_BYTES[run.dtype]
    if run.has_adapters or stored == sent:
        return []
    per_byte = (stored + sent) / sent / shard_gpus(run)
    return [
        copied("fsdp.cast", phase, size * per_byte, count=count * gathers_in_step(run, phase), dtype="fp32")
        for phase, (size, count) in gathered_units(architecture, run)
    ]


def divisors(num_gpus: int) -> tuple[float, float]:
    """What FSDP divides gradients by before and after they are summed, about the root of the GPUs' number each.

    ``_get_gradient_predivide_factor`` of torch 2.13, ``_get_gradient_divide_factors`` in FSDP2.
    """
    before = 1
    while num_gpus % before == 0 and num_gpus / before > before:
        before *= 2
    return before, num_gpus / before


def divisions(run: Run, size: float, count: float) -> list[Operation]:
    """Gradients of these bytes divided in their buffer, and shares of them once they are summed."""
    dtype, wide = run.reduce_dtype or gradient_dtype(run), reduction_share(run) * size
    moved = zip(divisors(run.num_gpus), (2 * wide, 2 * wide / shard_gpus(run)), strict=True)
    return [
        copied("fsdp.divide", Phase.BACKWARD, each, count=count, dtype=dtype) for divisor, each in moved if divisor > 1
    ]


def stored_shares(run: Run, size: float, count: float) -> list[Operation]:
    """Summed shares cast to what trains, where that has another dtype."""
    stored, wider = DTYPE_BYTES[trained_dtype(run)] / DTYPE_BYTES[gradient_dtype(run)], reduction_share(run)
    if stored == wider:
        return []
    moved = (wider + stored) * size / shard_gpus(run)
    return [copied("fsdp.store", Phase.BACKWARD, moved, count=count, dtype=run.reduce_dtype or gradient_dtype(run))]


def fsdp1_copies(architecture: Architecture, run: Run) -> list[Operation]:
    """Flat gradients made and divided."""
    times, _ = reduced_times(run)
    dtype, wider = run.reduce_dtype or gradient_dtype(run), reduction_share(run)
    found = shard_casts(architecture, run)
    for size, count in trained_units(architecture, run):
        joined, reduced = count * run.gradient_accumulation_steps, count * times
        found.append(copied("fsdp.join", Phase.BACKWARD, 2 * size, count=joined, dtype=gradient_dtype(run)))
        if wider > 1:
            found.append(copied("fsdp.widen", Phase.BACKWARD, (1 + wider) * size, count=reduced, dtype=dtype))
        found += [*divisions(run, size, reduced), *stored_shares(run, size, reduced)]
    return found


def fsdp2_copies(architecture: Architecture, run: Run) -> list[Operation]:
    """Shards into the gather's buffer, whole units out of it, gradients into that of the reduction."""
    times, _ = reduced_times(run)
    gpus = shard_gpus(run)
    found = shard_casts(architecture, run)
    for phase, (size, count) in gathered_units(architecture, run):
        times_gathered = count * gathers_in_step(run, phase)
        found.append(copied("fsdp.copy_in", phase, 2 * size / gpus, count=times_gathered, dtype=run.dtype))
        found.append(copied("fsdp.copy_out", phase, 2 * size, count=times_gathered, dtype=run.dtype))
    dtype, wider = run.reduce_dtype or gradient_dtype(run), reduction_share(run)
    summed = wider if sums_wide(run) else 1
    for size, count in trained_units(architecture, run):
        reduced = count * times
        found.append(copied("fsdp.lay_out", Phase.BACKWARD, (summed + wider) * size, count=reduced, dtype=dtype))
        found += [*(divisions(run, size, reduced) if dtype == "fp16" else []), *stored_shares(run, size, reduced)]
    return [*found, *wide_sums(architecture, run)]


def wide_sums(architecture: Architecture, run: Run) -> list[Operation]:
    """Whole gradients cast when a micro-batch leaves them, those of later ones added to them."""
    if not sums_wide(run):
        return []
    own, wider, later = gradient_dtype(run), reduction_share(run), run.gradient_accumulation_steps - 1
    sizes = Counter(tensor.bytes_in(own) for tensor in trained_tensors(architecture, run))
    return [
        copied(name, Phase.BACKWARD, moved * size, count=times * count, dtype=run.reduce_dtype or own)
        for size, count in sizes.items()
        for name, moved, times in (("fsdp.widen", 1 + wider, 1), (WIDE_SUM, 1 + 2 * wider, later))
    ]


def zero_copies(architecture: Architecture, run: Run) -> list[Operation]:
    """DeepSpeed's buckets of gradients, and a GPU's own part of them."""
    times, _ = reduced_times(run)
    own, gpus = gradient_dtype(run), shard_gpus(run)
    tensors = trained_tensors(architecture, run)
    found: list[Operation] = []
    for dtype, part in by_dtype(
        tensors if run.sharding == "zero1" else tensors[::-1], own
    ):  # ZeRO-1 after the backward
        buckets = Counter(shared_out(filled(part, run.reduce_bucket_size), dtype, gpus))
        for (bucket, owners), count in buckets.items():
            found += bucket_of_zero(bucket, count * times, dtype, run, owners)
    if run.offload != "none":  # kept in the host
        return found
    sizes = Counter((tensor.bytes_in(own), tensor.dtype or own) for tensor in tensors)
    of_every = run.sharding == "zero3"  # a part of every tensor, later ones added; else whole tensors, every time
    for (size, dtype), count in sizes.items():
        moved, times_kept = (2 * size / gpus, count) if of_every else (2 * size, count * times / gpus)
        found.append(copied("zero.keep", Phase.BACKWARD, moved, count=times_kept, dtype=dtype))
    return found


def shared_out(buckets: list[list[Trained]], dtype: str, gpus: int) -> list[tuple[tuple[int, ...], int]]:
    """Bytes of the gradients of each bucket, and how many GPUs update parts of it: each has an equal run of all."""
    part = sum(tensor.elements for bucket in buckets for tensor in bucket) / gpus
    begin, found = 0, []
    for bucket in buckets:
        end = begin + sum(tensor.elements for tensor in bucket)
        owners = math.ceil(end / part) - math.floor(begin / part) if end > begin else 1
        found.append((tuple(tensor.bytes_in(dtype) for tensor in bucket), owners))
        begin = end
    return found


def bucket_of_zero(sizes: tuple[int, ...], count: float, dtype: str, run: Run, owners: int) -> list[Operation]:
    """One bucket, from gradients of these bytes to the reduction. A gradient above the limit is reduced where it is.

    ZeRO-1 and -2 join the slices of one owner (``average_tensor``): of a bucket that one GPU updates there is nothing
    to flatten, and nothing to copy back.
    """
    whole, alone = sum(sizes), len(sizes) == 1
    in_parts = not alone if run.sharding == "zero3" else owners > 1
    found = [copied("zero.divide", Phase.BACKWARD, 2 * whole, count=count, dtype=dtype)]
    if in_parts:
        found.append(copied("zero.flatten", Phase.BACKWARD, 2 * whole, count=count, dtype=dtype))
    if in_parts and run.sharding != "zero3":
        found.append(copied("zero.from_bucket", Phase.BACKWARD, 2 * whole / shard_gpus(run), count=count, dtype=dtype))
    if whole <= run.reduce_bucket_size * DTYPE_BYTES[dtype]:
        moved = 2 * whole / len(sizes)
        found.append(copied("zero.to_bucket", Phase.BACKWARD, moved, count=count * len(sizes), dtype=dtype))
    return found
