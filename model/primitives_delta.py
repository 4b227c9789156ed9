"""Operators of linear attention by chunks: a causal convolution, padding, decays, triangular systems, writes by slice.

Sources: PyTorch ``tools/autograd/derivatives.yaml`` (convolution, cumsum, constant_pad_nd, linalg_solve_triangular) and
``FunctionsManual.cpp`` (``linalg_solve_triangular_backward``, ``cumsum_backward``), ``CopySlices`` of
``accumulate_grad`` for writes into slices. FLOPs of triangular systems and of the depthwise convolution are left out,
as those of elementwise arithmetic: a few per byte moved. So is the copy that CUDA's convolution makes of an input that
is laid out by token.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.operation import Kind
from tunecast.model.primitives import elementwise
from tunecast.model.tape import Grads, Tape, Tensor


def causal_convolution(tape: Tape, x: Tensor, weight: Tensor, elements: int) -> Tensor:
    """Depthwise, over every token and those before it; `elements` with what padding adds behind. Keeps both operands.

    Backward is one kernel, for the gradients of both.
    """
    if tape.would_grad(x, weight):
        tape.mark_saved()
    out = elementwise(tape, "convolution", (x, weight), elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        made = [tape.empty(t.elements, t.dtype) if t.needs_grad else None for t in (x, weight)]
        tape.kernel("convolution", Kind.MEMORY, (grad, x, weight), [each for each in made if each is not None])
        return made

    return tape.record(out, (x, weight), backward, saves=(x, weight))


def padded(tape: Tape, x: Tensor, elements: int) -> Tensor:
    """Zeros put behind the last token, or none, in new memory; backward takes them off. Saves nothing."""
    out = elementwise(tape, "pad", (x,), elements, x.dtype)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, "pad", (grad,), x.elements, grad.dtype),))


def reshaped(tape: Tape, x: Tensor, *, copied: bool = False) -> Tensor:
    """Tokens seen in chunks: a view, as is its gradient, unless that is `copied` because it lies otherwise."""
    view = Tensor(x.elements, x.dtype, x.storage)

    def backward(grad: Tensor) -> Grads:
        if copied:
            return (elementwise(tape, "chunk_layout", (grad,), grad.elements, grad.dtype),)
        return (Tensor(grad.elements, grad.dtype, grad.storage, is_view=True),)

    return tape.record(view, (x,), backward)


def cumulative_sum(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``cumsum``: backward turns the gradient round, sums it up, and turns it round again. Saves nothing."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        for _ in range(3):
            grad = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        return (grad,)

    return tape.record(out, (x,), backward)


def pairwise_differences(tape: Tape, x: Tensor, elements: int, *, name: str) -> Tensor:
    """x of one position less x of another, for all pairs of a chunk.

    Backward negates the gradient for the second and sums it up for each. Saves nothing.
    """
    out = elementwise(tape, name, (x, x), elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        negated = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        return [elementwise(tape, name, (each,), x.elements, x.dtype) for each in (grad, negated)]

    return tape.record(out, (x, x), backward)


def less_from_last(tape: Tape, x: Tensor, rows: int, *, name: str) -> Tensor:
    """x of every chunk's last position less x of each position, `rows` chunks: a slice and a subtraction.

    Saves nothing. Backward: the gradient negated for each position, summed up for the last one and put into zeros.
    """
    last = ops.part(tape, x, rows, name=name)
    out = elementwise(tape, name, (last, x), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        negated = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        return elementwise(tape, name, (grad,), rows, grad.dtype), negated

    return tape.record(out, (last, x), backward)


def solved(tape: Tape, matrix: Tensor, right: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """``linalg.solve_triangular`` of `sizes` (matrices, rows, columns of the right side). Keeps matrix and solution.

    Backward: another system for the right side's gradient; a product, its negation and its triangle for the matrix's.
    """
    count, rows, columns = sizes
    name = "triangular_solve"
    if tape.would_grad(matrix, right):
        tape.mark_saved()
    out = elementwise(tape, name, (matrix, right), right.elements, right.dtype)

    def backward(grad: Tensor) -> Grads:
        to_right = elementwise(tape, name, (matrix, grad), grad.elements, grad.dtype)
        to_matrix = ops.gemm(tape, name, (to_right, out), (rows, rows, columns, count), "nt")
        for _ in ("negated", "triangle"):
            to_matrix = elementwise(tape, name, (to_matrix,), to_matrix.elements, to_matrix.dtype)
        return to_matrix, to_right

    return tape.record(out, (matrix, right), backward, saves=(matrix, out))


def written(tape: Tape, whole: Tensor, x: Tensor, *, name: str) -> Tensor:
    """``whole[:, :, i] = x``. Backward: the whole gradient copied, the slice copied out, and zeros left behind in it
    for what was there before, if that needs a gradient."""
    place = Tensor(x.elements, whole.dtype, None)
    tape.kernel(name, Kind.MEMORY, (x,), (whole,), n_bytes=x.bytes + place.bytes)
    out = Tensor(whole.elements, whole.dtype, whole.storage)

    def backward(grad: Tensor) -> Grads:
        rest = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        own = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (rest,), (own,), n_bytes=2 * own.bytes)
        if not whole.needs_grad:
            return None, ops.cast_gradient(tape, own, x.dtype, name)
        zeros = elementwise(tape, name, (), x.elements, grad.dtype)
        given = ops.cast_gradient(tape, own, x.dtype, name)
        tape.kernel(name, Kind.MEMORY, (zeros,), (rest,), n_bytes=2 * zeros.bytes)
        return rest, given

    return tape.record(out, (whole, x), backward)
