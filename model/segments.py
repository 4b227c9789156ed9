"""Parts of a step on both clocks, in which kernels are taken as evenly mixed.

Kernels of the layers are many and short, those of the output head and the loss few and long. A host that is behind
in the layers has caught up by the end of the head; mixed together the one would hide behind the other.
"""

from __future__ import annotations

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.operation import Kind, Operation, Phase

SEGMENTS = ("forward", "backward", "optimizer", "head")
"""A recomputation belongs to the backward; ``head`` is the forward's end, told with it."""
FORWARD, BACKWARD, OPTIMIZER_SEGMENT, HEAD = range(len(SEGMENTS))
SEGMENT_OF = {Phase.FORWARD: FORWARD, Phase.RECOMPUTE: BACKWARD, Phase.BACKWARD: BACKWARD}
SEGMENT_OF |= {Phase.OPTIMIZER: OPTIMIZER_SEGMENT}
MICRO_ORDER = (FORWARD, HEAD, BACKWARD)
"""Segments of every micro-step, in the order in which they run."""
HEAD_PRODUCT = "lm_head"


def segment_of(operation: Operation) -> int:
    """The segment an operation runs in."""
    last = operation.kind is Kind.LOSS or operation.name == HEAD_PRODUCT
    return HEAD if last and operation.phase is Phase.FORWARD else SEGMENT_OF[operation.phase]


def passes_of(micro_steps: float | Array) -> Array:
    """(..., segments): how often each segment runs in an optimizer step."""
    micro = np.asarray(micro_steps, dtype=float)
    passes = np.repeat(micro[..., None], len(SEGMENTS), axis=-1)
    passes[..., OPTIMIZER_SEGMENT] = 1.0
    return passes


def told(seconds: tuple[float, ...]) -> dict[str, float]:
    """Seconds by segment as a forecast tells them: the head's as part of the forward."""
    named = dict(zip(SEGMENTS, seconds, strict=True))
    named["forward"] += named.pop("head")
    return named
