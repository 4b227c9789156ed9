"""Linear maps and their adapters in one autograd function: queries, keys and values, the output map, the MLP.

Source: Unsloth ``kernels/fast_lora.py`` and ``utils.py`` (``matmul_lora``, ``fast_dequantize``), which axolotl
(``kernels/lora.py``) and fms-acceleration (``fused_ops/unsloth_lora``) follow. What changes against PEFT's layers:

* no cast, copy or scaling of activations: the scale goes into the small factor, the result is added in place;
* the backward multiplies the adapters' factors with the gradient anew, so a low-rank product is never kept;
* the gradient of the input overwrites the input (not over a GPTQ base);
* dropout keeps the dropped input and no mask: a comparison with zero stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunecast.model import fused
from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Linear
from tunecast.model.context import Step
from tunecast.model.operation import Kind
from tunecast.model.quantized import dequantized, is_gptq
from tunecast.model.tape import Grads, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """One linear map with its adapter."""

    linear: Linear
    down: Tensor
    up: Tensor


def map_of(step: Step, where: str, linear: Linear) -> Map:
    """The map and its two trained factors."""
    name, rank = f"{where}.{linear.name}", step.run.lora_r
    down = step.adapter(f"{name}.lora_A", rank * linear.in_features)
    return Map(linear=linear, down=down, up=step.adapter(f"{name}.lora_B", linear.out_features * rank))


def covers(step: Step, linears: Sequence[Linear]) -> bool:
    """Whether these maps run as one function: kernels asked for, and an adapter on every one."""
    return step.run.fuses("lora") and all(linear.name in step.run.lora_target_modules for linear in linears)


def covers_mlp(step: Step, linears: Sequence[Linear]) -> bool:
    """Whether the whole gated block runs as one function; with dropout it does not (Unsloth, axolotl)."""
    return covers(step, linears) and len(linears) == 3 and step.run.lora_dropout == 0.0


def base_weight(step: Step, linear: Linear) -> tuple[Tensor, str, str]:
    """The base weight in 16 bits, and the layouts of the forward's and the backward's product with it."""
    k, n, tape = linear.in_features, linear.out_features, step.tape
    if is_gptq(step.run):
        return dequantized(tape, linear, step.run), "nn", "nt"
    if step.run.base_quantization is None:
        return Tensor(k * n, step.run.dtype, None), "nt", "nn"
    nested = step.run.double_quant
    weight, _ = heavy.dequantized(tape, n * k, step.run.four_bit_dtype, nested=nested, in_place=True)
    return weight, "nt", "nn"


def factors(step: Step, one: Map, dtype: str) -> tuple[Tensor, Tensor]:
    """Both factors in the activations' dtype, the second one scaled: small kernels."""
    down, up = (ops.elementwise(step.tape, "adapter_cast", (f,), f.elements, dtype) for f in (one.down, one.up))
    return down, ops.elementwise(step.tape, "adapter_scale", (up,), up.elements, dtype)


def dropped_input(step: Step, x: Tensor) -> Tensor:
    """The input after dropout, whose mask is let go."""
    if step.run.lora_dropout == 0.0:
        return x
    out, mask = step.tape.empty(x.elements, x.dtype), step.tape.empty(x.elements, "bool")
    step.tape.kernel("dropout", Kind.MEMORY, (x,), (out, mask))
    return out


def forward_map(step: Step, one: Map, x: Tensor) -> tuple[Tensor, Tensor]:
    """``x W + (dropped x A) (s B)``, and the dropped input."""
    tape, linear, rank = step.tape, one.linear, step.run.lora_r
    k, n, m = linear.in_features, linear.out_features, x.elements // linear.in_features
    weight, layout, _ = base_weight(step, linear)
    out = ops.gemm(tape, linear.name, (x, weight), (m, n, k), layout)
    dropped = dropped_input(step, x)
    down, up = factors(step, one, x.dtype)
    low = ops.gemm(tape, f"{linear.name}.lora_A", (dropped, down), (m, rank, k), "nt")
    delta = ops.gemm(tape, f"{linear.name}.lora_B", (low, up), (m, n, rank), "nt")
    tape.kernel("adapter_add", Kind.MEMORY, (out, delta), (out,))
    if linear.bias:
        tape.kernel(f"{linear.name}.bias", Kind.MEMORY, (out,), (out,))
    return out, dropped


def factor_gradients(step: Step, one: Map, dropped: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of A and B: two products each, and a scaling."""
    tape, linear, rank = step.tape, one.linear, step.run.lora_r
    k, n, m = linear.in_features, linear.out_features, grad.elements // linear.out_features
    down, up = factors(step, one, grad.dtype)
    names = f"{linear.name}.lora_A", f"{linear.name}.lora_B"
    through = ops.gemm(tape, names[1], (grad, up), (m, rank, n), "nn")
    to_down = ops.gemm(tape, names[0], (dropped, through), (k, rank, m), "tn")
    low = ops.gemm(tape, names[0], (down, dropped), (rank, m, k), "nt")
    to_up = ops.gemm(tape, names[1], (low, grad), (rank, n, m), "nn")
    for given in (to_down, to_up):
        tape.kernel("adapter_scale", Kind.MEMORY, (given,), (given,))
    return to_down, to_up


def add_input_gradient(
    step: Step, one: Map, dropped: Tensor, grad: Tensor, to_x: Tensor | None, x: Tensor | None = None
) -> Tensor:
    """``grad W' + (dropped != 0) (grad B') (s A')`` added to `to_x`; the first one into x's memory where given."""
    tape, linear, rank = step.tape, one.linear, step.run.lora_r
    k, n, m = linear.in_features, linear.out_features, grad.elements // linear.out_features
    weight, _, layout = base_weight(step, linear)
    flops, shape = ops.gemm_flops(m, k, n), (m, k, n)
    out = x if x is not None and to_x is None else tape.empty(m * k, grad.dtype)
    tape.kernel(
        linear.name, Kind.GEMM, (grad, weight), (out,), flops=flops, shape=shape, layout=layout, dtype=out.dtype
    )
    if to_x is not None:
        tape.kernel("grad_add", Kind.MEMORY, (to_x, out), (to_x,))
        out = to_x
    down, up = factors(step, one, grad.dtype)
    low = ops.gemm(tape, f"{linear.name}.lora_B", (grad, up), (m, rank, n), "nn")
    delta = ops.gemm(tape, f"{linear.name}.lora_A", (low, down), (m, k, rank), "nn")
    if step.run.lora_dropout:
        kept = ops.elementwise(tape, "dropout", (dropped,), m * k, "bool")
        delta = ops.elementwise(tape, "dropout", (kept, delta), m * k, delta.dtype)
    tape.kernel("adapter_add", Kind.MEMORY, (out, delta), (out,))
    return out


def maps(step: Step, where: str, linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """Several maps of one input: every output has a node, and the last one that runs does the backward of all."""
    tape, group = step.tape, [map_of(step, where, linear) for linear in linears]
    given = ops.cast(tape, x, step.activation_dtype)
    outs, dropped = zip(*(forward_map(step, one, given) for one in group), strict=True)
    trained = [factor for one in group for factor in (one.down, one.up)]
    if tape.would_grad(given, *trained):
        tape.mark_saved()
    waiting: list[Tensor] = []

    def wait(grad: Tensor) -> Grads:
        waiting.append(grad)
        return (None, None)

    def backward(grad: Tensor) -> Grads:
        grads = [grad, *reversed(waiting)]
        made = [factor_gradients(step, *each) for each in zip(group, dropped, grads, strict=True)]
        to_x: Tensor | None = None
        if given.needs_grad:
            over = given if len(group) > 1 and not is_gptq(step.run) else None
            for one, part, one_grad in zip(group, dropped, grads, strict=True):
                to_x = add_input_gradient(step, one, part, one_grad, to_x, over)
            to_x = fused.overwritten(to_x) if to_x is not None else None
        return (to_x, *(g for pair in made for g in pair))

    first = tape.record(outs[0], (given, *trained), backward, saves=(given, *dropped))
    return [first, *(tape.record(out, (given, trained[0]), wait) for out in outs[1:])]


def mlp(step: Step, where: str, linears: Sequence[Linear], x: Tensor) -> Tensor:
    """down(silu(gate) * up) with three adapters; keeps x, gate and up, which the backward overwrites."""
    tape, group = step.tape, [map_of(step, where, linear) for linear in linears]
    to_gate, to_up, to_down = group
    given = ops.cast(tape, x, step.activation_dtype)
    gate, _ = forward_map(step, to_gate, given)
    up, _ = forward_map(step, to_up, given)
    inner = ops.elementwise(tape, "swiglu", (gate, up), gate.elements, gate.dtype)
    out, _ = forward_map(step, to_down, inner)
    trained = [factor for one in group for factor in (one.down, one.up)]
    if tape.would_grad(given, *trained):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        to_inner = add_input_gradient(step, to_down, gate, grad, None)
        tape.kernel("swiglu", Kind.MEMORY, (to_inner, gate, up), (to_inner, gate, up))
        again, grad_up, grad_gate = to_inner, gate, up  # the kernel leaves the product and both gradients there
        pairs = {to_down.linear.name: factor_gradients(step, to_down, again, grad)}
        pairs[to_up.linear.name] = factor_gradients(step, to_up, given, grad_up)
        pairs[to_gate.linear.name] = factor_gradients(step, to_gate, given, grad_gate)
        to_x = None
        if given.needs_grad:
            over = None if is_gptq(step.run) else given
            to_x = add_input_gradient(step, to_up, given, grad_up, None, over)
            to_x = fused.overwritten(add_input_gradient(step, to_gate, given, grad_gate, to_x))
        return (to_x, *(g for one in group for g in pairs[one.linear.name]))

    return tape.record(out, (given, *trained), backward, saves=(given, gate, up))
