"""Attention as plain matrix products: scores of every pair of tokens, an additive mask, a softmax in fp32.

Sources: transformers 5 ``eager_attention_forward`` (the same in every family) and ``eager_mask``; PyTorch's
``matmul``, which copies operands whose batch and heads cannot be seen as one dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model import primitives_routing as routing
from tunecast.model.operation import STRIDED
from tunecast.model.primitives_heavy import AttentionShape
from tunecast.model.tape import Grads, Tape, Tensor, widest


def folded(tape: Tape, x: Tensor, batch: int) -> Tensor:
    """Batch and heads as one dimension: a copy, unless there is one sample only; the gradient passes through."""
    return x if batch == 1 else ops.copy(tape, x, name="head_layout")


def batched_product(
    tape: Tape, name: str, a: Tensor, b: Tensor, sizes: tuple[int, int, int, int], *, b_transposed: bool
) -> Tensor:
    """`sizes` (matrices, m, n, k): a (m x k) times b per head; b is stored n x k if `b_transposed`.

    Backward, as ``bmm``: the second operand's gradient first, each of them only if needed.
    """
    count, m, n, k = sizes
    if tape.would_grad(a, b):
        tape.mark_saved()
    out = ops.gemm(tape, name, (a, b), (m, n, k, count), "nt" if b_transposed else "nn")

    def backward(grad: Tensor) -> Grads:
        to_a = to_b = None
        if b.needs_grad:
            to_b = ops.gradient_gemm(tape, name, grad, a, (k, n, m, count), "tn")
        if a.needs_grad:
            to_a = ops.gradient_gemm(tape, name, grad, b, (m, k, n, count), "nn" if b_transposed else "nt")
        return to_a, to_b

    kept = tuple(tensor for tensor, other in ((a, b), (b, a)) if other.needs_grad)
    return tape.record(out, (a, b), backward, saves=kept)


def per_query_head(tape: Tape, x: Tensor, shape: AttentionShape, *, laid_out: bool) -> Tensor:
    """Key or value heads repeated for their queries and folded with the batch; a single one is seen many times in the
    same memory."""
    groups, single = shape.heads // shape.kv_heads, shape.kv_heads == 1
    by_head = x if laid_out or (single and groups > 1) else ops.relayout(tape, x, name="head_layout")
    return ops.repeat_heads(tape, by_head, groups, single=single) if groups > 1 else by_head


def seen_apart(tape: Tape, x: Tensor, times: int, dtype: str) -> Tensor:
    """A copy for each time that a single head is seen in the same memory, in another dtype; nothing in its own."""
    if x.dtype == dtype:
        return x
    return seen_copies(tape, x, times, dtype)


def seen_copies(tape: Tape, x: Tensor, times: int, dtype: str) -> Tensor:
    """A copy for each time that a single head is seen in the same memory."""
    out = ops.elementwise(tape, "head_layout", (x,), times * x.elements, dtype, layout=STRIDED)
    return tape.record(out, (x,), lambda grad: (ops.cast_gradient(tape, grad, x.dtype, "head_layout"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What differs between runs and families."""

    autocast_dtype: str | None
    softmax_wide: bool = True
    """Whether the softmax is asked for in fp32; else it runs in the scores' dtype, which autocast widens."""
    softcap: bool = False
    """Whether scores are capped by a tanh (Gemma 2)."""
    dropout: float = 0.0
    """Of the weights."""
    sinks: Tensor | None = None
    """A score per head beside those of the keys (gpt-oss)."""
    by_head: bool = False
    """Whether queries and keys lie in memory head by head, so that batch and heads are one dimension (gpt-oss, GLM)."""
    values_laid_out: bool = False
    """Whether values are laid out by head where they are made, for several layers."""
    holds_mask: bool = False
    """Whether the mask is still there in the backward, as an argument of a checkpoint is."""


def capped(tape: Tape, scores: Tensor) -> Tensor:
    """Divided, tanh, multiplied: three kernels each way. Keeps the tanh."""
    divided = ops.scale(tape, scores, name="scores_cap")
    bent = ops.elementwise(tape, "scores_cap", (divided,), divided.elements, divided.dtype)
    if tape.would_grad(divided):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        return (ops.elementwise(tape, "scores_cap", (grad, bent), bent.elements, bent.dtype),)

    return ops.scale(tape, tape.record(bent, (divided,), backward, saves=(bent,)), name="scores_cap")


def attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    shape: AttentionShape,
    variant: Variant,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k' + mask) v, and its weights: length^2 scores per head in several copies, one in fp32."""
    batch, length, dim = shape.batch, shape.length, shape.head_dim
    count, groups = batch * shape.heads, shape.heads // shape.kv_heads
    single = shape.kv_heads == 1 < groups
    target = variant.autocast_dtype or q.dtype
    keys = per_query_head(tape, k, shape, laid_out=True)
    values = per_query_head(tape, v, shape, laid_out=variant.values_laid_out)

    def operand(x: Tensor, *, repeated: bool, single: bool = False) -> Tensor:
        if single and (batch > 1 or x.dtype != target):
            return seen_copies(tape, x, groups, target)
        cast = ops.cast(tape, x, target)
        return cast if repeated else folded(tape, cast, batch)

    rows = operand(q, repeated=variant.by_head)
    columns = operand(keys, repeated=groups > 1 or variant.by_head, single=single)
    scores = batched_product(tape, "scores", rows, columns, (count, length, length, dim), b_transposed=True)
    scaled = ops.scale(tape, scores, name="scores_scale")
    if variant.softcap:
        scaled = capped(tape, scaled)
    masked = ops.elementwise(tape, "scores_mask", (scaled, mask), scaled.elements, widest((scaled.dtype, mask.dtype)))
    masked = tape.record(masked, (scaled,), lambda grad: (grad,), saves=(mask,) if variant.holds_mask else ())
    narrow, kept = weights_of(tape, masked, q.dtype, variant, count * length)
    narrow = ops.dropout(tape, narrow, variant.dropout)
    tape.hold(masked)
    mixed = batched_product(
        tape,
        "values",
        ops.cast(tape, narrow, target),
        operand(values, repeated=groups > 1, single=single),
        (count, length, dim, length),
        b_transposed=False,
    )
    out = unfolded(tape, mixed, batch)
    tape.hold(keys, values, narrow, *kept)
    return out, narrow


def weights_of(
    tape: Tape, masked: Tensor, dtype: str, variant: Variant, rows: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention weights of each row of scores, and what the code still holds of their making."""
    if variant.sinks is not None:
        return with_sinks(tape, masked, variant.sinks, rows)
    if not variant.softmax_wide:
        wanted = None if variant.autocast_dtype is None else "fp32"
        weights = routing.softmax(tape, masked, name="softmax", dtype=wanted)
        return ops.cast(tape, weights, dtype, name="softmax_cast"), ()
    weights = routing.softmax(tape, masked, name="softmax", dtype="fp32")
    return ops.cast(tape, weights, dtype, name="softmax_cast"), ()


def with_sinks(tape: Tape, masked: Tensor, sinks: Tensor, rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Scores and sink side by side, the row's largest subtracted, a softmax in their own dtype, the sink cut off."""
    name = "scores_sink"
    both = ops.elementwise(tape, name, (masked, sinks), masked.elements + rows, masked.dtype, layout=STRIDED)

    def apart(grad: Tensor) -> Grads:
        to_scores = Tensor(masked.elements, grad.dtype, grad.storage, is_view=True)
        if not sinks.needs_grad:
            return to_scores, None
        last = Tensor(rows, grad.dtype, grad.storage)
        return to_scores, ops.elementwise(tape, name, (last,), sinks.elements, grad.dtype)

    both = tape.record(both, (masked, sinks), apart)
    largest, _ = routing.top_k(tape, both, rows)
    shifted = ops.elementwise(tape, name, (both, largest), both.elements, both.dtype)

    def back(grad: Tensor) -> Grads:
        negative = ops.elementwise(tape, name, (grad,), grad.elements, grad.dtype)
        return grad, ops.elementwise(tape, name, (negative,), rows, grad.dtype)

    shifted = tape.record(shifted, (both, largest), back)
    weights = routing.softmax(tape, shifted, name="softmax")
    return ops.part(tape, weights, masked.elements, name=name), (shifted, weights)


def gradient_folded(tape: Tape, x: Tensor, batch: int) -> Tensor:
    """What a product over batch and heads made, whose gradient is copied to be one dimension of them again."""

    def backward(grad: Tensor) -> Grads:
        return (folded(tape, grad, batch),)

    return tape.record(Tensor(x.elements, x.dtype, x.storage), (x,), backward)


def unfolded(tape: Tape, mixed: Tensor, batch: int) -> Tensor:
    """Back to (batch, length, heads x dim): a copy; its gradient is copied too, unless there is one sample only."""
    out = ops.elementwise(tape, "head_layout", (mixed,), mixed.elements, mixed.dtype, layout=STRIDED)

    def backward(grad: Tensor) -> Grads:
        if batch == 1:
            return (grad,)
        return (ops.elementwise(tape, "head_layout", (grad,), grad.elements, grad.dtype, layout=STRIDED),)

    return tape.record(out, (mixed,), backward)
