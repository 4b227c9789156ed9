"""torchao's AdamW with moments of 8 bits, 4 bits or FP8: what they take, what one update moves and allocates.

Every tensor is updated by a compiled call of its own in which inductor writes four or five kernels: fp32 values of both
moments are kept between finding the maxima of their blocks and rounding them, and 4-bit codes are 64-bit numbers until
two of them are packed. So an update holds 8 bytes for each number of the largest tensor, in 4 bits 24: the table of a
large vocabulary takes more there than its smaller moments save. Tensors that are small or do not divide into blocks
have moments of their own dtype, and one kernel.

Sources: torchao 0.18 ``optim/adam.py``, ``subclass_8bit.py``, ``subclass_4bit.py``, ``subclass_fp8.py``; transformers
5.23 ``trainer_optimizer.py`` (``_get_torchao_optimizer``: blocks of 256 in 8 bits and in 4). Kernels and allocations
are those of inductor in torch 2.13 (`scripts/torchao_updates.py`, for compute capability 9.0). Left out: compiling, one
graph for each shape in the first step, and what its trials of kernels allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tunecast.model.tape import allocated_bytes
from tunecast.model.units import DTYPE_BYTES

SMALLEST = 4096
"""Tensors below this keep moments of their own dtype (``_new_buffer``)."""
MOMENTS = 2
FP32 = 4
CODE = 8
"""Bytes of a 4-bit code before two of them are packed: ``codes`` is int64."""
CALLS = 5
"""Calls of the optimizer, each of which goes over lists in Python, that finding a compiled update costs the host.
Assumed: 0.26 to 0.3 ms a tensor on the CPU of this project's records (``scripts/torchao_updates.py --host``), where
published runs have 3 launches of 24 microseconds to such a call."""
COMPILED = "torchao."
"""How names of the update's work begin."""
FOUND = f"{COMPILED}found"
"""Name of the work of finding a tensor's compiled update, which the host does alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoOptimizer:
    """How one of torchao's optimizers stores its moments."""

    code_bits: int
    block: int
    """Elements that share one fp32 scale."""
    maps: int
    """Values of the table that codes stand for; 0 of FP8, which has none."""

    @property
    def packs(self) -> bool:
        """Whether two codes share a byte."""
        return self.code_bits == 4

    def code_bytes(self, elements: int) -> int:
        """Of one moment."""
        return elements * self.code_bits // 8


TORCHAO = {
    "adamw_torch_8bit": TorchaoOptimizer(code_bits=8, block=256, maps=256),
    "adamw_torch_4bit": TorchaoOptimizer(code_bits=4, block=256, maps=16),
    "ao_adamw_8bit": TorchaoOptimizer(code_bits=8, block=256, maps=256),
    "ao_adamw_4bit": TorchaoOptimizer(code_bits=4, block=128, maps=16),
    "ao_adamw_fp8": TorchaoOptimizer(code_bits=8, block=256, maps=0),
}
"""By the names that transformers gives them, and axolotl, which leaves torchao's own blocks."""


def is_quantized(kind: TorchaoOptimizer, elements: int) -> bool:
    """Whether a tensor's moments are stored in codes."""
    return elements >= SMALLEST and elements % kind.block == 0


def state_blocks(kind: TorchaoOptimizer, elements: int, dtype: str) -> list[int]:
    """Bytes of what is kept for a tensor, each an allocation; its counter of steps is on the host."""
    if not is_quantized(kind, elements):
        return [DTYPE_BYTES[dtype] * elements] * MOMENTS
    table = [FP32 * kind.maps] if kind.maps else []
    return [kind.code_bytes(elements), FP32 * elements // kind.block, *table] * MOMENTS


def state_bytes(kind: TorchaoOptimizer, elements: int, dtype: str) -> int:
    """Allocated bytes of the same."""
    return sum(allocated_bytes(n_bytes) for n_bytes in state_blocks(kind, elements, dtype))


def scratch_blocks(kind: TorchaoOptimizer, elements: int) -> list[int]:
    """Bytes of what an update of a tensor allocates, in order: new scales, values of moments, codes yet to be packed.

    FP8 values are rounded again from what is stored, so that none are kept.
    """
    if not is_quantized(kind, elements):
        return []
    scales = [FP32 * elements // kind.block] * MOMENTS
    values = [FP32 * elements] * MOMENTS if kind.maps else []
    codes = [CODE * elements] * MOMENTS if kind.packs else []
    return scales + values + codes


def kernels(kind: TorchaoOptimizer, elements: int, dtype: str) -> Iterator[tuple[str, float]]:
    """Name and bytes of the kernels that update a tensor, in order; every buffer is counted once where it is read and
    where it is written."""
    whole, stored = float(DTYPE_BYTES[dtype] * elements), MOMENTS * kind.code_bytes(elements)
    if not is_quantized(kind, elements):
        yield "torchao.update", 7 * whole
        return
    scales, table = float(MOMENTS * FP32 * elements // kind.block), float(MOMENTS * FP32 * kind.maps)
    values = float(MOMENTS * FP32 * elements)
    if kind.packs:
        unpacked = float(MOMENTS * CODE * elements)
        yield "torchao.update", stored + 3 * whole + values + unpacked + 2 * scales + table
        for _ in range(MOMENTS):
            yield "torchao.pack", (values + unpacked) / MOMENTS + stored / MOMENTS + table / MOMENTS
    elif kind.maps:
        yield "torchao.maxima", stored + whole + values + 2 * scales + table
        yield "torchao.update", 2 * stored + 3 * whole + values + scales + table
    else:
        yield "torchao.maxima", stored + whole + 2 * scales
        yield "torchao.update", 2 * stored + 3 * whole + 2 * scales
    for _ in range(MOMENTS):
        yield "torchao.scales", scales
