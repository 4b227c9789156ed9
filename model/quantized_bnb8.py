"""Bases in bitsandbytes' 8 bits (LLM.int8): int8 rows with an fp32 scale each, products of int8 operands.

Source: bitsandbytes 0.50 ``autograd/_functions.py`` (``MatMul8bitLt``) and ``backends/cuda/ops.py``, at the threshold
of 6 that transformers sets. The input is cast to fp16, searched for outliers (a copy of absolute values, a comparison,
a value the host reads), quantized by rows, multiplied into int32, and that turned into fp16 and the input's dtype.
The backward writes the whole weight in 16 bits twice, and multiplies with that.
Left out: the columns where an outlier is found, which are multiplied once more in 16 bits and added (``addmm`` copies
the result and adds to it: 8 bytes per output and 1 per input beside the 14 and 15 counted here, where a map's input
has any); with adapter dropout a
recomputed input lives a little longer than here (2% of a narrow model's peak in the backward).
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.architecture import Linear
from tunecast.model.operation import SYNCHRONISATION, Kind, Phase
from tunecast.model.tape import Grads, Tape, Tensor, allocated_bytes


def int8_bytes(linear: Linear) -> int:
    """Memory of one weight: a byte each, and an fp32 scale per output."""
    return allocated_bytes(linear.weight_params) + allocated_bytes(4 * linear.out_features)


def int8_packed_bytes(linear: Linear) -> int:
    """The part that is not statistics."""
    return allocated_bytes(linear.weight_params)


def quantized_rows(tape: Tape, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """int8 rows and their scales, after the search for outliers."""
    half = x if x.dtype == "fp16" else ops.elementwise(tape, "int8_cast", (x,), x.elements, "fp16")
    sizes = ops.elementwise(tape, "int8_outliers", (half,), half.elements, "fp16")
    large = ops.elementwise(tape, "int8_outliers", (sizes,), half.elements, "bool")
    found = ops.elementwise(tape, "int8_outliers", (large,), 1, "bool")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (found,), (), n_bytes=2)
    tape.hold(large)
    small, scales = tape.empty(x.elements, "int8"), tape.empty(rows, "fp32")
    tape.kernel("int8_quantize", Kind.MEMORY, (half,), (small, scales))
    return small, scales


def matmul_8bit(tape: Tape, name: str, x: Tensor, *, k: int, n: int, bias: Tensor | None = None) -> Tensor:
    """Product with a frozen int8 weight; keeps its input, though the backward has no use for it.

    It does so outside autograd's saved tensors, so that a non-reentrant checkpoint frees no such input.
    """
    m = x.elements // k
    small, scales = quantized_rows(tape, x, m)
    weight, weight_scales = Tensor(n * k, "int8", None), Tensor(n, "fp32", None)
    wide = tape.empty(m * n, "int32", part="scratch")
    flops = ops.gemm_flops(m, n, k)
    tape.kernel(name, Kind.GEMM, (small, weight), (wide,), flops=flops, shape=(m, n, k), layout="nt", dtype="int8")
    out = ops.elementwise(tape, "int8_dequantize", (wide, scales, weight_scales), m * n, "fp16")
    if bias is not None:
        tape.kernel(f"{name}.bias", Kind.MEMORY, (out, bias), (out,))
    made = out if x.dtype == "fp16" else ops.elementwise(tape, "int8_cast", (out,), m * n, x.dtype)
    tape.hold(small, scales, wide)
    if tape.first_run:
        tape.keep(x)
    elif tape.phase is Phase.RECOMPUTE:
        tape.keep_in_layer(x)

    def backward(grad: Tensor) -> Grads:
        factor = ops.elementwise(tape, "int8_scale", (weight_scales,), n, "fp32")
        again = tape.empty(n * k, x.dtype, part="scratch")
        tape.kernel("dequantize", Kind.MEMORY, (weight,), (again,))
        tape.kernel("int8_scale", Kind.MEMORY, (again, factor), (again,))
        return (ops.gradient_gemm(tape, name, grad, again, (m, k, n), "nn"),)

    return tape.record(made, (x,), backward, saves=() if tape.phase is Phase.RECOMPUTE else (x,))
