"""The gradient scaler that fp16 autocast trains with: a scaled loss, gradients unscaled and checked before the update.

Source: ``torch/amp/grad_scaler.py``: a fused optimizer takes the check's result on the device, for others the host
waits for it.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import is_litgpt
from tunecast.model.operation import SYNCHRONISATION, Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.tape import Tape, Tensor, allocated_bytes
from tunecast.model.trained import Trained, by_dtype, whole_bytes

NUMBER = 4
"""Bytes of the scale, of its growth tracker and of the check's result, each fp32 or int32."""
UNSCALED = {"widen": 3 * NUMBER, "reciprocal": 4 * NUMBER, "narrow": 3 * NUMBER, "full": NUMBER, "copy": 2 * NUMBER}
"""Kernels on one number before the unscaling: the scale's reciprocal is taken in fp64."""


def scales(architecture: Architecture, run: Run) -> bool:
    """Whether the run has a gradient scaler; that of Lightning, which LitGPT trains with, is left out."""
    return run.precision == "fp16-autocast" and not is_litgpt(architecture)


def state_bytes(architecture: Architecture, run: Run) -> int:
    """The scale and its growth tracker."""
    return 2 * allocated_bytes(NUMBER) if scales(architecture, run) else 0


def scaled_loss(tape: Tape, loss: Tensor) -> Tensor:
    """The loss times the scale; its gradient the same."""
    factor = Tensor(1, "fp32", None)
    out = ops.elementwise(tape, "loss_scaler", (loss, factor), 1, "fp32")
    return tape.record(out, (loss,), lambda grad: (ops.elementwise(tape, "loss_scaler", (grad, factor), 1, "fp32"),))


def scaler_operation(name: str, n_bytes: float, launches: int = 1, count: int = 1) -> Operation:
    """One kernel of the scaler in the update."""
    return Operation(
        name=name,
        kind=Kind.OPTIMIZER,
        phase=Phase.OPTIMIZER,
        dtype="fp32",
        bytes=n_bytes,
        launches=launches,
        count=count,
    )


def unscaling_operations(tensors: list[Trained], dtype: str, launches_of: list[int]) -> list[Operation]:
    """Before the clipping: every gradient read, checked and written, in one call for each dtype."""
    found = [scaler_operation(f"scaler.{name}", n_bytes) for name, n_bytes in UNSCALED.items()]
    for (own, part), launches in zip(by_dtype(tensors, dtype), launches_of, strict=True):
        moved = 2 * whole_bytes(part, own) + 3 * NUMBER
        found += [scaler_operation("scaler.copy", 2 * NUMBER), scaler_operation("scaler.unscale", moved, launches)]
    return found


def checking_operations(tensors: list[Trained], launches: int, *, fused: bool) -> list[Operation]:
    """Around the update: the check's result read, or (fused) handed on and step counters corrected, in so many
    launches; the scale grown."""
    grown = scaler_operation("scaler.grow", 5 * NUMBER)
    if not fused:
        return [scaler_operation(SYNCHRONISATION, 2 * NUMBER), grown]
    counters = scaler_operation("scaler.counters", 3 * NUMBER * len(tensors), launches)
    return [scaler_operation("scaler.sum", 2 * NUMBER), counters, grown]
