"""Experts as modules of their own, one after the other: transformers before 5.

Each expert is three linear maps that take adapters and few-bit storage like any other; tokens are gathered for one
expert at a time. Balanced routing is assumed: every expert gets its share of the rows.
Source: transformers 4.48 ``modeling_mixtral.py`` (``MixtralSparseMoeBlock``); ``qwen3_moe`` and ``olmoe`` are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model import primitives as ops
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Architecture, Layer, LayerGroup, Linear, Mlp
from tunecast.model.context import Step
from tunecast.model.linears import linear_map
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.routers import divided
from tunecast.model.shapes import Experts
from tunecast.model.stack_versions import code_age
from tunecast.model.tape import Grads, Tensor

NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}
"""Gate, up and down of an expert, by ``Experts.module_names``."""
KIND = "expert-modules"
PRESENT = "5"
"""``Run.hf_code`` of the transformers that stacks experts."""


def of_age(architecture: Architecture, options: Mapping[str, Any]) -> Architecture:
    """The architecture as the age of Hugging Face's code that the run options ask for builds it."""
    return architecture if code_age(options) in (None, PRESENT) else in_modules(architecture)


def in_modules(architecture: Architecture) -> Architecture:
    """The architecture with a linear map for each of an expert's, as transformers before 5 built it."""
    groups = [replace(group, layer=layer_in_modules(architecture, group)) for group in architecture.groups]
    return replace(architecture, groups=tuple(groups))


def layer_in_modules(architecture: Architecture, group: LayerGroup) -> Layer:
    """One layer with its experts taken apart; a dense one as it is."""
    layer, experts = group.layer, group.layer.mlp.experts
    if experts is None or layer.mlp.kind == KIND:
        return layer
    if experts.module_names not in NAMES or layer.mlp.linears:
        raise NotSupportedError(
            f"The experts of {architecture.name} as transformers before 5 ran them are not built; leave --hf-code out."
        )
    return replace(layer, mlp=mlp_in_modules(experts))


def mlp_in_modules(experts: Experts) -> Mlp:
    """Router, then every expert's three maps."""
    to_gate, to_up, to_down = NAMES[experts.module_names]
    hidden, inner = experts.hidden_size, experts.intermediate_size
    maps = (
        Linear(name=to_gate, in_features=hidden, out_features=inner),
        Linear(name=to_up, in_features=hidden, out_features=inner),
        Linear(name=to_down, in_features=inner, out_features=hidden),
    )
    router = Linear(name="gate", in_features=hidden, out_features=experts.count)
    return Mlp(
        linears=(router, *maps * experts.count),
        intermediate_size=inner,
        kind=KIND,
        experts=replace(experts, stacked=False, peft_names=""),
    )


def expert_modules_block(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """Router, then each expert over its rows, its result added to the tokens' sums; without rows only the look-up runs,
    since torch launches nothing over empty tensors."""
    tape, experts, hidden = step.tape, layer.mlp.experts, step.architecture.hidden_size
    assert experts is not None
    logits, weights, places = routed(step, where, layer.mlp.linears[0], experts, x)
    mask = ops.elementwise(tape, "experts.mask", (places,), places.elements * experts.count, "int64")
    total = ops.elementwise(tape, "experts.zeros", (), step.tokens * hidden, x.dtype)
    held: tuple[Tensor, ...] = ()
    for index in range(experts.count):
        rows = balanced_rows(places.elements, experts.count, index)
        chosen = found_rows(step, mask, rows)
        if not rows:
            continue
        entry = routing.index(tape, x, chosen, rows * hidden, name="experts.gather")
        tape.hold(*held[:1])
        made = one_expert(step, f"{where}.experts.{index}", layer.mlp.linears[1:4], entry)
        own = routing.index(tape, weights, chosen, rows, name="experts.gather")
        weighted = routing.weighted_rows(tape, made, own, name="experts.weight", released=False)
        tape.hold(*held[1:])
        held = entry, weighted
        total = added_rows(step, total, weighted, chosen)
    tape.hold(logits, weights, places, mask, *held)
    return total


def routed(step: Step, where: str, router: Linear, experts: Experts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, a token's weights in the activations' dtype, and the experts it goes to."""
    logits = linear_map(step, where, router, x)
    values = routing.softmax(step.tape, logits, name="router.softmax", dtype="fp32")
    values, places = routing.top_k(step.tape, values, step.tokens * experts.per_token)
    if experts.normalised:
        values = divided(step, values)
    return logits, ops.cast(step.tape, values, x.dtype, name="router.cast"), places


def balanced_rows(rows: int, experts: int, index: int) -> int:
    """One expert's share of the rows; the first ones take what is left over."""
    return rows // experts + (1 if index < rows % experts else 0)


def found_rows(step: Step, mask: Tensor, rows: int) -> Tensor:
    """The rows of one expert: ``torch.where``, for which the host waits."""
    chosen = ops.elementwise(step.tape, "experts.where", (mask,), 2 * rows, "int64")
    if step.platform == "cuda":
        step.tape.kernel(SYNCHRONISATION, Kind.MEMORY, (chosen,), (), n_bytes=2)
    return chosen


def one_expert(step: Step, where: str, maps: tuple[Linear, ...], x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    to_gate, to_up, to_down = maps
    gated = ops.activation(step.tape, linear_map(step, where, to_gate, x), name="swiglu")
    inner = ops.multiply(step.tape, gated, linear_map(step, where, to_up, x), name="swiglu")
    out = linear_map(step, where, to_down, inner)
    step.tape.hold(inner)
    return out


def added_rows(step: Step, total: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """``index_add_``: rows added into the tokens' sums in place; keeps the places, backward gathers the gradient."""
    tape = step.tape
    if tape.would_grad(x):
        tape.mark_saved()
    moved = 3 * x.bytes + places.bytes
    tape.kernel("experts.add", Kind.MEMORY, (total, x, places), (total,), n_bytes=moved)
    out = Tensor(total.elements, total.dtype, total.storage)

    def backward(grad: Tensor) -> Grads:
        return grad, ops.elementwise(tape, "experts.add", (grad, places), x.elements, grad.dtype)

    return tape.record(out, (total, x), backward, saves=(places,))
