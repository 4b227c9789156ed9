"""Routed experts as grouped products over tokens sorted by expert, and the shared experts beside them.

Balanced routing is assumed where it matters (it does not to memory: all chosen tokens are sorted into one tensor).
Source: transformers 5 ``integrations/moe.py``, ``grouped_mm_experts_forward``: what it picks on a GPU of compute
capability 8.0 or later with torch 2.9 or later, and on a CPU with torch 2.11 or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_routing as routing
from tunecast.model.adapters_stacked import Factors, folded, prepared_factors
from tunecast.model.architecture import Layer
from tunecast.model.context import Step
from tunecast.model.linears import linear_map
from tunecast.model.mlp_blocks import dense_block, mlp_block
from tunecast.model.operation import Kind, Phase
from tunecast.model.routers import ROUTERS, Routes, sums_are_wide
from tunecast.model.shapes import Experts
from tunecast.model.tape import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The experts of one layer and the rows that each of them gets."""

    experts: Experts
    where: str
    ends: Tensor
    by_expert: Tensor
    factors: Mapping[str, Factors]
    """Adapters on the stacked weights, by part."""
    restored: list[Tensor] = field(default_factory=list)
    """Weights restored from 4 bits."""

    def bias_rows(self, step: Step, part: str, width: int) -> Tensor | None:
        """The bias of each row's expert, copied out; None where experts have none."""
        if not self.experts.bias:
            return None
        table = step.weight(f"{self.where}.experts.{part}.bias", self.experts.count * width)
        rows = self.by_expert.elements
        return routing.index(step.tape, table, self.by_expert, rows * width, name="experts.bias")

    def stack(self, step: Step, part: str) -> Tensor:
        """The ``up`` (gate and up) or ``down`` weights of all experts, restored from 4 bits if they are stored so:
        bitsandbytes keeps them to the end of the block."""
        elements = self.experts.up_params if part == "up" else self.experts.down_params
        if not step.run.quantize_moe_experts:
            return step.weight(f"{self.where}.experts.{part}", elements)
        nested = step.run.double_quant
        restored, _ = heavy.dequantized(step.tape, elements, step.run.experts_dtype, nested=nested, in_place=True)
        self.restored.append(restored)
        return restored

    def product(self, step: Step, part: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Every row times its expert's ``up`` (gate and up) or ``down`` weight, plus its bias."""
        tape, experts, rows = step.tape, self.experts, self.by_expert.elements
        k, n = experts.hidden_size, 2 * experts.intermediate_size
        if part == "down":
            k, n = experts.intermediate_size, experts.hidden_size
        if part in self.factors:
            weight = folded(step, part, weight, self.factors[part])
        entry = ops.cast(tape, x, weight.dtype)
        layout = "nn" if experts.clamped else "nt"
        grouping = routing.Grouping(experts=experts.count, offsets=self.ends, loops=step.run.loops_experts)
        made = routing.grouped_product(tape, f"experts.{part}", entry, weight, grouping, (rows, n, k), layout)
        return made if bias is None else routing.added_bias(tape, made, bias, name="experts.bias")


def experts_block(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """Router and routed experts; what shared experts make of the same input is added."""
    experts = layer.mlp.experts
    assert experts is not None
    routes = ROUTERS[experts.router](step, where, experts, x)
    out = routed(step, where, experts, x, routes)
    if layer.mlp.linears:
        out = ops.add(step.tape, out, mlp_block(step, f"{where}.shared_experts", layer, x), name="shared_add")
    step.tape.hold(routes.weights, routes.places, *routes.held)
    return out


def gated_shared_block(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """A shared expert, router and routed experts; the shared one's output times a gate is added (Qwen3.5 MoE).

    Source: transformers 5 ``modeling_qwen3_5_moe.py``, ``Qwen3_5MoeSparseMoeBlock``.
    """
    tape, experts = step.tape, layer.mlp.experts
    assert experts is not None
    *maps, to_gate = layer.mlp.linears
    shared = dense_block(step, f"{where}.shared_expert", layer, x, tuple(maps))
    routes = ROUTERS[experts.router](step, where, experts, x)
    out = routed(step, where, experts, x, routes)
    gate = routing.unary(tape, linear_map(step, where, to_gate, x), name="shared_gate")
    gated = ops.multiply(tape, shared, gate, name="shared_gate")
    tape.hold(shared)
    total = ops.add(tape, out, gated, name="shared_add")
    tape.hold(out, gated, routes.weights, routes.places)
    return total


def routed(step: Step, where: str, experts: Experts, x: Tensor, routes: Routes) -> Tensor:
    """Tokens sorted by expert, through gate, up and down, weighted, sorted back and added up per token."""
    tape, rows, hidden = step.tape, step.tokens * experts.per_token, experts.hidden_size
    factors = prepared_factors(step, where, experts)
    by_expert, order = sorted_by_expert(step, routes.places)
    sources = ops.elementwise(tape, "experts.token", (order,), rows, "int64")
    entry = routing.index(tape, x, sources, rows * hidden, name="experts.gather")
    weights = routing.index(tape, routes.weights, order, rows, name="experts.gather")
    counted, counts, ends = group_ends(step, experts, by_expert)
    group = Group(experts=experts, where=where, ends=ends, by_expert=by_expert, factors=factors)
    up, up_bias = group.stack(step, "up"), group.bias_rows(step, "up", 2 * experts.intermediate_size)
    both = group.product(step, "up", entry, up, up_bias)
    inner = clamped_gate(step, both) if experts.clamped else gated(step, both)
    down, down_bias = group.stack(step, "down"), group.bias_rows(step, "down", hidden)
    hold(step, up_bias)
    made = group.product(step, "down", inner, down, down_bias)
    released = tape.phase is Phase.RECOMPUTE and not step.run.reentrant
    weighted = routing.weighted_rows(tape, made, weights, name="experts.weight", released=released)
    back = inverse(step, order)
    restored = routing.index(tape, weighted, back, rows * hidden, name="experts.restore")
    summed = routing.sum_of_choices(tape, restored, x.elements, name="experts.sum", wide=sums_are_wide(step))
    out = ops.cast(tape, summed, x.dtype, name="experts.cast")
    tape.hold(order, by_expert, counted, counts, ends, back, entry, weights, made, restored, summed)
    hold(step, down_bias)
    tape.hold(*group.restored)
    for factor in factors.values():
        tape.hold(factor.up, factor.down, *factor.made)
    return out


def hold(step: Step, tensor: Tensor | None) -> None:
    """Say that a tensor, if there is one, is still referenced here."""
    if tensor is not None:
        step.tape.hold(tensor)


def clamped_gate(step: Step, both: Tensor) -> Tensor:
    """(up + 1) x gate x sigmoid(gate x alpha), gate and up interleaved in one product and clamped (gpt-oss)."""
    tape, name, half = step.tape, "swiglu", both.elements // 2
    gate, up = (ops.part(tape, both, half, name="gate_split") for _ in range(2))
    gate, up = routing.clamp(tape, gate, 1, name=name), routing.clamp(tape, up, 2, name=name)
    opened = routing.unary(tape, ops.scale(tape, gate, name=name), name=name)
    glu = ops.multiply(tape, gate, opened, name=name)
    inner = ops.multiply(tape, ops.shift(tape, up, name=name), glu, name=name)
    tape.hold(both, gate, up, glu)
    return inner


def gated(step: Step, both: Tensor) -> Tensor:
    """silu(gate) x up, halves of one product."""
    gate, up = ops.chunks(step.tape, both, 2, name="gate_split")
    inner = ops.multiply(step.tape, ops.activation(step.tape, gate, name="swiglu"), up, name="swiglu")
    step.tape.hold(both)
    return inner


def sorted_by_expert(step: Step, places: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen experts in order, and the order."""
    tape, rows = step.tape, places.elements
    by_expert, order = tape.empty(rows, "int64"), tape.empty(rows, "int64")
    tape.kernel("experts.sort", Kind.MEMORY, (places,), (by_expert, order))
    return by_expert, order


def group_ends(step: Step, experts: Experts, by_expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where each expert's rows end, last: the running sum of a histogram, in 32 bits."""
    tape = step.tape
    counted = ops.elementwise(tape, "experts.cast", (by_expert,), by_expert.elements, "fp32")
    counts = ops.elementwise(tape, "experts.count", (counted,), experts.count, "fp32")
    return counted, counts, ops.elementwise(tape, "experts.ends", (counts,), experts.count, "fp32")


def inverse(step: Step, order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    tape, rows = step.tape, order.elements
    back, count = tape.empty(rows, "int64"), ops.elementwise(tape, "experts.count", (), rows, "int64")
    tape.kernel("experts.order", Kind.MEMORY, (back, order, count), (back,))
    return back
