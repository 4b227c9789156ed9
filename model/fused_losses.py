"""Output head and cross-entropy in one: Liger's, chunk by chunk, and cut cross-entropy, tile by tile.

Liger (``ops/fused_linear_cross_entropy.py``): the gradients of the loss are made in the forward pass, chunk by
chunk of so many tokens that a chunk's logits are about as large as the hidden state; the backward only hands
them on. Its code before 0.5 (and fms-acceleration's copy) shifts the hidden states instead of the labels, casts
each chunk's logits to fp32 and back, and scales them.
Cut cross-entropy (``cut_cross_entropy/cce_lse_forward.py``, ``cce_backward.py``): logits exist only as tiles in
the processor; the backward makes them again. Left out: the tiles it skips where probabilities vanish, which
makes the backward of a trained model cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model import primitives_logits as on_logits
from tunecast.model.context import Step
from tunecast.model.linears import operands
from tunecast.model.loss_chunks import SUMMED_IN_LOOP
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.tape import Grads, Tape, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output head as a fused loss sees it."""

    name: str
    """Of the weight."""
    hidden: int
    vocab: int
    rows: int
    """Tokens of the micro-batch that it takes."""


def chunk_tokens(head: Head) -> int:
    """Tokens of a chunk: the next power of two of rows / ceil(vocab / hidden), at most all rows."""
    wanted = -(-head.rows // -(-head.vocab // head.hidden))
    return min(1 << (wanted - 1).bit_length(), head.rows)


def one_chunk(step: Step, head: Head, x: Tensor, weight: Tensor, to_x: Tensor, to_weight: Tensor | None) -> None:
    """Logits of some tokens, their loss and gradient in place, and the gradient's products."""
    tape, (m, k, n) = step.tape, (x.elements // head.hidden, head.hidden, head.vocab)
    shape, old = (m, n), step.run.shifts_logits
    logits = ops.gemm(tape, "lm_head", (x, weight), (m, n, k), "nt")
    if old:
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (logits,), (), n_bytes=16)
        logits = on_logits.loss_kernel(tape, "logits_cast", (logits,), "fp32", shape)
    tape.kernel("cross_entropy", Kind.LOSS, (logits,), (logits,), shape=shape, n_bytes=3 * logits.bytes)
    if old:
        narrow = on_logits.loss_kernel(tape, "logits_cast", (logits,), x.dtype, shape)
        logits = on_logits.loss_kernel(tape, "logits_scale", (narrow,), x.dtype, shape)
        tape.hold(narrow)
    given = ops.gemm(tape, "lm_head", (logits, weight), (m, k, n), "nn")
    tape.kernel("loss.place", Kind.MEMORY, (given,), (to_x,), n_bytes=2 * given.bytes)
    if to_weight is not None:
        made = ops.gemm(tape, "lm_head", (logits, x), (n, k, m), "tn")
        tape.kernel(SUMMED_IN_LOOP, Kind.MEMORY, (to_weight, made), (to_weight,))


def zeros(tape: Tape, elements: int, dtype: str) -> Tensor:
    """Zeroed memory: one kernel that writes it."""
    return ops.elementwise(tape, "loss.zeros", (), elements, dtype)


def liger(step: Step, x: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
    """Mean loss and, at once, the gradients of the hidden state and of a trained head.

    A gradient that is not one (accumulation, a scaler) is multiplied in by one kernel per gradient; the backward
    reads a value to know.
    """
    tape, size = step.tape, chunk_tokens(head)
    cast_x, cast_weight = operands(step, x, weight)
    to_x = zeros(tape, x.elements, x.dtype)
    to_weight = zeros(tape, weight.elements, weight.dtype) if weight.needs_grad else None
    by_row = zeros(tape, head.rows, "fp32")
    count = ops.elementwise(tape, "loss.count", (target,), 1, "int64")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (count,), (), n_bytes=16)
    for start in range(0, head.rows, size):
        rows = min(size, head.rows - start)
        one_chunk(step, head, Tensor(rows * head.hidden, cast_x.dtype, cast_x.storage), cast_weight, to_x, to_weight)
    loss = ops.elementwise(tape, "loss.sum", (by_row,), 1, "fp32")
    scaled = step.run.gradient_accumulation_steps > 1 or step.run.precision == "fp16-autocast"

    def backward(grad: Tensor) -> Grads:
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (grad,), (), n_bytes=16)
        for given in (to_x, to_weight) if scaled else ():
            if given is not None:
                tape.kernel("loss.scale", Kind.MEMORY, (given, grad), (given,), n_bytes=2 * given.bytes)
        return to_x, to_weight

    kept = (to_x,) if to_weight is None else (to_x, to_weight)
    return tape.record(loss, (x, weight), backward, saves=kept)


def cut(step: Step, x: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
    """Mean loss without logits: one product forward, and backward that product again with one or two more.

    The backward is a single kernel; it is written down as the products it contains, of which the first is launched.
    """
    tape, (m, k, n) = step.tape, (head.rows, head.hidden, head.vocab)
    cast_x, cast_weight = operands(step, x, weight)
    sums, dots = tape.empty(m, "fp32"), tape.empty(m, "fp32")
    flops, dtype = ops.gemm_flops(m, n, k), cast_x.dtype
    read = (cast_x, cast_weight, target)
    tape.kernel("cut_cross_entropy", Kind.GEMM, read, (sums,), flops=flops, shape=(m, n, k), layout="nt", dtype=dtype)
    tape.kernel("loss.pick", Kind.MEMORY, (cast_x, target), (dots,), n_bytes=2 * cast_x.bytes)
    loss = ops.elementwise(tape, "loss.mean", (sums, dots), 1, "fp32")

    def backward(grad: Tensor) -> Grads:
        to_x = zeros(tape, x.elements, x.dtype)
        to_weight = zeros(tape, weight.elements, weight.dtype) if weight.needs_grad else None
        products = [(cast_x, (m, n, k), "nt"), (to_x, (m, k, n), "nn")]
        products += [(to_weight, (n, k, m), "tn")] if to_weight is not None else []
        for launches, (written, shape, layout) in zip((1, 0, 0), products, strict=False):
            tape.kernel(
                "cut_cross_entropy", Kind.GEMM, (cast_x, cast_weight, sums, target, grad), (written,),
                flops=flops, shape=shape, layout=layout, dtype=dtype, n_bytes=written.bytes, launches=launches,
            )  # fmt: skip
        return to_x, to_weight

    return tape.record(loss, (x, weight), backward, saves=(cast_x, sums, target))
