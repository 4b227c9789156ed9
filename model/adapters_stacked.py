"""LoRA on stacked parameters: PEFT adds the product of the factors to the whole weight in every forward pass.

So every expert's weight is made anew, routed to or not, and the backward makes a gradient of that size.
Source: peft 0.21 ``tuners/lora/layer.py`` (``ParamWrapper``, ``_LoraFactorsProxy``) and
``torch/nn/utils/parametrize.py``, which computes a parametrized weight once on registration and once on use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.operation import Kind
from tunecast.model.primitives import gemm_flops, gradient_gemm
from tunecast.model.shapes import FUSED_PARAMETER, Experts
from tunecast.model.tape import Grads, Tensor

PARTS = {"down": "experts.down_proj", "up": f"experts.{FUSED_PARAMETER}"}
"""Stacked parameters, the outer wrapper first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The two factors of an adapter in the weight's dtype, one matrix each per expert."""

    up: Tensor
    down: Tensor
    shape: tuple[int, int, int]
    """(rows of all experts, columns, rank) of their product."""
    made: list[Tensor] = field(default_factory=list)
    """The weights made of them, which PEFT keeps until the experts are done."""


def prepared_factors(step: Step, where: str, experts: Experts) -> dict[str, Factors]:
    """Factors of every adapted part, cast to the base's dtype; each product is computed once without use."""
    found: dict[str, Factors] = {}
    for part, name in PARTS.items():
        if name not in step.run.lora_target_modules:
            continue
        count, into, out, times = experts.parameter_shapes[name]
        rank = times * step.run.lora_r
        up = step.adapter(f"{where}.{name}.lora_B", count * rank * out)
        down = step.adapter(f"{where}.{name}.lora_A", count * rank * into)
        by_expert = ops.relayout(step.tape, up, name="adapter_layout")
        found[part] = Factors(
            up=ops.cast(step.tape, by_expert, step.run.dtype, name="adapter_cast"),
            down=ops.cast(step.tape, down, step.run.dtype, name="adapter_cast"),
            shape=(count * out, into, rank),
        )
        product_onto(step, part, Tensor(count * into * out, step.run.dtype, None), found[part])
    return found


def product_onto(step: Step, part: str, weight: Tensor, factors: Factors) -> Tensor:
    """``baddbmm``: the weight plus the product of the factors, expert by expert, in new memory."""
    out = step.tape.empty(weight.elements, weight.dtype)
    m, n, k = factors.shape
    reads = (weight, factors.up, factors.down)
    flops = gemm_flops(m, n, k)
    name = f"experts.{part}.fold"
    step.tape.kernel(name, Kind.GEMM, reads, (out,), flops=flops, shape=(m, n, k), layout="nn", dtype=out.dtype)
    return out


def folded(step: Step, part: str, weight: Tensor, factors: Factors) -> Tensor:
    """The weight with its adapter; backward: a product for each factor with the whole weight's gradient."""
    tape, (m, n, k) = step.tape, factors.shape
    if tape.would_grad(factors.up, factors.down):
        tape.mark_saved()
    out = product_onto(step, part, weight, factors)
    name, matrices = f"experts.{part}.fold", factors.down.elements // (n * k)

    def backward(grad: Tensor) -> Grads:
        to_up = gradient_gemm(tape, name, grad, factors.down, (m, k, n), "nt")
        to_down = gradient_gemm(tape, name, grad, factors.up, (matrices * k, n, m // matrices), "tn")
        return to_up, to_down

    factors.made.append(out)
    return tape.record(out, (factors.up, factors.down), backward, saves=(factors.up, factors.down))


def router_weight(step: Step, where: str, experts: Experts) -> Tensor:
    """The router's weight, with the product of its adapter's factors added if it has one."""
    weight = step.weight(f"{where}.router", experts.router_params)
    if "gate.weight" not in step.run.lora_target_modules:
        return weight
    tape, rank, dtype = step.tape, step.run.lora_r, step.autocast_dtype
    down = step.adapter(f"{where}.gate.lora_A", rank * experts.hidden_size)
    up = step.adapter(f"{where}.gate.lora_B", rank * experts.count)
    down, up = (ops.autocast_weight(tape, factor, dtype, step.cache) for factor in (down, up))
    delta = ops.matmul(tape, "router.lora", up, down, k=rank, n=experts.hidden_size)
    delta = ops.cast(tape, ops.scale(tape, delta, name="adapter_scale"), weight.dtype)
    ops.elementwise(tape, "router.fold", (weight, delta), weight.elements, weight.dtype)
    out = ops.add(tape, weight, delta, name="router.fold")
    tape.hold(delta)
    return out
