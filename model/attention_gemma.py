"""Attention of Gemma 4: norms of queries, keys and values, and values that may be the keys' own projection.

Layers without a window have wider heads and fewer of keys and values than those with one.
Source: transformers 5 ``modeling_gemma4.py``, ``Gemma4TextAttention``.
"""

from __future__ import annotations

from tunecast.model.architecture import Layer
from tunecast.model.attention_blocks import mixed_heads, needs_mask, projector, rotary, values_for_all
from tunecast.model.context import Step, Tables
from tunecast.model.norms import norm, plain_norm
from tunecast.model.shapes import STORED
from tunecast.model.tape import Tensor

KIND = "gemma4"
SHARED = 3
"""Linear maps of attention where keys and values share one."""


def gemma_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Queries projected, normalised and rotated; then keys and values, unless an earlier layer has made them; fused
    attention; the output projection."""
    block, tape = layer.attention, step.tape
    inward = block.linears[:-1]
    mask = tables.mask_of(block.window) if needs_mask(block, step.run) else None
    project = projector(step, where, inward, x)
    waves = tables.waves[-1 if block.window is None else 0]

    def turned(name: str, heads: Tensor) -> Tensor:
        normed = norm(step, layer.norm, f"{where}.{name}", heads, block.head_dim)
        made = rotary(step, normed, waves)
        tape.hold(normed)
        return made

    q = turned("q_norm", project(inward[0]))
    if block.reuses_keys:
        k, v = step.stored_keys[block.window]
    else:
        keys = project(inward[1])
        values = keys if len(block.linears) == SHARED else project(inward[2])
        k = turned("k_norm", keys)
        v = plain_norm(step, values, block.head_dim)
        tape.hold(keys, values)
    if block.keys == STORED:
        v = values_for_all(step, block, v, mask)
        step.stored_keys[block.window] = k, v
    mixed = mixed_heads(step, where, block, q, k, v, mask)
    out = projector(step, where, block.linears[-1:], mixed)(block.linears[-1])
    tape.hold(q, k, v, mixed)
    return out
