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
from tunecast.model.primitives import gradient_gemm
from tunecast.model.shapes import FUSED_PARAMETER, Experts
from tunecast.model.tape import Grads, Tensor

PARTS = {"down": "experts.down_proj", "up": f"experts.{FUSED_PARAMETER}"}
"""Stacked parameters, the outer wrapper first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The two factors of an adapter in the weight's dtype, one matrix each per expert."""

    up: Tensor
    down: Tensor
    shape: tuple[int, int, int, int]
    """(rows, columns, rank) of one expert's product of them, and the experts."""
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
            shape=(out, into, rank, count),
        )
        product_onto(step, part, Tensor(count * into * out, step.run.dtype, None), found[part])
    return found


def product_onto(step: Step, part: str, weight: Tensor, factors: Factors) -> Tensor:
    """The weight plus the product of the factors, expert by expert, in new memory."""
    laid_out(step, part, factors)
    operands = (factors.up, factors.down)
    return ops.product_onto(step.tape, f"experts.{part}.fold", weight, operands, factors.shape, "nn")


def laid_out(step: Step, part: str, factors: Factors) -> None:
    """The copy that a GPU's product makes of the upper factor, of whose matrices no dimension is contiguous.

    Source: PyTorch ``Blas.cpp``, ``prepare_batch_matrix_for_cublas``.
    """
    if step.tape.platform == "cuda":
        moved = 2 * factors.up.bytes
        step.tape.kernel(f"experts.{part}.layout", Kind.MEMORY, (factors.up,), (), n_bytes=moved)


def folded(step: Step, part: str, weight: Tensor, factors: Factors) -> Tensor:
    """The weight with its adapter; backward: a product for each factor with the whole weight's gradient."""
    tape, (m, n, k, count) = step.tape, factors.shape
    if tape.would_grad(factors.up, factors.down):
        tape.mark_saved()
    out = product_onto(step, part, weight, factors)
    name = f"experts.{part}.fold"

    def backward(grad: Tensor) -> Grads:
        to_up = gradient_gemm(tape, name, grad, factors.down, (m, k, n, count), "nt")
        laid_out(step, part, factors)
        to_down = gradient_gemm(tape, name, grad, factors.up, (k, n, m, count), "nn")
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
