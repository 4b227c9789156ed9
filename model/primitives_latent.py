"""Operators of latent attention: splits, joined keys, complex rotation, attention with values narrower than keys.

Sources: PyTorch ``derivatives.yaml`` (split, view_as_complex, mul), ``CopySlices`` of ``accumulate_grad`` for writes
into slices, ``native/transformers/cuda/attention.cu`` (``_scaled_dot_product_efficient_attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunecast.model.operation import EFFICIENT, MASKED, STRIDED, Kind
from tunecast.model.primitives import cast_gradient, elementwise
from tunecast.model.primitives_heavy import FLASH_BACKWARD_LAUNCHES, AttentionShape, wide_scratch_elements
from tunecast.model.tape import Backward, Grads, Tape, Tensor

ROW_SUM_BLOCK = 32
"""Rows of the log-sum-exp are padded to a multiple of this (``kAlignLSE``)."""
SEED_BYTES = 16
"""Seed and offset of dropout, kept whether or not there is any."""


def split(tape: Tape, x: Tensor, sizes: Sequence[int], *, name: str) -> list[Tensor]:
    """Slices of the last dimension: views, whose gradients are concatenated once all have come."""
    waiting: dict[int, Tensor] = {}

    def backward_of(index: int) -> Backward:
        def backward(grad: Tensor) -> Grads:
            waiting[index] = grad
            if len(waiting) < len(sizes):
                return (None,)
            return (elementwise(tape, name, tuple(waiting.values()), x.elements, grad.dtype, layout=STRIDED),)

        return backward

    views = [Tensor(size, x.dtype, x.storage, is_view=True) for size in sizes]
    return [tape.record(view, (x,), backward_of(index)) for index, view in enumerate(views)]


def complex_waves(tape: Tape, angles: Tensor) -> Tensor:
    """One complex number per angle, of length one, times a scale."""
    name = "positions.polar"
    ones = elementwise(tape, name, (), angles.elements, "fp32")
    made = elementwise(tape, name, (ones, angles), 2 * angles.elements, "fp32")
    return elementwise(tape, name, (made,), made.elements, "fp32")


def complex_product(tape: Tape, x: Tensor, table: Tensor, *, name: str, copied: bool) -> Tensor:
    """x times the table as complex numbers; keeps the table. Backward: its conjugate written out, and the product.

    `copied`: the gradient comes by head and is laid out anew first.
    """
    if tape.would_grad(x):
        tape.mark_saved()
    out = elementwise(tape, name, (x, table), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        if copied:
            grad = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        conjugate = elementwise(tape, name, (table,), table.elements, table.dtype)
        return (elementwise(tape, name, (grad, conjugate), x.elements, grad.dtype),)

    return tape.record(out, (x,), backward, saves=(table,))


def joined_keys(tape: Tape, plain: Tensor, turned: Tensor, turned_elements: int, *, name: str) -> Tensor:
    """New memory into which every head's own part and the shared rotary part are copied.

    Backward of each write into a slice: the whole gradient copied, the slice taken out; zeros left behind by the last.
    """
    out = tape.empty(plain.elements + turned_elements, plain.dtype)
    tape.kernel(name, Kind.MEMORY, (plain,), (out,), n_bytes=2 * plain.bytes)
    part = Tensor(turned_elements, plain.dtype, None)
    tape.kernel(name, Kind.MEMORY, (turned,), (out,), n_bytes=turned.bytes + part.bytes)

    def backward(grad: Tensor) -> Grads:
        first = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        shared = tape.empty(turned_elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (first,), (shared,), n_bytes=2 * shared.bytes)
        zeros = elementwise(tape, name, (), turned_elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (zeros,), (first,), n_bytes=2 * zeros.bytes)
        second = elementwise(tape, name, (first,), grad.elements, grad.dtype)
        own = tape.empty(plain.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (second,), (own,), n_bytes=2 * own.bytes)
        shared = cast_gradient(tape, shared, turned.dtype, name)
        return own, elementwise(tape, name, (shared,), turned.elements, turned.dtype)

    return tape.record(out, (plain, turned), backward)


def attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape,
    *,
    share: float,
    bias: Tensor | None = None,
    held: tuple[Tensor, ...] = (),
) -> Tensor:
    """The memory-efficient kernel; `share` is the width of values over that of keys. Keeps what the flash kernel does;
    `held` is still there in the backward.

    Two products forward; backward five, three of the keys' width and two of the values'.
    """
    out = tape.empty(v.elements, q.dtype)
    rows = -(-shape.length // ROW_SUM_BLOCK) * ROW_SUM_BLOCK
    sums = tape.empty(shape.batch * shape.heads * rows, "fp32")
    seeds = tape.empty(SEED_BYTES // 8, "int64")
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    flops, size, kept = shape.flops, shape.as_tuple, (*inputs, out, sums, seeds)
    forward = (1.0 + share) / 2.0 * flops
    alike: dict[str, Any] = {"shape": size, "layout": MASKED if shape.masked else EFFICIENT, "dtype": q.dtype}
    tape.kernel("attention", Kind.ATTENTION, inputs, (out, sums, seeds), flops=forward, **alike)
    if tape.would_grad(q, k, v):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        grads = tuple(tape.empty(tensor.elements, q.dtype) for tensor in (q, k, v))
        elements = shape.backward_scratch_elements + wide_scratch_elements(shape)
        scratch = tape.empty(elements, "fp32", part="scratch")
        tape.kernel(
            "attention",
            Kind.ATTENTION,
            (grad, *kept),
            (*grads, scratch),
            flops=(3.0 + 2.0 * share) / 2.0 * flops,
            n_bytes=sum(tensor.bytes for tensor in (grad, *kept, *grads)),
            launches=FLASH_BACKWARD_LAUNCHES,
            **alike,
        )
        return tuple(given if tensor.needs_grad else None for given, tensor in zip(grads, (q, k, v), strict=True))

    return tape.record(out, (q, k, v), backward, saves=(*kept, *held))
