"""Operators of older decoders: layer norms, gelu written out, relu, parts joined again.

Sources: PyTorch ``tools/autograd/derivatives.yaml``; transformers ``activations.py`` (``NewGELUActivation``).
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.operation import STRIDED, Kind
from tunecast.model.tape import Grads, Tape, Tensor, widest


def layer_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, *, name: str) -> Tensor:
    """``native_layer_norm``: one kernel that writes its mean and root per row too; keeps x and these.

    Backward is one kernel: the input's gradient, and those of weight and bias if they train.
    """
    width = weight.elements
    rows = x.elements // width
    out = tape.empty(x.elements, x.dtype)
    rests = tape.empty(rows, x.dtype), tape.empty(rows, x.dtype)
    affine = (weight,) if bias is None else (weight, bias)
    if tape.would_grad(x, *affine):
        tape.mark_saved()
    tape.kernel(name, Kind.MEMORY, (x, *affine), (out, *rests))

    def backward(grad: Tensor) -> Grads:
        makes = [tape.empty(t.elements, t.dtype) if t.needs_grad else None for t in (x, *affine)]
        tape.kernel(name, Kind.MEMORY, (grad, x, *rests, *affine), tuple(made for made in makes if made is not None))
        return makes

    return tape.record(out, (x, *affine), backward, saves=(x, *rests))


def split(tape: Tape, x: Tensor, sizes: tuple[int, ...], *, name: str) -> list[Tensor]:
    """Slices of the last dimension: views, whose gradients are joined in one kernel once all have come.

    Zeros stand for those that never come.
    """
    waiting: list[Tensor] = []

    def backward(grad: Tensor) -> Grads:
        waiting.append(grad)
        if len(waiting) < len(sizes):
            return (None,)
        return (ops.elementwise(tape, name, tuple(waiting), x.elements, grad.dtype, layout=STRIDED),)

    return [tape.record(Tensor(size, x.dtype, x.storage, is_view=True), (x,), backward) for size in sizes]


def joined_all(tape: Tape, parts: list[Tensor], *, name: str) -> Tensor:
    """``cat`` of many: one kernel forward; backward each takes its part of the gradient as it lies."""
    elements = sum(part.elements for part in parts)
    out = ops.elementwise(tape, name, parts, elements, parts[0].dtype, layout=STRIDED)

    def backward(grad: Tensor) -> Grads:
        return [Tensor(part.elements, grad.dtype, grad.storage, is_view=True) for part in parts]

    return tape.record(out, parts, backward)


def concatenated(tape: Tape, first: Tensor, second: Tensor, *, name: str) -> Tensor:
    """``cat`` of two: a kernel forward; backward each takes its part of the gradient as it lies."""
    dtype = widest((first.dtype, second.dtype))
    out = ops.elementwise(tape, name, (first, second), first.elements + second.elements, dtype, layout=STRIDED)

    def backward(grad: Tensor) -> Grads:
        return [
            Tensor(part.elements, grad.dtype, grad.storage, is_view=True) if part.needs_grad else None
            for part in (first, second)
        ]

    return tape.record(out, (first, second), backward)


def add_to_each(tape: Tape, x: Tensor, shared: Tensor, *, name: str) -> Tensor:
    """``x + shared`` where all samples share one: its gradient is summed over samples. Saves nothing."""
    out = ops.elementwise(tape, name, (x, shared), x.elements, widest((x.dtype, shared.dtype)))

    def backward(grad: Tensor) -> Grads:
        to_shared = grad if shared.needs_grad else None
        if shared.needs_grad and shared.elements != x.elements:
            to_shared = ops.elementwise(tape, name, (grad,), shared.elements, grad.dtype)
        return (grad if x.needs_grad else None), to_shared

    return tape.record(out, (x, shared), backward)


def less(tape: Tape, x: Tensor, mean: Tensor, *, name: str) -> Tensor:
    """``x - mean`` of every row: backward negates and sums the gradient for the mean. Saves nothing."""
    out = ops.elementwise(tape, name, (x, mean), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        to_mean = None
        if mean.needs_grad:
            negated = ops.elementwise(tape, name, (grad,), grad.elements, grad.dtype)
            to_mean = ops.elementwise(tape, name, (negated,), mean.elements, grad.dtype)
        return (grad if x.needs_grad else None), to_mean

    return tape.record(out, (x, mean), backward)


def selected(tape: Tape, x: Tensor, elements: int, *, name: str) -> Tensor:
    """One of several interleaved parts: a view, whose gradient is written into zeros of full size."""
    view = Tensor(elements, x.dtype, x.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (grad,), (full,), n_bytes=full.bytes + 2 * grad.bytes, launches=2)
        return (full,)

    return tape.record(view, (x,), backward)


def gathered(tape: Tape, x: Tensor, elements: int, *, name: str) -> Tensor:
    """A part taken by an index: a copy, whose gradient is put into zeros of full size."""
    index = Tensor(1, "int64", None)
    out = ops.elementwise(tape, name, (x, index), elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (), (full,))
        tape.kernel(name, Kind.MEMORY, (full, grad, index), (full,))
        return (full,)

    return tape.record(out, (x,), backward)


def filled(tape: Tape, x: Tensor, mask: Tensor, *, name: str) -> Tensor:
    """``masked_fill`` with a number, and of the gradient with zeros. Keeps the mask."""
    out = ops.elementwise(tape, name, (x, mask), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        return (ops.elementwise(tape, name, (grad, mask), grad.elements, grad.dtype),)

    return tape.record(out, (x,), backward, saves=(mask,))


def bloom_gelu(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """The tanh form as an autograd function of its own: keeps its input, and bends it again in the backward."""

    def made(*reads: Tensor) -> Tensor:
        return ops.elementwise(tape, name, reads, x.elements, x.dtype)

    def bent() -> Tensor:
        slope, cube = made(x), made(made(x), x)
        return made(made(slope, made(cube)))

    half = made(x)
    out = made(half, made(bent()))
    if tape.would_grad(x):  # what a Function saves is packed when its forward has returned
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        tanh_out, half = bent(), made(x)
        rest = made(made(tanh_out, tanh_out))
        inner = made(made(made(x), x))
        left = made(half, made(rest, inner))
        right = made(made(tanh_out))
        tape.hold(tanh_out)
        return (made(made(left, right), grad),)

    return tape.record(out, (x,), backward, saves=(x,))


def relu(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """One kernel each way. Keeps its result."""
    out = ops.elementwise(tape, name, (x,), x.elements, x.dtype)
    if tape.would_grad(x):
        tape.mark_saved()
    return tape.record(
        out, (x,), lambda grad: (ops.elementwise(tape, name, (grad, out), x.elements, x.dtype),), saves=(out,)
    )


def tanh(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """One kernel each way. Keeps its result."""
    out = ops.elementwise(tape, name, (x,), x.elements, x.dtype)
    if tape.would_grad(x):
        tape.mark_saved()
    return tape.record(
        out, (x,), lambda grad: (ops.elementwise(tape, name, (grad, out), x.elements, grad.dtype),), saves=(out,)
    )


def gelu_new(tape: Tape, x: Tensor, *, wide: bool, name: str) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), kernel by kernel.

    `wide`: CUDA's autocast runs the power in fp32, and what follows takes its dtype.
    """
    half = ops.scale(tape, x, name=name)
    cube = ops.square(tape, ops.cast(tape, x, "fp32", name=name) if wide else x, name=name)
    inner = ops.add(tape, x, ops.scale(tape, cube, name=name), name=name)
    bent = tanh(tape, ops.scale(tape, inner, name=name), name=name)
    return ops.multiply(tape, half, ops.shift(tape, bent, name=name), name=name)
