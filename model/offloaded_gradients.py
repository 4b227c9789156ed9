"""What DeepSpeed does on the GPU with gradients whose states live in the host, and how often they cross PCIe.

==========  =======================================================================================================
ZeRO-1, -2  of every gradient that the GPU updates: its norm in fp64, whether it is finite (two extremes and ten kernels
            on scalars, whose answer the host waits for), a copy in fp32 that is sent. Of several micro-batches ZeRO-2
            sends each 16-bit sum out and fetches the one before, to add there
ZeRO-3      of a part of every gradient: sent in 16 bits and fetched at once, added there from the second micro-batch
            on; after the last its norm in fp64 and a copy in fp32 that is sent
==========  =======================================================================================================

Norms are then read one by one (ZeRO-1, -2) or added as scalars (ZeRO-3), and new values come back in 16 bits.

Source: DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` (``copy_grads_in_partition`` and what it calls) and
``stage3.py`` (``partition_grads``), recorded in two processes (``tests/fixtures/deepspeed_offload.json``). Left out:
that the host stops at each check of ZeRO-1 and ZeRO-2, so that kernels of one gradient are issued while the GPU waits.
"""

from __future__ import annotations

from collections import Counter

from tunecast.model.architecture import Architecture
from tunecast.model.megatron import MASTER
from tunecast.model.operation import Operation, Phase
from tunecast.model.optimizer import update_operation
from tunecast.model.run import Run
from tunecast.model.sharded_update import NORM_DTYPE_BYTES
from tunecast.model.sharding import shard_gpus
from tunecast.model.sharding_copies import copied, stage_of
from tunecast.model.trained import trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

FP32_BYTES, SENT_BYTES = DTYPE_BYTES["fp32"], DTYPE_BYTES["bf16"]
CHECK_EXTREMES, CHECK_SCALARS = 2, 10
"""Kernels of ``_has_inf_or_nan``: ``amax`` and ``amin``, twice the four of ``isfinite``, two that join them."""
NORM_SCALARS = 2
"""ZeRO-3's norm in chunks: squared to be added, and the root of the sum (``_constant_buffered_norm2``)."""
SCALAR_BYTES = 16
"""Read and written by a kernel on one fp64 number."""


def crossings(run: Run) -> tuple[int, int]:
    """Times that a 16-bit gradient is sent, and fetched, in an optimizer step; an fp32 one is sent once."""
    micro, stage = run.gradient_accumulation_steps, stage_of(run)
    if stage == "zero3":
        return micro, micro
    return (0, 0) if stage == "zero1" or micro == 1 else (micro, micro - 1)


def sent_bytes_per_param(run: Run) -> float:
    """Bytes of gradients that cross PCIe for each parameter that the GPU updates, both ways together."""
    return SENT_BYTES * sum(crossings(run)) + FP32_BYTES


def offloaded_gradients(architecture: Architecture, run: Run) -> list[Operation]:
    """Kernels on one GPU that each gradient goes through on its way to the host; copies over PCIe as launches alone."""
    gpus, stage, dtype = shard_gpus(run), stage_of(run), trained_dtype(run)
    parts = gpus if stage == "zero3" else 1
    found: list[Operation] = []
    for elements, number in Counter(tensor.elements for tensor in trained_tensors(architecture, run)).items():
        each, count = elements / parts, number * parts / gpus
        found += _of_gradients(run, dtype, each, count)
    return found


def _of_gradients(run: Run, dtype: str, elements: float, count: float) -> list[Operation]:
    """Of `count` gradients of so many elements."""
    size, checked = DTYPE_BYTES[dtype], stage_of(run) != "zero3"
    scalars = CHECK_SCALARS + 1 if checked else NORM_SCALARS  # the answer is read

    def kernel(name: str, n_bytes: float, times: float = 1, kernel_dtype: str = MASTER) -> Operation:
        return copied(name, Phase.BACKWARD, n_bytes, count=count * times, dtype=kernel_dtype)

    return [
        kernel("zero.fp64", (size + NORM_DTYPE_BYTES) * elements, kernel_dtype=dtype),
        kernel("zero.norm", NORM_DTYPE_BYTES * elements),
        kernel("zero.widen", (size + FP32_BYTES) * elements),
        kernel("zero.scalar", SCALAR_BYTES, scalars),
        kernel("zero.send", 0.0, sum(crossings(run)) + 1, dtype),
        *([kernel("zero.check", size * elements, CHECK_EXTREMES, dtype)] if checked else []),
        update_operation("zero.norms", MASTER, SCALAR_BYTES, count=count * (1 if checked else 2)),
    ]
