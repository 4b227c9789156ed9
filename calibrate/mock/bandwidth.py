"""Kernels that only move bytes: latency, a ramp until enough bytes are in flight, cache hits, a tail."""

from __future__ import annotations

import math

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.physics import MemoryPhysics, Physics
from tunecast.calibrate.mock.work import Work
from tunecast.model.operation import UPCAST

SOFTMAXES = ("softmax", "logsumexp", "cross_entropy", "nll")
REDUCTIONS = ("mean", "sum", "norm", "amax")
COPIES = "clone"
STRIDED = ("cat", COPIES, "contiguous", "copy_strided", "slice_backward", "transpose", "expand")
GATHERS = ("embedding", "index", "gather", "scatter", "where")
CLASSES = ((SOFTMAXES, "softmax"), (GATHERS, "gather"), (REDUCTIONS, "reduction"), (STRIDED, "strided"))


def access_class(name: str, layout: str = "") -> str:
    """How a kernel of this name and layout walks through memory; `UPCAST` where it casts 16 bits to 32. What `COPIES`
    reads in the order in which it lies is a plain copy, whatever else goes by that name."""
    if layout == UPCAST:
        return UPCAST
    if COPIES in name and not layout:
        return "elementwise"
    for words, kind in CLASSES:
        if any(word in name for word in words):
            return kind
    return "elementwise"


def memory_work(
    card: Card, physics: Physics, n_bytes: float, kind: str, kernels: int = 1, hits: float | None = None
) -> Work:
    """`n_bytes` read and written by `kernels` kernels of equal size.

    `hits` is the share of bytes found in the last-level cache; None when the input was just written, as
    inside a step.
    """
    each = n_bytes / max(1, kernels)
    if hits is None:
        hits = hit_fraction(card, physics.memory, each)
    seconds = kernel_seconds(card, physics.memory, each, kind, hits)
    return Work(
        dram_s=seconds * kernels,
        core_s=max(0.35 * seconds, _core_seconds(card, physics.memory, each, kind)) * kernels,
        fixed_s=physics.memory.latency_s * kernels,
        kernels=kernels,
        exposed=0.0,
    )


def _core_seconds(card: Card, memory: MemoryPhysics, n_bytes: float, kind: str) -> float:
    """What the SMs take to cast element by element, however fast memory is; nothing for other kernels."""
    if kind != UPCAST:
        return 0.0
    return n_bytes / (card.sm_count * memory.upcast_bytes_per_clk * card.clock_hz)


def kernel_seconds(card: Card, memory: MemoryPhysics, n_bytes: float, kind: str, hits: float) -> float:
    """Seconds after the first latency: bytes over the bandwidth in reach, with hits served faster."""
    dram_rate = card.bandwidth_bytes_per_s * memory.bandwidth_frac * memory.class_rate[kind]
    blocks = max(1, math.ceil(n_bytes / memory.block_bytes))
    slots = card.sm_count * memory.blocks_per_sm
    ramp = min(blocks, slots) * memory.inflight_bytes_per_block / memory.latency_s
    slow, fast = min(dram_rate, ramp), min(dram_rate * memory.l2_speedup, ramp)
    waves = blocks / slots
    tail = memory.tail * (math.ceil(waves) - waves) / waves if waves > 1 else 0.0
    return n_bytes * ((1.0 - hits) / slow + hits / fast) * (1.0 + tail)


def hit_fraction(card: Card, memory: MemoryPhysics, n_bytes: float) -> float:
    """Share of the bytes found in the last-level cache: the half that is read, while it fits what is kept."""
    kept = memory.l2_keep * card.l2_bytes
    return 0.5 * min(1.0, max(0.0, 2.0 - n_bytes / kept)) if kept > 0 else 0.0


def dequant_work(card: Card, physics: Physics, elements: float, double_quant: bool) -> Work:
    """NF4 values to 16 bits: half a byte and a block scale read, two bytes written, table lookups on the SMs.

    With double quantization a small kernel first restores the scales (one per 64 values).
    """
    memory = physics.memory
    traffic = elements * (0.5 + 2.0 + 4.0 / 64)
    main = Work(
        dram_s=kernel_seconds(card, memory, traffic, "elementwise", hits=0.0),
        core_s=elements / (card.sm_count * memory.dequant_elements_per_clk * card.clock_hz),
        fixed_s=memory.latency_s,
        kernels=1,
    )
    if not double_quant:
        return main
    scales = memory_work(card, physics, elements / 64 * (1 + 4 + 4), "elementwise", kernels=2)
    return Work(
        dram_s=main.dram_s + scales.dram_s,
        core_s=main.core_s,
        fixed_s=main.fixed_s + scales.fixed_s,
        kernels=3,
    )
