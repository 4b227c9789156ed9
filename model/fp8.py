"""Linear maps multiplied in 8-bit floats, their weights kept in 16 bits or in 8.

Sources: ``transformer_engine/pytorch/module/linear.py`` and ``common/recipe``, torchao ``float8/float8_linear.py``.
One kernel casts a tensor and writes its transpose too, since 8-bit products read both operands along the inner
dimension (``cast_transpose``). Transformer Engine keeps what the backward needs in 8 bits: the input's transpose for
the weight's gradient, the weight's for the input's; torchao keeps 16 bits and casts both again. Every product returns
16 bits. Weights stored in 8 bits are never cast; their transpose, which the backward multiplies with, is made once a
step and kept where the weights train, and made and dropped in every backward where they are frozen. That is how a
base of 70B parameters fits 141 GB beside its activations (MLPerf's llama2_70b_lora on H200, tensor parallel 1), where
a kept transpose would double it (ROCm/TransformerEngine pull request 248, ``keep_fp8_weight_transpose_cache``).
Left out: casts fused into the norm before them (unless the layer is compiled), 8-bit all-gathers, layers that
a recipe leaves in 16 bits, and the output head, which stays in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model.operation import Kind
from tunecast.model.tape import Grads, Tape, Tensor

WEIGHT_PART = "scratch"
"""What 8-bit copies of weights are: one set for all micro-batches in flight."""
NEIGHBOURS = 32
"""Kernels back in which a map of the same input is looked for."""
MX_BLOCK = 32
"""Numbers that share a scale of one byte (OCP microscaling formats 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How scales are found, and when weights are cast."""

    finds_maxima: bool = False
    """Whether a pass of its own finds a tensor's largest number; else the scale is that of earlier steps."""
    in_blocks: bool = False
    """Whether every `MX_BLOCK` numbers have a scale."""
    weights_once: bool = False
    """Whether weights are cast in a step's first micro-batch only (Megatron-Core); else in every forward pass."""
    keeps_16_bits: bool = False
    """Whether the backward casts input and weight again."""
    shares_inputs: bool = True
    """Whether maps of one input share its cast: joined in one map (Megatron), or found by the compiler (torchao)."""


RECIPES = {
    "te": Recipe(shares_inputs=False),
    "megatron": Recipe(weights_once=True),
    "megatron-current": Recipe(weights_once=True, finds_maxima=True),
    "megatron-mxfp8": Recipe(weights_once=True, in_blocks=True),
    "torchao": Recipe(finds_maxima=True, keeps_16_bits=True),
}
"""Delayed scaling of Transformer Engine alone and in Megatron; its current scaling and MXFP8; torchao's tensorwise."""
FP8_KINDS = tuple(RECIPES)


def cast_transposed(tape: Tape, name: str, x: Tensor, *, both: bool, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """An 8-bit copy, and its transpose where a product needs it: read once, written once or twice."""
    earlier = cast_before(tape, name, x, both=both) if recipe.shares_inputs else None
    if earlier is not None:
        return earlier
    if recipe.finds_maxima:
        ops.elementwise(tape, "fp8_maximum", (x,), 1, "fp32")
    part = None if x.storage is not None else WEIGHT_PART
    copy = tape.empty(x.elements, "fp8", part=part)
    turned = tape.empty(x.elements, "fp8", part=part) if both else None
    writes = (copy,) if turned is None else (copy, turned)
    scales = len(writes) * x.elements / MX_BLOCK if recipe.in_blocks else 0.0
    tape.kernel(name, Kind.MEMORY, (x,), writes, n_bytes=x.bytes + len(writes) * x.elements + scales)
    return copy, turned


def cast_before(tape: Tape, name: str, x: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None] | None:
    """The copies that a map of the same input, just before, has made of it."""
    if x.storage is None:
        return None
    for event in reversed(tape.events[-NEIGHBOURS:]):
        same = event.name == name and event.reads == (x.storage,) and event.phase is tape.phase
        if same and event.layer == tape.layer and len(event.writes) == 1 + both:
            first, *rest = (Tensor(x.elements, "fp8", storage) for storage in event.writes)
            return first, rest[0] if rest else None
    return None


def transposed(tape: Tape, weight: Tensor, *, made: bool | None = None) -> Tensor:
    """The transpose of a stored 8-bit weight: dropped with its last use, or kept for the step (`made`: whether now)."""
    if made is False:
        return Tensor(weight.elements, "fp8", None)
    turned = tape.empty(weight.elements, "fp8", part=None if made is None else WEIGHT_PART)
    tape.kernel("fp8_weight_transpose", Kind.MEMORY, (weight,), (turned,), n_bytes=2 * weight.elements)
    return turned


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
    tape: Tape,
    name: str,
    x: Tensor,
    weight: Tensor,
    *,
    k: int,
    n: int,
    kind: str,
    first: bool,
    stored: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T`` in 8 bits by one of `RECIPES`; `first` says whether this is a step's first micro-batch, `stored`
    whether the weight is in 8 bits already (its gradient has the dtype of `weight`)."""
    recipe, dtype = RECIPES[kind], x.dtype
    x_needs, weight_needs = x.needs_grad, weight.needs_grad
    ahead = not recipe.keeps_16_bits
    small_x, turned_x = cast_transposed(tape, "fp8_cast", x, both=ahead and tape.would_grad(weight), recipe=recipe)
    if stored:
        small_weight = Tensor(weight.elements, "fp8", None)
        keeps = weight_needs and tape.would_grad(x)
        turned_weight = transposed(tape, small_weight, made=first) if keeps else None
    elif first or not recipe.weights_once:
        both = ahead and tape.would_grad(x)
        small_weight, turned_weight = cast_transposed(tape, "fp8_weight_cast", weight, both=both, recipe=recipe)
    else:
        small_weight, turned_weight = (Tensor(weight.elements, "fp8", None) for _ in range(2))
    operands = (small_x, small_weight) if bias is None else (small_x, small_weight, bias)
    m = x.elements // k
    out = product_8bit(tape, name, operands, dtype, (m, n, k))
    if tape.would_grad(x, weight):
        tape.mark_saved()

    def operand(kept: Tensor | None, whole: Tensor, cast_name: str) -> Tensor:
        return kept or cast_transposed(tape, cast_name, whole, both=False, recipe=recipe)[0]

    def backward(grad: Tensor) -> Grads:
        to_bias = ops.elementwise(tape, f"{name}.bias", (grad,), n, dtype) if bias and bias.needs_grad else None
        small, turned = cast_transposed(tape, "fp8_cast", grad, both=weight_needs, recipe=recipe)
        to_x = to_weight = None
        if x_needs and stored:
            other = turned_weight or transposed(tape, small_weight)
            to_x = product_8bit(tape, name, (small, other), dtype, (m, k, n))
        elif x_needs:
            other = operand(turned_weight, weight, "fp8_weight_cast")
            to_x = product_8bit(tape, name, (small, other), dtype, (m, k, n))
        if turned is not None:
            other = operand(turned_x, x, "fp8_cast")
            to_weight = product_8bit(tape, name, (turned, other), weight.dtype, (n, k, m))
        for given in (to_x, to_weight):
            if given is not None:
                given.is_view = True
        return (to_x, to_weight, to_bias)[: 2 if bias is None else 3]

    needed = ((turned_weight or weight, x_needs), (turned_x or x, weight_needs))
    kept = tuple(tensor for tensor, is_needed in needed if is_needed)
    return tape.record(out, (x, weight) if bias is None else (x, weight, bias), backward, saves=kept)
