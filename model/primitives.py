"""The operators of a training step, each with the kernels of its forward and of its backward.

Sources: PyTorch ``tools/autograd/derivatives.yaml`` for what is saved and which kernels a backward
runs, ``aten/src/ATen/autocast_mode.cpp`` for casts. Matrix products take ``(tokens, in)`` times a
weight stored ``(out, in)``. FLOPs count multiplications and additions of products; elementwise
arithmetic is counted in bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.operation import STRIDED, UPCAST, Kind
from tunecast.model.tape import Grads, Tape, Tensor, widest
from tunecast.model.units import SIXTEEN_BITS

Cache = dict[str, Tensor]
"""Weights already cast inside the present autocast region, by name."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""Five products where the forward has two (FlashAttention-2, section 3.1)."""


def gemm_flops(m: int, n: int, k: int) -> float:
    """FLOPs of an (m x k) by (k x n) product: one multiplication and one addition per term."""
    return 2.0 * m * n * k


def attention_flops(batch: int, heads: int, length: int, head_dim: int, window: int | None = None) -> float:
    """FLOPs of causal attention forward as flash kernels run it.

    Scores and values are 2 x 2 x length^2 x head_dim per head; the causal half skips masked tiles. A
    sliding window of w keeps length x w - w^2 / 2 pairs. Leaves out the softmax.
    """
    pairs = length * length / 2.0
    if window is not None and window < length:
        pairs = length * window - window * window / 2.0
    return 4.0 * batch * heads * head_dim * pairs


def elementwise(
    tape: Tape,
    name: str,
    reads: Sequence[Tensor],
    elements: int,
    dtype: str,
    *,
    kind: Kind = Kind.MEMORY,
    layout: str = "",
) -> Tensor:
    """One kernel that reads tensors and writes a new one; bytes are what it reads plus what it writes."""
    out = tape.empty(elements, dtype)
    tape.kernel(name, kind, reads, (out,), layout=layout)
    return out


def cast(tape: Tape, x: Tensor, dtype: str, *, name: str = "cast") -> Tensor:
    """``x.to(dtype)``; nothing happens when it has that dtype already. Saves nothing."""
    if x.dtype == dtype:
        return x
    out = elementwise(tape, name, (x,), x.elements, dtype, layout=cast_layout(x.dtype, dtype))
    return tape.record(out, (x,), lambda grad: (cast_gradient(tape, grad, x.dtype, name),))


def cast_layout(old: str, new: str) -> str:
    """That of a kernel that casts: from 16 bits to 32 PyTorch's is one of its own (`upcasts`)."""
    return UPCAST if new == "fp32" and old in SIXTEEN_BITS else ""


def cast_gradient(tape: Tape, grad: Tensor, dtype: str, name: str) -> Tensor:
    """Backward of a cast: the gradient in the input's dtype."""
    if grad.dtype == dtype:
        return grad
    return elementwise(tape, name, (grad,), grad.elements, dtype, layout=cast_layout(grad.dtype, dtype))


def autocast_weight(tape: Tape, weight: Tensor, dtype: str | None, cache: Cache) -> Tensor:
    """A weight in autocast's dtype. Trained fp32 weights are cast once per region, frozen ones at every use."""
    if dtype is None or weight.dtype == dtype:
        return weight
    if weight.leaf is None or weight.dtype != "fp32":
        return cast(tape, weight, dtype, name="weight_cast")
    if weight.leaf not in cache:
        cache[weight.leaf] = cast(tape, weight, dtype, name="adapter_cast")
    return cache[weight.leaf]


def gemm(tape: Tape, name: str, reads: Sequence[Tensor], shape: tuple[int, ...], layout: str) -> Tensor:
    """One matrix product of `shape` (m, n, k), or a stack of so many as a fourth number says, into new memory, in the
    dtype of its first operand."""
    m, n, k, *stacked = shape
    rows = m * stacked[0] if stacked else m
    out = tape.empty(rows * n, reads[0].dtype)
    flops = gemm_flops(rows, n, k)
    tape.kernel(name, Kind.GEMM, reads, (out,), flops=flops, shape=shape, layout=layout, dtype=out.dtype)
    return out


def product_onto(
    tape: Tape, name: str, base: Tensor, operands: Sequence[Tensor], shape: tuple[int, int, int, int], layout: str
) -> Tensor:
    """``baddbmm``: a stack of products added to `base`, which is copied to the result first, in a kernel of its own.

    Source: PyTorch ``LinearAlgebra.cpp``, ``common_checks_baddbmm_bmm`` (``result.copy_(self)``).
    """
    m, n, k, stacked = shape
    out = elementwise(tape, name, (base,), m * n * stacked, base.dtype)
    flops = gemm_flops(m * stacked, n, k)
    tape.kernel(name, Kind.GEMM, (out, *operands), (out,), flops=flops, shape=shape, layout=layout, dtype=out.dtype)
    return out


def gradient_gemm(tape: Tape, name: str, grad: Tensor, other: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Gradient of one operand of a product; PyTorch hands on a reshaped or transposed view of it."""
    given = gemm(tape, name, (grad, other), shape, layout)
    given.is_view = True
    return given


def matmul(tape: Tape, name: str, x: Tensor, weight: Tensor, *, k: int, n: int, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T (+ bias)``: the weight is kept if x needs a gradient, x if the weight does.

    Backward: weight gradient (layout tn), then input gradient (nn), each only when needed; with a bias
    (``addmm``) the input's first and the bias's sum last.
    """
    m = x.elements // k
    if tape.would_grad(x, weight):
        tape.mark_saved()
    inputs = (x, weight) if bias is None else (x, weight, bias)
    out = gemm(tape, name, inputs, (m, n, k), "nt")
    x_needs, weight_needs = x.needs_grad, weight.needs_grad

    def backward(grad: Tensor) -> Grads:
        to_x = to_weight = to_bias = None
        if x_needs and bias is not None:
            to_x = gradient_gemm(tape, name, grad, weight, (m, k, n), "nn")
        if weight_needs:
            to_weight = gradient_gemm(tape, name, grad, x, (n, k, m), "tn")
        if x_needs and bias is None:
            to_x = gradient_gemm(tape, name, grad, weight, (m, k, n), "nn")
        if bias is not None and bias.needs_grad:
            kind = Kind.LOSS if tape.moment == "loss" else Kind.MEMORY
            to_bias = elementwise(tape, f"{name}.bias", (grad,), n, bias.dtype, kind=kind)
        return (to_x, to_weight, to_bias)[: len(inputs)]

    kept = tuple(tensor for tensor, needed in ((weight, x_needs), (x, weight_needs)) if needed)
    return tape.record(out, inputs, backward, saves=kept)


def add(tape: Tape, a: Tensor, b: Tensor, *, name: str = "add") -> Tensor:
    """``a + b`` of equal size; the gradient passes to both unchanged. Saves nothing."""
    out = elementwise(tape, name, (a, b), a.elements, widest((a.dtype, b.dtype)))
    return tape.record(out, (a, b), lambda grad: (grad if a.needs_grad else None, grad if b.needs_grad else None))


def scale(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``x`` times a number: one kernel forward, one backward, nothing saved."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, name, (grad,), grad.elements, grad.dtype),))


def copy(tape: Tape, x: Tensor, *, name: str, layout: str = STRIDED) -> Tensor:
    """``x.contiguous()``, or without a `layout` ``x.clone()`` as it lies: the gradient passes without a kernel."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype, layout=layout)
    return tape.record(out, (x,), lambda grad: (grad,))


def multiply(tape: Tape, a: Tensor, b: Tensor, *, name: str) -> Tensor:
    """``a * b``, where `b` may be smaller and broadcast; each is kept if the other needs a gradient.

    Backward: grad x other for each that needs one, and a sum over the broadcast part.
    """
    if tape.would_grad(a, b):
        tape.mark_saved()
    out = elementwise(tape, name, (a, b), a.elements, widest((a.dtype, b.dtype)))

    def backward(grad: Tensor) -> Grads:
        to_b = to_a = None
        if b.needs_grad:
            to_b = elementwise(tape, name, (grad, a), a.elements, grad.dtype)
        if a.needs_grad:
            to_a = elementwise(tape, name, (grad, b), a.elements, grad.dtype)
        if to_b is not None and b.elements != a.elements:
            to_b = elementwise(tape, name, (to_b,), b.elements, grad.dtype)
        return to_a, to_b

    kept = tuple(tensor for tensor, other in ((a, b), (b, a)) if other.needs_grad)
    return tape.record(out, (a, b), backward, saves=kept)


def square(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``x.pow(2)``; backward runs pow(x, 1), times 2, times the gradient. Keeps x."""
    if tape.would_grad(x):
        tape.mark_saved()
    out = elementwise(tape, name, (x,), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        power = elementwise(tape, name, (x,), x.elements, x.dtype)
        doubled = elementwise(tape, name, (power,), x.elements, x.dtype)
        given = elementwise(tape, name, (grad, doubled), x.elements, x.dtype)
        tape.hold(power)
        return (given,)

    return tape.record(out, (x,), backward, saves=(x,))


def row_mean(tape: Tape, x: Tensor, rows: int, *, name: str) -> Tensor:
    """Mean over the last dimension; backward writes the gradient over n back to full size. Saves nothing."""
    out = elementwise(tape, name, (x,), rows, x.dtype)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, name, (grad,), x.elements, grad.dtype),))


def shift(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``x + eps``: the gradient passes through. Saves nothing."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    return tape.record(out, (x,), lambda grad: (grad,))


def reciprocal_root(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``rsqrt``; backward is -1/2 grad y^3 in three kernels. Keeps its result."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    if tape.would_grad(x):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        half = elementwise(tape, name, (grad,), x.elements, x.dtype)
        cube = elementwise(tape, name, (out,), x.elements, x.dtype)
        return (elementwise(tape, name, (half, cube), x.elements, x.dtype),)

    return tape.record(out, (x,), backward, saves=(out,))


def power_root(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``pow(x, -0.5)``; backward is grad (-0.5 x ** -1.5) in three kernels. Keeps x."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    if tape.would_grad(x):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        raised = elementwise(tape, name, (x,), x.elements, x.dtype)
        half = elementwise(tape, name, (raised,), x.elements, x.dtype)
        return (elementwise(tape, name, (grad, half), x.elements, x.dtype),)

    return tape.record(out, (x,), backward, saves=(x,))


def scaled_in_place(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``x *= number``, the number a tensor of one element: one kernel each way; keeps the number alone."""
    number = Tensor(1, x.dtype, None)
    if tape.would_grad(x):
        tape.mark_saved()
    tape.kernel(name, Kind.MEMORY, (x, number), (x,))
    out = Tensor(x.elements, x.dtype, x.storage)

    def backward(grad: Tensor) -> Grads:
        return (elementwise(tape, name, (grad, number), x.elements, grad.dtype),)

    return tape.record(out, (x,), backward, saves=(number,))


def activation(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """SiLU or GELU: one kernel each way. Keeps x."""
    if tape.would_grad(x):
        tape.mark_saved()
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, name, (grad, x), x.elements, x.dtype),), saves=(x,))


def rotate_half(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``cat(-x2, x1)``: a negation of one half and a concatenation.

    Backward: the negation, each half written into a zeroed tensor of full size (two kernels each),
    and their sum. Saves nothing.
    """
    half = x.elements // 2
    view = Tensor(half, x.dtype, x.storage)
    negated = elementwise(tape, name, (view,), half, x.dtype)
    out = elementwise(tape, name, (negated, view), x.elements, x.dtype, layout=STRIDED)

    def backward(grad: Tensor) -> Grads:
        grad_half = Tensor(half, grad.dtype, grad.storage)
        negative = elementwise(tape, name, (grad_half,), half, grad.dtype)
        return pad_half(tape, negative, name=name), pad_half(tape, grad_half, name=name)

    return tape.record(out, (x, x), backward)


def pad_half(tape: Tape, grad: Tensor, *, name: str) -> Tensor:
    """Backward of a slice: zeros of full size, then the half copied in."""
    full = tape.empty(2 * grad.elements, grad.dtype)
    tape.kernel(name, Kind.MEMORY, (grad,), (full,), n_bytes=2 * full.bytes, launches=2, layout=STRIDED)
    return full


def relayout(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """(batch, length, heads x dim) seen as (batch, heads, length, dim): a view, whose backward copies."""

    def backward(grad: Tensor) -> Grads:
        return (elementwise(tape, name, (grad,), grad.elements, grad.dtype, layout=STRIDED),)

    return tape.record(Tensor(x.elements, x.dtype, x.storage), (x,), backward)


def part(tape: Tape, x: Tensor, elements: int, *, name: str) -> Tensor:
    """A slice of the last dimension: a view, whose gradient is written into a zeroed tensor of full size."""
    view = Tensor(elements, x.dtype, x.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        moved = full.bytes + 2 * grad.bytes
        tape.kernel(name, Kind.MEMORY, (grad,), (full,), n_bytes=moved, launches=2, layout=STRIDED)
        return (full,)

    return tape.record(view, (x,), backward)


def chunks(tape: Tape, x: Tensor, count: int, *, name: str) -> list[Tensor]:
    """Equal slices of the last dimension: views, whose gradients are concatenated once all have come."""
    waiting: list[Tensor] = []

    def backward(grad: Tensor) -> Grads:
        waiting.append(grad)
        if len(waiting) < count:
            return (None,)
        return (elementwise(tape, name, tuple(waiting), x.elements, grad.dtype, layout=STRIDED),)

    size = x.elements // count
    return [tape.record(Tensor(size, x.dtype, x.storage, is_view=True), (x,), backward) for _ in range(count)]


def whole_and_rest(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """x split into all of it and an empty rest: backward, the rest's zeros of full size are added."""
    view = Tensor(x.elements, x.dtype, x.storage)

    def backward(grad: Tensor) -> Grads:
        zeros = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (), (zeros,), launches=2)
        tape.kernel(name, Kind.MEMORY, (grad, zeros), (grad,))
        return (grad,)

    return tape.record(view, (x,), backward)


def joined(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """``cat`` with an empty tensor: a copy forward, a view backward."""
    return tape.record(elementwise(tape, name, (x,), x.elements, x.dtype, layout=STRIDED), (x,), lambda grad: (grad,))


def repeat_heads(tape: Tape, x: Tensor, times: int, *, single: bool = False) -> Tensor:
    """Key or value heads repeated for every query head of their group; the gradient is summed back.

    A `single` head is seen many times in the same memory.
    """
    if single:
        out = Tensor(x.elements, x.dtype, x.storage)
    else:
        out = elementwise(tape, "repeat_heads", (x,), times * x.elements, x.dtype, layout=STRIDED)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, "repeat_heads", (grad,), x.elements, grad.dtype),))


def dropout(tape: Tape, x: Tensor, probability: float) -> Tensor:
    """Dropout with a kept mask of one byte per element; nothing at all at probability 0 (``nn.Identity``)."""
    if probability == 0.0:
        return x
    out, mask = tape.empty(x.elements, x.dtype), tape.empty(x.elements, "bool")
    tape.kernel("dropout", Kind.MEMORY, (x,), (out, mask))
    if tape.would_grad(x):
        tape.mark_saved()
    return tape.record(
        out, (x,), lambda grad: (elementwise(tape, "dropout", (grad, mask), x.elements, grad.dtype),), saves=(mask,)
    )
