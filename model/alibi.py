"""What families with attention of their own share among their layers: slopes instead of positions.

Sources: transformers 5 ``build_alibi_tensor`` (BLOOM), ``build_mpt_alibi_tensor``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.tape import Tensor


def counted_tokens(step: Step, told: Tensor) -> Tensor:
    """Index of every token among those that `told`, ones and zeros, says are none of padding, in its dtype."""
    counts = ops.elementwise(step.tape, "positions.cumsum", (told,), step.tokens, told.dtype)
    less_one = ops.elementwise(step.tape, "positions.shift", (counts,), step.tokens, told.dtype)
    return ops.elementwise(step.tape, "positions.multiply", (less_one, told), step.tokens, told.dtype)


def bloom_slopes(step: Step, heads: int) -> Tensor:
    """Powers of one base for as many heads as the power of two below them, and of another for the others."""
    tape, of_two = step.tape, 1 << heads.bit_length() - 1
    parts = []
    for count in filter(None, (of_two, heads - of_two)):
        base = ops.elementwise(tape, "alibi.base", (), 1, "fp32")
        powers = ops.elementwise(tape, "alibi.arange", (), count, "int32")
        parts.append(ops.elementwise(tape, "alibi.power", (base, powers), count, "fp32"))
    return parts[0] if len(parts) == 1 else ops.elementwise(tape, "alibi.cat", parts, heads, "fp32")


def alibi_table(step: Step, dtype: str) -> Tensor | None:
    """Slopes times distances: of every token in the stream's `dtype` (BLOOM), of every position in fp32 (MPT)."""
    tape, kind, architecture = step.tape, step.architecture.alibi, step.architecture
    heads, length = architecture.groups[0].layer.attention.num_heads, step.run.max_length
    if kind == "bloom":
        slopes = bloom_slopes(step, heads)
        if step.run.has_padding:
            places = counted_tokens(step, Tensor(step.tokens, "int64", None))
            table = ops.elementwise(tape, "alibi.outer", (slopes, places), heads * step.tokens, "fp32")
        else:
            places = ops.elementwise(tape, "alibi.arange", (), length, "int64")
            table = ops.elementwise(tape, "alibi.outer", (slopes, places), heads * length, "fp32")
            table = ops.elementwise(tape, "alibi.repeat", (table,), heads * step.tokens, "fp32")
        return ops.cast(tape, table, dtype, name="alibi.cast")
    if kind == "mpt":
        limit = architecture.max_position or length
        places = ops.elementwise(tape, "alibi.arange", (), limit, "fp32")
        slopes = ops.elementwise(tape, "alibi.arange", (), heads, "int64")
        for name in ("cast", "scale", "power", "reciprocal", "scale"):
            slopes = ops.elementwise(tape, f"alibi.{name}", (slopes,), heads, "fp32")
        return ops.elementwise(tape, "alibi.outer", (places, slopes), heads * limit, "fp32")
    return None
