"""What families with attention of their own share among their layers: masks, and slopes instead of positions.

Sources: transformers 5 ``build_alibi_tensor`` (BLOOM), ``build_mpt_alibi_tensor``, ``masking_utils``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.attention_eager import additive_mask, causal_mask
from tunecast.model.context import Step
from tunecast.model.tape import Tensor


def own_mask(step: Step, kind: str) -> Tensor:
    """The mask of families with attention of their own: booleans (Falcon), numbers (BLOOM), both (MPT)."""
    tape, batch, length = step.tape, step.run.per_device_train_batch_size, step.run.max_length
    if kind == "falcon":
        return causal_mask(tape, batch, length)
    mask = additive_mask(tape, batch, length, step.stream_dtype, sliding=False)
    return ops.cast(tape, mask, "bool", name="mask.cast") if kind == "mpt" else mask


def alibi_table(step: Step, dtype: str) -> Tensor | None:
    """Slopes times distances: of every token in the stream's `dtype` (BLOOM), of every position in fp32 (MPT)."""
    tape, kind, architecture = step.tape, step.architecture.alibi, step.architecture
    heads, length = architecture.groups[0].layer.attention.num_heads, step.run.max_length
    if kind == "bloom":
        base = ops.elementwise(tape, "alibi.base", (), 1, "fp32")
        powers = ops.elementwise(tape, "alibi.arange", (), heads, "fp32")
        slopes = ops.elementwise(tape, "alibi.power", (base, powers), heads, "fp32")
        places = ops.elementwise(tape, "alibi.arange", (), length, "int64")
        table = ops.elementwise(tape, "alibi.outer", (slopes, places), heads * length, "fp32")
        batch = step.run.per_device_train_batch_size
        table = ops.elementwise(tape, "alibi.repeat", (table,), batch * heads * length, "fp32")
        return ops.cast(tape, table, dtype, name="alibi.cast")
    if kind == "mpt":
        limit = architecture.max_position or length
        places = ops.elementwise(tape, "alibi.arange", (), limit, "fp32")
        slopes = ops.elementwise(tape, "alibi.arange", (), heads, "int64")
        for name in ("cast", "scale", "power", "reciprocal", "scale"):
            slopes = ops.elementwise(tape, f"alibi.{name}", (slopes,), heads, "fp32")
        return ops.elementwise(tape, "alibi.outer", (places, slopes), heads * limit, "fp32")
    return None
