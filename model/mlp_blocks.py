"""Feed-forward blocks.

Source: transformers 5 ``modeling_llama.py`` and its relatives.
"""

from __future__ import annotations

from tunecast.model import fused, fused_lora
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model.architecture import Layer, Linear
from tunecast.model.context import Step
from tunecast.model.joined import JOINED
from tunecast.model.linears import linear_map
from tunecast.model.tape import Tensor


def mlp_block(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """Gated: down(act(gate(x)) * up(x)), with gate and up as halves of one product where they are fused."""
    return dense_block(step, where, layer, x, layer.mlp.linears)


def dense_block(step: Step, where: str, layer: Layer, x: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """The block of these linear maps."""
    if not layer.mlp.gated:
        return plain_mlp_block(step, where, layer, x)
    if layer.mlp.activation == "silu" and fused_lora.covers_mlp(step, linears):
        return fused_lora.mlp(step, where, linears, x)
    tape, to_down = step.tape, linears[-1]
    if len(linears) == 2:
        both = linear_map(step, where, linears[0], x)
        if step.run.fuses("swiglu") and layer.attention.qkv_split == JOINED:
            inner = fused.swiglu_of_both(tape, both)
        else:
            gate, up = ops.chunks(tape, both, 2, name="gate_split")
            inner = ops.multiply(tape, up, ops.activation(tape, gate, name="swiglu"), name="swiglu")
    elif step.run.fuses("swiglu"):
        gate, up = (linear_map(step, where, linear, x) for linear in linears[:2])
        inner = fused.swiglu(tape, gate, up)
    else:
        to_gate, to_up, _ = linears
        gated = ops.activation(tape, linear_map(step, where, to_gate, x), name="swiglu")
        inner = ops.multiply(tape, gated, linear_map(step, where, to_up, x), name="swiglu")
    out = linear_map(step, where, to_down, inner)
    step.tape.hold(inner)
    return out


def plain_mlp_block(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """No gate: down(act(up(x)))."""
    to_up, to_down = layer.mlp.linears
    inner = activated(step, layer.mlp.activation, linear_map(step, where, to_up, x))
    out = linear_map(step, where, to_down, inner)
    step.tape.hold(inner)
    return out


def activated(step: Step, activation: str, x: Tensor) -> Tensor:
    """The activation alone, as many kernels as the real code runs."""
    if activation == "gelu_new":
        wide = step.autocast_dtype is not None and step.platform == "cuda"
        return gpt.gelu_new(step.tape, x, wide=wide, name="gelu_new")
    if activation == "bloom_gelu":
        return gpt.bloom_gelu(step.tape, x, name="bloom_gelu")
    if activation == "relu2":
        return relu_squared(step, x)
    if activation == "relu":
        return gpt.relu(step.tape, x, name="relu")
    return ops.activation(step.tape, x, name=activation)


def relu_squared(step: Step, x: Tensor) -> Tensor:
    """The square of what is above zero; its module has all three by name until it returns."""
    above = gpt.relu(step.tape, x, name="relu")
    out = ops.square(step.tape, above, name="square")
    step.tape.hold(x, above)
    return out
