"""Which curve an operation follows, by name, and what stands in where a device has none of that name."""

from __future__ import annotations

from functools import cache

from tunecast.catalogs.errors import InputError
from tunecast.model.cold_kernels import COLD, is_cold
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.operation import (
    CHOSEN,
    CHUNKED,
    EFFICIENT,
    FLASH,
    GROUPED,
    HOPPER,
    MASKED,
    NATIVE,
    SOFTMAX,
    STRAIGHT,
    STRIDED,
    UPCAST,
    Kind,
    Operation,
    Phase,
)

ATTENTION_KERNELS = (NATIVE, FLASH, HOPPER, EFFICIENT, MASKED, CHOSEN)
"""Layouts of attention with curves of their own."""


class UnmeasuredError(InputError):
    """A device has no rate for a kind of work that a run does; `gpu` and `curve` say which."""

    def __init__(self, gpu: str, curve: str, known: list[str]) -> None:
        self.gpu, self.curve, self.known = gpu, curve, known
        super().__init__(
            f"The factors of {gpu} have no curve {curve!r} (they have {', '.join(known) or 'none'}): "
            "a calibration measures the precisions that its device trains in; choose another --precision."
        )


def curve_key(operation: Operation) -> str:
    """Name of the curve an operation follows; a recomputation is a forward pass."""
    if operation.kind is Kind.GEMM:
        kernel = f"-{GROUPED}" if operation.layout.endswith(GROUPED) else ""
        return f"gemm{kernel}.{operation.dtype}"
    if operation.kind is Kind.ATTENTION:
        direction = "backward" if operation.phase is Phase.BACKWARD else "forward"
        kernel = f"-{operation.layout}" if operation.layout in ATTENTION_KERNELS else ""
        return f"attention{kernel}.{operation.dtype}.{direction}"
    if operation.layout in (CHUNKED, SOFTMAX):
        return f"{operation.kind}-{operation.layout}.{'backward' if operation.phase is Phase.BACKWARD else 'forward'}"
    if operation.layout == STRIDED or (operation.layout == UPCAST and operation.kind is Kind.MEMORY):
        return f"{operation.kind}-{operation.layout}"
    if operation.kind is Kind.MEMORY and is_cold(operation.name):
        return f"{Kind.MEMORY}-{COLD}"
    return str(Kind.MEMORY if operation.layout == STRAIGHT else operation.kind)


def find_curve(key: str, factors: FactorSet) -> Curve:
    """The curve of that name; kinds that only move bytes fall back on ``memory``, backward attention on forward,
    attention by other kernels on that of ``sdpa``, grouped products on plain ones."""
    for name in _names_tried(key):
        if name in factors.curves:
            return factors.curves[name]
    if ".fp8" in key:
        raise InputError(
            f"--fp8 was asked for, but {factors.gpu} has no rate for products of 8-bit floats, in the catalog or in a "
            "record; leave --fp8 out, or choose a Hopper, Ada or Blackwell card."
        )
    raise UnmeasuredError(factors.gpu, key, sorted(factors.curves))


@cache
def _names_tried(key: str) -> tuple[str, ...]:
    """A curve's own name and those that stand in for it, in order."""
    plain = key
    if key.startswith(f"{Kind.MEMORY}-"):
        plain = str(Kind.MEMORY)
    for kernel in (*ATTENTION_KERNELS, GROUPED):
        plain = plain.replace(f"-{kernel}", "")
    forward = [name.replace(".backward", ".forward") for name in (key, plain)]
    return (key, forward[0], plain, forward[1], *(() if "." in key else ("memory",)))


def kind_of(name: str) -> str:
    """The kind of operations that follow the curve of a name, whatever kernel it is of: ``gemm``, ``attention``."""
    return name.partition(".")[0].partition("-")[0]
