"""LFM2's short convolution in place of attention: one map makes two gates and what they let through.

Source: transformers 5 ``modeling_lfm2.py``, ``Lfm2ShortConv`` with its PyTorch fallback of ``causal_conv1d_fn``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_delta as kernels
from tunecast.model import primitives_gpt as gpt
from tunecast.model.architecture import Layer
from tunecast.model.attention_qwen import turned_map
from tunecast.model.context import Step, Tables
from tunecast.model.linears import linear_map
from tunecast.model.masks import zeroed_padding
from tunecast.model.tape import Tensor


def convolved_block(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """The map, the gated input, the convolution over a few tokens, its gated output, the output projection."""
    del tables
    block, tape = layer.attention, step.tape
    short = block.convolution
    assert short is not None
    to_parts, to_output = block.linears
    whole = turned_map(step, where, to_parts, zeroed_padding(step, x))
    entry, leave, value = gpt.split(tape, whole, (step.tokens * short.channels,) * 3, name="gate_split")
    gated = ops.multiply(tape, entry, value, name="gate")
    weight = step.weight(f"{where}.conv", short.params)
    given = ops.cast(tape, gated, weight.dtype, name="convolution_cast")
    values, taps = (ops.cast(tape, each, step.autocast_dtype or each.dtype) for each in (given, weight))
    padding = step.run.per_device_train_batch_size * (short.kernel - 1)
    made = kernels.causal_convolution(tape, values, taps, short.channels * (step.tokens + padding))
    cut = ops.part(tape, made, gated.elements, name="convolution")
    convolved = ops.cast(tape, cut, gated.dtype, name="convolution_cast")
    mixed = ops.multiply(tape, leave, convolved, name="gate")
    out = linear_map(step, where, to_output, mixed)
    tape.hold(whole, convolved, mixed)
    return out
