"""Operators of routed experts: choosing, sorting, gathering, grouped products.

Sources: PyTorch ``derivatives.yaml`` (topk, index, gather, div, _grouped_mm) and ``FunctionsManual.cpp``
(``index_backward``, ``value_selecting_reduction_backward``): gradients are written into zeros in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunecast.model.operation import SOFTMAX, SYNCHRONISATION, Kind, expert_shape, grouped_layout
from tunecast.model.primitives import cast, elementwise, gemm_flops
from tunecast.model.tape import Backward, Grads, Tape, Tensor, widest


def unary(tape: Tape, x: Tensor, *, name: str) -> Tensor:
    """A sigmoid: one kernel each way, which keeps its result."""
    out = elementwise(tape, name, (x,), x.elements, x.dtype)
    if tape.would_grad(x):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        return (elementwise(tape, name, (grad, out), x.elements, x.dtype),)

    return tape.record(out, (x,), backward, saves=(out,))


def softmax(tape: Tape, x: Tensor, *, name: str, dtype: str | None = None) -> Tensor:
    """Over rows, in a dtype; keeps its result.

    A GPU converts fp16 inside the kernel; all else is cast first (PyTorch ``SoftMax.cpp``). Its backward first writes
    gradient times result in full (``SoftMax.cu``, ``softmax_backward_cuda_out``); a CPU's is one kernel.
    """
    wanted, on_gpu = dtype or x.dtype, tape.platform == "cuda"
    entry = x if on_gpu and x.dtype == "fp16" else cast(tape, x, wanted, name=f"{name}_cast")
    if tape.would_grad(entry):
        tape.mark_saved()
    out = elementwise(tape, name, (entry,), entry.elements, wanted, layout=SOFTMAX)

    def backward(grad: Tensor) -> Grads:
        weighed = elementwise(tape, name, (grad, out), out.elements, grad.dtype, layout=SOFTMAX) if on_gpu else grad
        return (elementwise(tape, name, (weighed, out), out.elements, entry.dtype, layout=SOFTMAX),)

    return tape.record(out, (entry,), backward, saves=(out,))


def written_back(tape: Tape, x: Tensor, places: Tensor, name: str) -> Backward:
    """Backward of a choice of x's values: zeros of x's size, into which the gradient is written."""

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (), (full,))
        tape.kernel(name, Kind.MEMORY, (full, places, grad), (full,))
        return (full,)

    return backward


def top_k(tape: Tape, scores: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """The `chosen` largest values and where they are; keeps the places."""
    values, places = tape.empty(chosen, scores.dtype), tape.empty(chosen, "int64")
    tape.kernel("router.topk", Kind.MEMORY, (scores,), (values, places))
    if tape.would_grad(scores):
        tape.mark_saved()
    back = written_back(tape, scores, places, "router.topk")
    return tape.record(values, (scores,), back, saves=(places,)), places


def index(tape: Tape, x: Tensor, places: Tensor, elements: int, *, name: str) -> Tensor:
    """``x[places]`` or ``x.gather(places)``: `elements` values copied out; keeps the places."""
    if tape.would_grad(x):
        tape.mark_saved()
    out = elementwise(tape, name, (x, places), elements, x.dtype)
    return tape.record(out, (x,), written_back(tape, x, places, name), saves=(places,))


def clamp(tape: Tape, x: Tensor, bounds: int, *, name: str) -> Tensor:
    """Limited from above (one bound) or from both sides. Keeps x; backward compares, and zeroes what was cut."""
    if tape.would_grad(x):
        tape.mark_saved()
    out = elementwise(tape, name, (x,), x.elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        zero = elementwise(tape, name, (), 1, grad.dtype)
        inside = [elementwise(tape, name, (x,), x.elements, "bool") for _ in range(bounds)]
        if bounds > 1:
            tape.kernel(name, Kind.MEMORY, inside, (inside[0],))
        return (elementwise(tape, name, (inside[0], grad, zero), x.elements, grad.dtype),)

    return tape.record(out, (x,), backward, saves=(x,))


def subtract(tape: Tape, a: Tensor, b: Tensor, *, name: str) -> Tensor:
    """``a - b``: the gradient passes to a, its negation to b. Keeps nothing."""
    out = elementwise(tape, name, (a, b), a.elements, widest((a.dtype, b.dtype)))

    def backward(grad: Tensor) -> Grads:
        to_b = elementwise(tape, name, (grad,), grad.elements, grad.dtype) if b.needs_grad else None
        return (grad if a.needs_grad else None), to_b

    return tape.record(out, (a, b), backward)


def row_sum(tape: Tape, x: Tensor, rows: int, *, name: str, wide: bool) -> Tensor:
    """Sum over the last dimension, in fp32 if `wide`; the gradient is seen at full size, or written in x's dtype."""
    out = elementwise(tape, name, (x,), rows, "fp32" if wide else x.dtype)
    if out.dtype == x.dtype:
        return tape.record(out, (x,), lambda grad: (grad,))
    return tape.record(out, (x,), lambda grad: (elementwise(tape, name, (grad,), x.elements, x.dtype),))


def divided_in_place(tape: Tape, values: Tensor, total: Tensor, *, name: str, copied: bool) -> Tensor:
    """``values /= total``: keeps a copy of what it overwrites, and the divisor.

    `copied`: whether the copy is made even where nothing keeps it (first pass of a non-reentrant checkpoint).

    Backward: -grad (values / total) / total in four kernels, grad / total, and the sum of the first over rows.
    """
    kept, needed = values, tape.would_grad(values, total)
    if needed:
        tape.mark_saved()
    if needed or copied:
        kept = elementwise(tape, name, (values,), values.elements, values.dtype)
    tape.kernel(name, Kind.MEMORY, (values, total), (values,))
    out = Tensor(values.elements, values.dtype, values.storage)

    def backward(grad: Tensor) -> Grads:
        dtype = widest((kept.dtype, total.dtype))
        ratio = elementwise(tape, name, (kept, total), kept.elements, dtype)
        ratio = elementwise(tape, name, (ratio, total), kept.elements, dtype)
        negative = elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        wide = elementwise(tape, name, (negative, ratio), kept.elements, dtype)
        to_values = elementwise(tape, name, (grad, total), kept.elements, dtype)
        return to_values, elementwise(tape, name, (wide,), total.elements, total.dtype)

    return tape.record(out, (values, total), backward, saves=(kept, total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How rows sorted by expert are multiplied."""

    experts: int
    offsets: Tensor
    """Where each expert's rows end."""
    loops: bool
    """Whether there is one product per expert, for which a GPU's host reads the offsets (`grouped.py`)."""


def grouped_product(
    tape: Tape, name: str, x: Tensor, weight: Tensor, grouping: Grouping, shape: tuple[int, int, int], layout: str
) -> Tensor:
    """Rows sorted by expert, each group times its expert's matrix: `shape` (m, n, k), m the rows of all groups.

    Every expert's weight is counted as read once, however few rows it gets.
    """
    m, n, k = shape
    if tape.would_grad(x, weight):
        tape.mark_saved()
    out = _grouped(tape, name, (x, weight), grouping, (m, n, k), layout)
    x_needs, weight_needs = x.needs_grad, weight.needs_grad

    def backward(grad: Tensor) -> Grads:
        to_x = to_weight = None
        if weight_needs:
            to_weight = _grouped(tape, name, (grad, x), grouping, (n, k, m), "tn")
        if x_needs:
            back = "nn" if layout == "nt" else "nt"
            to_x = _grouped(tape, name, (grad, weight), grouping, (m, k, n), back)
        return to_x, to_weight

    kept = tuple(tensor for tensor, needed in ((weight, x_needs), (x, weight_needs)) if needed)
    return tape.record(out, (x, weight), backward, saves=(*kept, grouping.offsets))


def _grouped(
    tape: Tape, name: str, reads: tuple[Tensor, ...], grouping: Grouping, shape: tuple[int, int, int], layout: str
) -> Tensor:
    """One product of all experts; in a weight's gradient (``tn``) rows are the inner dimension."""
    m, n, _ = shape
    inner, offsets = layout == "tn", grouping.offsets
    out = tape.empty(m * n * (grouping.experts if inner else 1), reads[0].dtype)
    *one, shared = expert_shape(*shape, grouping.experts, inner=inner)
    many: dict[str, Any] = {"shape": (*one, shared), "layout": grouped_layout(layout)}
    if grouping.loops:
        many = {"shape": tuple(one), "launches": float(shared), "layout": layout}
        if tape.platform == "cuda":
            tape.kernel(SYNCHRONISATION, Kind.MEMORY, (offsets,), (), n_bytes=2 * offsets.bytes)
    flops = gemm_flops(*shape)
    tape.kernel(name, Kind.GEMM, (*reads, offsets), (out,), flops=flops, dtype=out.dtype, **many)
    return out


def added_bias(tape: Tape, x: Tensor, bias: Tensor, *, name: str) -> Tensor:
    """``x.add_(bias)``, a row of biases for every row of x, in place."""
    tape.kernel(name, Kind.MEMORY, (x, bias), (x,))
    out = Tensor(x.elements, x.dtype, x.storage)
    return tape.record(out, (x, bias), lambda grad: (grad, grad if bias.needs_grad else None))


def weighted_rows(tape: Tape, x: Tensor, weights: Tensor, *, name: str, released: bool) -> Tensor:
    """Rows times a weight each; each factor is kept if the other needs a gradient. The result has the wider dtype.

    `released`: what a non-reentrant checkpoint recomputed leaves before gradients are cast to their tensors' dtype.
    """
    if tape.would_grad(x, weights):
        tape.mark_saved()
    out = elementwise(tape, name, (x, weights), x.elements, widest((x.dtype, weights.dtype)))

    def backward(grad: Tensor) -> Grads:
        to_weights = to_x = None
        if weights.needs_grad:
            to_weights = elementwise(tape, name, (grad, x), x.elements, grad.dtype)
        if x.needs_grad:
            to_x = elementwise(tape, name, (grad, weights), x.elements, grad.dtype)
            if to_x.dtype != x.dtype and not released:
                to_x = tape.convert(to_x, x.dtype)
        if to_weights is not None:
            to_weights = elementwise(tape, name, (to_weights,), weights.elements, grad.dtype)
        return to_x, to_weights

    kept = tuple(tensor for tensor, other in ((x, weights), (weights, x)) if other.needs_grad)
    return tape.record(out, (x, weights), backward, saves=kept)


def sum_of_choices(tape: Tape, x: Tensor, elements: int, *, name: str, wide: bool) -> Tensor:
    """What the chosen experts made of each token, added up; `wide`: autocast makes the sum fp32.

    Backward: the gradient written out once per choice.
    """
    out = elementwise(tape, name, (x,), elements, "fp32" if wide else x.dtype)
    return tape.record(out, (x,), lambda grad: (elementwise(tape, name, (grad,), x.elements, x.dtype),))
