"""The update that one GPU does of a sharded optimizer state.

FSDP updates its share of every tensor. DeepSpeed and Megatron update flat buffers of fp32 copies: gradients are cast,
new values cast back, DeepSpeed's on a single GPU too. It also takes the norm of every gradient by itself, in fp64.

Sources: torch 2.13 ``distributed/fsdp``; DeepSpeed 0.19.8 ``runtime/zero/stage3.py`` (``get_grad_norm_direct``,
``_prepare_fp32_grad_for_sub_group``, ``unscale_and_clip_grads``, ``_reassign_or_swap_out_partitioned_parameters``) and
``stage_1_and_2.py`` (``step``), measured in two processes (``tests/fixtures/deepspeed_copies.json``); Megatron-Core
``optimizer/distrib_optimizer.py``, read. Left out: sub-groups of ZeRO-3 (``sub_group_size``), checks for overflow.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tunecast.model.architecture import Architecture
from tunecast.model.collectives import is_megatrons
from tunecast.model.megatron import MASTER, has_fp32_copies
from tunecast.model.operation import Operation
from tunecast.model.optimizer import (
    coefficient_operations,
    own_updates,
    update_operation,
    update_operations,
)
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.run import Run, tokenless
from tunecast.model.sharding import shard_gpus, shards_of, share
from tunecast.model.trained import Trained, by_dtype, trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

NORM_DTYPE_BYTES = 8
"""Of fp64."""


def own_update(architecture: Architecture, run: Run, *, platform: str = "cuda") -> tuple[Operation, ...]:
    """Clipping and update on one GPU: of everything, or of its share where optimizer state is sharded."""
    return _own_update(architecture, tokenless(run), platform)


@lru_cache(maxsize=256)
def _own_update(architecture: Architecture, run: Run, platform: str) -> tuple[Operation, ...]:
    if not shards_of(run).optimizer_state and has_fp32_copies(run):
        tensors = trained_tensors(architecture, run)
        updated = update_operations(architecture, run, platform=platform, dtype=MASTER)
        return (*updated, *narrowed(tensors, trained_dtype(run), 1))
    if not shards_of(run).optimizer_state:
        return tuple(update_operations(architecture, run, platform=platform))
    gpus, tensors = shard_gpus(run), trained_tensors(architecture, run)
    if run.sharding not in ZERO or not tensors:
        return tuple(update_operations(architecture, run, platform=platform, tensors=shares(tensors, gpus)))
    flat = flat_shares(tensors, gpus)
    if is_megatrons(architecture, run):
        updated = update_operations(architecture, run, platform=platform, tensors=flat, dtype=MASTER)
        return (*updated, *narrowed(tensors, trained_dtype(run), gpus))
    return tuple(zero_update(tensors, flat, run, platform))


def shares(tensors: list[Trained], gpus: int) -> list[Trained]:
    """One GPU's part of every tensor, padded up."""
    return [replace(tensor, elements=share(tensor.elements, gpus)) for tensor in tensors]


def flat_shares(tensors: list[Trained], gpus: int) -> list[Trained]:
    """One GPU's part of a flat buffer of all matrices, and of one of all vectors."""
    wholes = [(sum(t.elements for t in tensors if t.is_matrix is kind), kind) for kind in (True, False)]
    return [Trained(elements=share(whole, gpus), is_matrix=kind) for whole, kind in wholes if whole]


def zero_update(tensors: list[Trained], flat: list[Trained], run: Run, platform: str) -> list[Operation]:
    """DeepSpeed's: gradients flattened and cast, their norms, the clipping, the update in fp32, values cast back.

    Of ZeRO-1 and ZeRO-2 a GPU has whole gradients of its part, of ZeRO-3 a part of every one.
    """
    gpus, stored = shard_gpus(run), trained_dtype(run)
    wide = DTYPE_BYTES[MASTER]
    found, norms = [], 0
    for dtype, part in by_dtype(tensors, stored):
        size, elements = DTYPE_BYTES[dtype], share(sum(tensor.elements for tensor in part), gpus)
        count = len(part) if run.sharding == "zero3" else share(len(part), gpus)
        each, norms = elements / count, norms + count
        found += [
            update_operation("zero.fp64", dtype, (size + NORM_DTYPE_BYTES) * each, count=count),
            update_operation("zero.norm", MASTER, NORM_DTYPE_BYTES * each, count=count),
            update_operation("zero.flatten", dtype, 2 * size * elements),
        ]
        if size < wide:
            found.append(update_operation("zero.widen", MASTER, (size + wide) * elements))
    clipped = [update_operation("zero.clip", MASTER, 2 * wide * tensor.elements) for tensor in flat]
    updated = [each for tensor in flat for each in own_updates([tensor], MASTER, run.optim, platform)]
    return [*found, *coefficient_operations(norms, MASTER), *clipped, *updated, *narrowed(tensors, stored, gpus)]


def narrowed(tensors: list[Trained], stored: str, gpus: int) -> list[Operation]:
    """New fp32 values copied to where the model reads them."""
    return [
        update_operation("master.copy", MASTER, (DTYPE_BYTES[MASTER] + DTYPE_BYTES[dtype]) * share(elements, gpus))
        for dtype, part in by_dtype(tensors, stored)
        for elements in [sum(tensor.elements for tensor in part)]
    ]
