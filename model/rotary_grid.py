"""Rotary tables of positions in time, row and column, of which text alone gives three equal ones.

Sources: transformers 5 ``modeling_qwen3_5.py``, ``Qwen3_5TextRotaryEmbedding`` (Qwen3-VL's is the same), and
``modeling_qwen2_5_vl.py``, ``Qwen2_5_VLRotaryEmbedding`` (Qwen2-VL's).
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.architecture import Attention
from tunecast.model.context import Step
from tunecast.model.family_grid import GRIDS
from tunecast.model.operation import Kind
from tunecast.model.tape import Tensor


def grid_waves(step: Step, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
    """cos and sin of every sample's positions, in the stream's dtype: made for all three kinds, then those of rows and
    columns written over some of the first kind's."""
    tape, tokens = step.tape, step.tokens
    half = (attention.rotary_dim or attention.head_dim) // 2
    floats = ops.elementwise(tape, "positions.cast", (positions,), GRIDS * tokens, "fp32")
    inverse = Tensor(half, "fp32", None)
    angles = ops.elementwise(tape, "positions.outer", (floats, inverse), GRIDS * tokens * half, "fp32")
    made = []
    for name in ("cos", "sin"):
        wave = ops.elementwise(tape, f"positions.{name}", (angles,), angles.elements, "fp32")
        made.append(ops.elementwise(tape, f"positions.{name}", (wave,), angles.elements, "fp32"))
    cos, sin = made
    sin, cos = (recomposed(step, wave, half, attention) for wave in (sin, cos))
    tape.hold(*made, angles)
    narrow = [ops.cast(tape, wave, step.stream_dtype, name="positions.cast") for wave in (cos, sin)]
    return narrow[0], narrow[1]


def recomposed(step: Step, wave: Tensor, half: int, attention: Attention) -> Tensor:
    """One table out of three, twice side by side: joined of their parts, or the first with two parts written over."""
    tape, tokens = step.tape, step.tokens
    first = Tensor(tokens * half, wave.dtype, wave.storage)
    if attention.sections_joined:
        first = ops.elementwise(tape, "positions.cat", (first,), first.elements, wave.dtype)
    for count in () if attention.sections_joined else attention.sections:
        place = Tensor(tokens * count, wave.dtype, wave.storage)
        tape.kernel("positions.write", Kind.MEMORY, (place,), (place,))
    return ops.elementwise(tape, "positions.cat", (first, first), 2 * first.elements, wave.dtype)
