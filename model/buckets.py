"""The buckets in which gradients are reduced, DDP's, DeepSpeed's and Megatron's, and which of them nothing can hide.

Gradients join a bucket in about the order in which the backward makes them, the reverse of the forward's; a bucket is
full, and its all-reduce starts, when a gradient brings it to its limit: 1 MiB for the first, 25 MiB for all others.
A gradient above the limit therefore takes along what waits in its bucket. The last bucket starts when the last
gradient is there, that of the table of tokens where it trains (a tied one too: the head's part alone is not complete),
and the backward ends with it: the GPU waits for all of it.

Source: torch 2.13 ``nn/parallel/distributed.py`` (``bucket_cap_mb``, ``_DEFAULT_BUCKET_CAP_MB``,
``_DEFAULT_FIRST_BUCKET_BYTES``) and ``csrc/distributed/c10d/reducer.cpp`` (``compute_bucket_assignment_by_size``, run
by the tests; ``rebuild_buckets``). Left out: with ``find_unused_parameters``, which the Hugging Face trainer asks for
around PEFT models, buckets are those of the first step and the last one of adapters is 1 MiB.

DeepSpeed's ZeRO reduces a bucket when the next gradient would bring it above ``reduce_bucket_size`` elements, and the
last one when the backward is over (``stage_1_and_2.py``: ``reduce_independent_p_g_buckets_and_remove_grads``).
Megatron closes a bucket with the parameter that fills it (``core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.trained import Trained, by_dtype, gradient_dtype, trained_tensors
from tunecast.model.units import MIB

FIRST_BUCKET_BYTES = 1 * MIB
"""Limit of the first bucket (``dist._DEFAULT_FIRST_BUCKET_BYTES``)."""
BUCKET_BYTES = 25 * MIB
"""Limit of every other (``bucket_cap_mb`` of DistributedDataParallel)."""


def mean(sizes: Sequence[int]) -> float:
    """Bytes of one of several buffers that are taken to be equal; 0 of none."""
    return sum(sizes) / max(len(sizes), 1)


def buckets_of(sizes: Iterable[int]) -> list[int]:
    """Bytes of each bucket of gradients that come in this order, of these bytes each."""
    found, waiting, limit = [], 0, FIRST_BUCKET_BYTES
    for size in sizes:
        waiting += size
        if waiting >= limit:
            found.append(waiting)
            waiting, limit = 0, BUCKET_BYTES
    return [*found, waiting] if waiting else found


@lru_cache(maxsize=256)
def ddp_buckets(architecture: Architecture, run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of the buckets that the backward goes on beside, and of the last ones: a bucket holds one dtype, so that
    each dtype has its last."""
    dtype = gradient_dtype(run)
    beside: list[int] = []
    last: list[int] = []
    for own, tensors in by_dtype(trained_tensors(architecture, run)[::-1], dtype):
        *earlier, end = buckets_of(tensor.bytes_in(own) for tensor in tensors)
        beside += earlier
        last.append(end)
    return tuple(beside), tuple(last)


@lru_cache(maxsize=256)
def element_buckets(
    architecture: Architecture, run: Run, most: int, *, past: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`ddp_buckets` where elements are counted: buckets of at most so many, or of one gradient that has more.

    With `past` a bucket is closed by the gradient that brings it there (Megatron's).
    """
    beside: list[int] = []
    last: list[int] = []
    for own, tensors in by_dtype(trained_tensors(architecture, run)[::-1], gradient_dtype(run)):
        *earlier, end = [sum(tensor.bytes_in(own) for tensor in bucket) for bucket in filled(tensors, most, past=past)]
        beside += earlier
        last.append(end)
    return tuple(beside), tuple(last)


def filled(tensors: Iterable[Trained], most: int, *, past: bool = False) -> list[list[Trained]]:
    """Tensors in buckets of at most so many elements, in order; see `element_buckets`."""
    found: list[list[Trained]] = [[]]
    elements = 0
    for tensor in tensors:
        if elements >= most if past else elements and elements + tensor.elements > most:
            found.append([])
            elements = 0
        found[-1].append(tensor)
        elements += tensor.elements
    return found
