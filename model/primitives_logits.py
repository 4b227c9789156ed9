"""Operators over logits: tensors as wide as the vocabulary, whose kernels are kept apart from all others."""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.operation import STRAIGHT, Kind
from tunecast.model.primitives import elementwise
from tunecast.model.tape import Tape, Tensor, widest


def cast_logits(tape: Tape, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """``logits.float()`` and, backward, the gradient back in the logits' dtype: vocabulary-wide copies."""
    return narrow_logits(tape, logits, "fp32", shape)


def loss_kernel(
    tape: Tape,
    name: str,
    reads: Sequence[Tensor],
    dtype: str,
    shape: tuple[int, int],
    *,
    layout: str = "",
    elements: int | None = None,
) -> Tensor:
    """One kernel over tensors of vocabulary width; `elements` are those that it writes, where not as many as it reads
    of the first."""
    written = reads[0].elements if elements is None else elements
    out = elementwise(tape, name, reads, written, dtype, kind=Kind.LOSS, layout=layout)
    tape.events[-1].shape = shape
    return out


def narrow_logits(
    tape: Tape, logits: Tensor, dtype: str, shape: tuple[int, int], *, name: str = "logits_cast"
) -> Tensor:
    """Logits in another dtype, and their gradient back in the first one."""
    if logits.dtype == dtype:
        return logits
    out = loss_kernel(tape, name, (logits,), dtype, shape)
    return tape.record(out, (logits,), lambda grad: (loss_kernel(tape, name, (grad,), logits.dtype, shape),))


def add_logits(tape: Tape, a: Tensor, b: Tensor, shape: tuple[int, int]) -> Tensor:
    """``a + b`` as wide as the vocabulary; the gradient passes to each in its dtype."""
    out = loss_kernel(tape, "logits_add", (a, b), widest((a.dtype, b.dtype)), shape)

    def given(grad: Tensor, to: Tensor) -> Tensor | None:
        if not to.needs_grad or grad.dtype == to.dtype:
            return grad if to.needs_grad else None
        return loss_kernel(tape, "logits_cast", (grad,), to.dtype, shape)

    return tape.record(out, (a, b), lambda grad: (given(grad, a), given(grad, b)))


def scale_logits(tape: Tape, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Logits divided or multiplied by a number: one kernel each way, nothing kept."""

    def scaled(x: Tensor) -> Tensor:
        return loss_kernel(tape, "logits_scale", (x,), x.dtype, shape, layout=STRAIGHT)

    return tape.record(scaled(logits), (logits,), lambda grad: (scaled(grad),))


def tanh_logits(tape: Tape, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """``tanh``: one kernel each way. Keeps its result."""
    out = loss_kernel(tape, "logits_tanh", (logits,), logits.dtype, shape, layout=STRAIGHT)
    return tape.record(
        out,
        (logits,),
        lambda grad: (loss_kernel(tape, "logits_tanh", (grad, out), grad.dtype, shape, layout=STRAIGHT),),
        saves=(out,),
    )
