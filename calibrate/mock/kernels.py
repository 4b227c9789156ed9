"""From one traced operation to its `Work` on a simulated card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tunecast.calibrate.mock.attention import SLOWER, Heads, attention_work, slowed
from tunecast.calibrate.mock.bandwidth import access_class, dequant_work, memory_work
from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.gemm import gemm_work, memory_rate
from tunecast.calibrate.mock.physics import Physics
from tunecast.calibrate.mock.work import Work, together
from tunecast.model.operation import FLASH, Kind, Operation, plain_layout
from tunecast.model.units import DTYPE_BYTES


def work_of(card: Card, physics: Physics, op: Operation) -> Work:
    """Cost of one execution of a traced operation; its kind decides which mechanism runs it."""
    return _BY_KIND[op.kind](card, physics, op)


def _gemm(card: Card, physics: Physics, op: Operation) -> Work:
    m, n, k, *stacked = op.shape
    products = stacked[0] if stacked else 1
    layout = plain_layout(op.layout) or "nt"
    one = gemm_work(card, physics, m, n, k, op.dtype, layout, products=products)
    if stacked:
        one = replace(one, dram_s=one.dram_s + _added_bytes(op, products) / memory_rate(card, physics))
    return together(*[one] * round(op.launches)) if op.launches > 1 else one


def _added_bytes(op: Operation, products: int) -> float:
    """What a stack of products is added to, which is read besides both operands."""
    m, n, k = op.shape[:3]
    return max(op.bytes - products * (m * n + n * k + m * k) * DTYPE_BYTES.get(op.dtype, 2), 0.0)


def _attention(card: Card, physics: Physics, op: Operation) -> Work:
    """A kernel is causal when it counts half of the full products."""
    backward = "backward" in op.name
    batch, heads, kv_heads, q_len, kv_len, head_dim = op.shape
    full = (10.0 if backward else 4.0) * batch * heads * q_len * kv_len * head_dim
    causal = op.flops < 0.75 * full
    shape = Heads(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, causal=causal
    )
    work = attention_work(card, physics, shape, op.dtype, backward, flash=op.layout in (FLASH, *SLOWER))
    return slowed(work, physics, backward) if op.layout in SLOWER else work


def _memory(card: Card, physics: Physics, op: Operation) -> Work:
    return memory_work(card, physics, op.bytes, access_class(op.name, op.layout), kernels=max(1, round(op.launches)))


def _dequant(card: Card, physics: Physics, op: Operation) -> Work:
    """The scales of a double-quantized weight are restored by operations of their own in the stream."""
    return dequant_work(card, physics, op.shape[0], double_quant=False)


def _communication(card: Card, physics: Physics, op: Operation) -> Work:
    seconds = collective_seconds(card, physics, op.name, op.bytes, world_size=2)
    return Work(fixed_s=seconds)


_BY_KIND: dict[Kind, Callable[[Card, Physics, Operation], Work]] = {
    Kind.GEMM: _gemm,
    Kind.ATTENTION: _attention,
    Kind.MEMORY: _memory,
    Kind.LOSS: _memory,
    Kind.OPTIMIZER: _memory,
    Kind.DEQUANT: _dequant,
    Kind.COMMUNICATION: _communication,
}

RING_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}
"""Times a ring moves the payload (less one part in world_size) over each link."""


def collective_seconds(card: Card, physics: Physics, op: str, n_bytes: float, world_size: int) -> float:
    """A ring collective: hops of latency, then the payload over NVLink (one direction) or PCIe."""
    link = card.nvlink_bytes_per_s / 2 or pcie_bytes_per_s(card)
    passes = RING_PASSES.get(op.removeprefix("aten.").removesuffix("_tensor"), 1.0)
    moved = passes * n_bytes * (world_size - 1) / world_size
    hop_s = 6.0 * physics.memory.latency_s
    return 2 * (world_size - 1) * hop_s + moved / (link * physics.host.network_frac)


PCIE_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Payload of one lane per direction after line coding (PCI-SIG: 2.5, 5, 8, 16, 32, 64 GT/s)."""


def pcie_bytes_per_s(card: Card) -> float:
    """Limit of the card's PCIe link in one direction."""
    return PCIE_LANE_BYTES_PER_S[card.pcie_gen] * card.pcie_lanes
