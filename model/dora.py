"""Weight-decomposed adapters (DoRA) as PEFT runs them.

The adapted weight is made in every forward, B A of an identity matrix added to the base's, for its norm by output,
which no gradient passes; the base's result and the adapter's are then weighed by the trained magnitude over that norm.
Source: peft ``tuners/lora/dora.py``. Required FLOPs leave the product B A out, executed ones have it.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Linear
from tunecast.model.context import Step
from tunecast.model.products import operands, product
from tunecast.model.tape import Grads, Tape, Tensor, widest


def adapted_result(step: Step, where: str, linear: Linear, entry: Tensor, result: Tensor) -> Tensor:
    """The base's result with the adapter's: result + (m - 1) result + m scaling B(A(x)), m being broadcast.

    With dropout the weighed result is another one, of the dropped input and without bias.
    """
    tape, run = step.tape, step.run
    down = step.adapter(f"{where}.{linear.name}.lora_A", run.lora_r * linear.in_features)
    up = step.adapter(f"{where}.{linear.name}.lora_B", linear.out_features * run.lora_r)
    dropped = ops.dropout(tape, entry, run.lora_dropout)
    weight, norm, made = weight_norm(step, where, linear, (down, up), entry.dtype)
    magnitude = step.adapter(f"{where}.{linear.name}.magnitude", linear.out_features)
    ratio = divided(tape, magnitude, norm)
    delta = low_rank(step, linear, dropped, down, up)
    unbiased = result
    if run.lora_dropout > 0:
        unbiased = product(step, linear.name, dropped, weight, k=linear.in_features, n=linear.out_features)
    elif linear.bias:
        bias = step.run.dtype  # in fp32 also where autocast leaves results in 16 bits
        unbiased = ops.elementwise(tape, "dora.sub", (result,), result.elements, widest((result.dtype, bias)))
        tape.record(unbiased, (result,), lambda grad: (ops.cast_gradient(tape, grad, result.dtype, "dora.sub"),))
    rest = ops.shift(tape, ratio, name="dora.sub")
    base = ops.multiply(tape, unbiased, rest, name="dora.mul")
    low = ops.scale(tape, ops.multiply(tape, delta, ratio, name="dora.mul"), name="dora.scale")
    extra = ops.add(tape, base, low, name="dora.add")
    tape.hold(*made, weight, norm, delta, unbiased, dropped)
    return ops.add(tape, result, extra, name="adapter_add")


def low_rank(step: Step, linear: Linear, entry: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """B(A(x))."""
    rank = step.run.lora_r
    low = product(step, f"{linear.name}.lora_A", entry, down, k=linear.in_features, n=rank)
    return product(step, f"{linear.name}.lora_B", low, up, k=rank, n=linear.out_features)


def weight_norm(
    step: Step, where: str, linear: Linear, factors: tuple[Tensor, Tensor], dtype: str
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The base's weight, the norm of each output's adapted weights, and what is held until the layer is done."""
    tape, size = step.tape, linear.weight_params
    made = ops.elementwise(tape, "dora.eye", (), linear.in_features**2, factors[0].dtype)
    eye, _ = operands(step, made, factors[0])
    low = product(step, f"{linear.name}.lora_A", eye, factors[0], k=linear.in_features, n=step.run.lora_r)
    adapted = product(step, f"{linear.name}.lora_B", low, factors[1], k=step.run.lora_r, n=linear.out_features)
    tape.hold(made)
    wide = ops.cast(tape, adapted, dtype, name="dora.cast")
    weight = base_weight(step, where, linear, dtype)
    scaled = ops.elementwise(tape, "dora.scale", (wide,), size, dtype)
    total = ops.elementwise(tape, "dora.add", (weight, scaled), size, dtype)
    tape.hold(scaled)
    norm = ops.elementwise(tape, "dora.norm", (total,), linear.out_features, dtype)
    return weight, norm, (wide, *((eye, low) if tape.grad_enabled else ()))


def base_weight(step: Step, where: str, linear: Linear, dtype: str) -> Tensor:
    """The frozen weight in the adapter's dtype, restored from 4 bits first where it is stored so."""
    if step.run.bnb_4bit_quant_type is None:
        weight = Tensor(linear.weight_params, step.run.dtype, None)
        return ops.cast(step.tape, weight, dtype, name="dora.cast")
    nested, compute = step.run.double_quant, step.run.four_bit_dtype
    restored, made = heavy.dequantized(step.tape, linear.weight_params, compute, nested=nested, in_place=True)
    step.tape.hold(*made)
    return ops.cast(step.tape, restored, dtype, name="dora.cast")


def divided(tape: Tape, magnitude: Tensor, norm: Tensor) -> Tensor:
    """Magnitude over norm, which is a constant to the backward: gradient over norm.

    In the wider dtype of both: a map's input in fp32, as of norms under autocast, makes that of 16-bit adapters fp32.
    """
    if tape.would_grad(magnitude):
        tape.mark_saved()
    out = ops.elementwise(
        tape, "dora.div", (magnitude, norm), magnitude.elements, widest((magnitude.dtype, norm.dtype))
    )

    def backward(grad: Tensor) -> Grads:
        divided = ops.elementwise(tape, "dora.div", (grad, norm), grad.elements, grad.dtype)
        return (ops.cast_gradient(tape, divided, magnitude.dtype, "dora.div"),)

    return tape.record(out, (magnitude,), backward, saves=(norm,))
