"""Linear maps multiplied in 8-bit floats, their weights kept in 16 bits: Transformer Engine's.

Source: ``transformer_engine/pytorch/module/linear.py`` with delayed scaling. One kernel casts a tensor and writes its
transpose too, since 8-bit products read both operands along the inner dimension (``cast_transpose``); what the
backward needs is kept in 8 bits: the input's transpose for the weight's gradient, the weight's for the input's.
Every product returns 16 bits. Weights are cast in every forward pass (``te``) or, by Megatron-Core, in the first
micro-batch of a step (``megatron``). Left out: the reading pass for maxima of current scaling, and the output head,
which stays in 16 bits.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.operation import Kind
from tunecast.model.tape import Grads, Tape, Tensor

FP8_KINDS = ("te", "megatron")


def cast_transposed(tape: Tape, name: str, x: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
    """An 8-bit copy, and its transpose where the backward needs it: read once, written once or twice."""
    copy = tape.empty(x.elements, "fp8")
    turned = tape.empty(x.elements, "fp8") if both else None
    writes = (copy,) if turned is None else (copy, turned)
    tape.kernel(name, Kind.MEMORY, (x,), writes)
    return copy, turned


def product_8bit(
    tape: Tape, name: str, reads: tuple[Tensor, ...], out_dtype: str, shape: tuple[int, int, int]
) -> Tensor:
    """One product of 8-bit operands with a 16-bit result."""
    m, n, k = shape
    out = tape.empty(m * n, out_dtype)
    flops = ops.gemm_flops(m, n, k)
    tape.kernel(name, Kind.GEMM, reads, (out,), flops=flops, shape=shape, layout="nt", dtype="fp8")
    return out


def matmul(
    tape: Tape, name: str, x: Tensor, weight: Tensor, *, k: int, n: int, recast: bool, bias: Tensor | None = None
) -> Tensor:
    """``x @ weight.T`` in 8 bits; `recast` false takes the weight's 8-bit copies of an earlier micro-batch."""
    m, dtype = x.elements // k, x.dtype
    x_needs, weight_needs = x.needs_grad, weight.needs_grad
    small_x, turned_x = cast_transposed(tape, "fp8_cast", x, both=tape.would_grad(weight))
    if recast:
        small_weight, turned_weight = cast_transposed(tape, "fp8_weight_cast", weight, both=tape.would_grad(x))
    else:
        small_weight, turned_weight = (Tensor(weight.elements, "fp8", None) for _ in range(2))
    operands = (small_x, small_weight) if bias is None else (small_x, small_weight, bias)
    out = product_8bit(tape, name, operands, dtype, (m, n, k))
    if tape.would_grad(x, weight):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        to_bias = ops.elementwise(tape, f"{name}.bias", (grad,), n, dtype) if bias and bias.needs_grad else None
        small, turned = cast_transposed(tape, "fp8_cast", grad, both=weight_needs)
        to_x = to_weight = None
        if x_needs and turned_weight is not None:
            to_x = product_8bit(tape, name, (small, turned_weight), dtype, (m, k, n))
        if turned is not None and turned_x is not None:
            to_weight = product_8bit(tape, name, (turned, turned_x), weight.dtype, (n, k, m))
        for given in (to_x, to_weight):
            if given is not None:
                given.is_view = True
        return (to_x, to_weight, to_bias)[: 2 if bias is None else 3]

    kept = tuple(t for t, needed in ((turned_weight, x_needs), (turned_x, weight_needs)) if needed and t is not None)
    return tape.record(out, (x, weight) if bias is None else (x, weight, bias), backward, saves=kept)
